"""How flat buffers are summed and copied between ranks: one interface, three ways.

    SharedMemory    ranks of one host, tensors on the CPU: no byte leaves the memory they share
    BetweenHosts    several hosts: shared memory inside each, c10d between one leader per host
    C10d            everything else: `torch.distributed` does it

A transport works in place, asynchronously, in the order in which things are started. An object of
the caller's own with the three methods of `Transport` does as well.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
