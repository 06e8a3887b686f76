"""How buckets are summed and tensors are copied between ranks: one interface, three ways.

    SharedMemory    ranks of one host, tensors on the CPU: no byte leaves the memory they share
    BetweenHosts    several hosts: shared memory inside each, c10d between one leader per host
    C10d            everything else: `torch.distributed` does it

A transport sums a bucket in place, asynchronously, in the order in which buckets are started.
`TransportChoice` decides once per model, by agreement of all ranks, and says why.
"""

from paceline.transport.choice import Kind as Kind
from paceline.transport.choice import TransportChoice as TransportChoice
from paceline.transport.choice import check_kind as check_kind
from paceline.transport.interface import Transport as Transport
