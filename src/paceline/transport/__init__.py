"""How flat buffers are summed and copied between ranks: one interface, three ways.

    SharedMemory    ranks of one host, tensors on the CPU: no byte leaves the memory they share
    BetweenHosts    several hosts: shared memory inside each, c10d between one leader per host
    C10d            everything else: `torch.distributed` does it

A transport works in place, asynchronously, in the order in which things are started. An object of
the caller's own with the four methods of `Transport` does as well.
"""

from paceline.transport.interface import Buckets as Buckets
from paceline.transport.interface import Reduction as Reduction
from paceline.transport.interface import Transport as Transport
from paceline.transport.interface import describe as describe
from paceline.transport.interface import mean_factor as mean_factor
from paceline.transport.interface import place as place
from paceline.transport.select import Kind as Kind
from paceline.transport.select import TransportChoice as TransportChoice
from paceline.transport.select import check_transport as check_transport
