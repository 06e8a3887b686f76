"""Ranks of one host: buffers are summed and copied through memory that they share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.transport.c10d import C10d
from paceline.transport.flat import Flat
from paceline.transport.interface import Buckets, Reduction, Scattered
from paceline.transport.peers import Peers
from paceline.transport.segment import Hosts, Segment, share_segment
from paceline.transport.shared_buckets import SLOT_BYTES, SLOTS, Channel, SharedBuckets, SharedSum

KEPT_BUFFERS = 4
"""So many sizes of buffers that were not placed keep their memory."""

log = logging.getLogger("paceline.transport")


class SharedMemory:
    """All ranks are on one host.

    If memory for some buffers cannot be had, it says so once and leaves them to c10d.
    """

    has_cheap_messages = True

    def __init__(self, group: Group, hosts: Hosts, peers: Peers, channel: Channel) -> None:
        self.description = f"shared memory between the {group.size()} ranks of this host"
        self.group = group
        self.hosts = hosts
        self.peers = peers
        self.channel = channel
        self._kept: dict[Flat, SharedBuckets | C10d] = {}
        """By size and dtype, memory for buffers that were not placed."""
        self._under_way: dict[Flat, SharedSum] = {}
        """What was last started in each."""
        self._has_complained = False
        weakref.finalize(self, peers.close)

    def place(self, flats: Sequence[Flat], what: str) -> Buckets:
        """Memory in which buckets are summed where they lie."""
        found = self._share(flats, what)
        return Scattered(found, len(flats)) if isinstance(found, C10d) else found

    def sum(self, flat: Tensor, what: str) -> Reduction:
        return self._move("sum", flat, what)

    def scatter_sum(self, flat: Tensor, what: str) -> Reduction:
        return self._move("scatter_sum", flat, what)

    def gather(self, flat: Tensor, what: str) -> Reduction:
        return self._move("gather", flat, what)

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        self.channel.copy(flat.view(torch.uint8), root, what)

    def make_buckets(self, segment: Segment, flats: Sequence[Flat]) -> SharedBuckets:
        return SharedBuckets(segment, flats, self.hosts.neighbours, self.group, self.peers)

    def meet(self, what: str, look: Callable[[], None] = lambda: None) -> None:
        """To be called before waiting in the process group, which notices no stopped rank."""
        self.channel.meet(what, look)

    def _share(self, flats: Sequence[Flat], what: str) -> SharedBuckets | C10d:
        self.meet(what)
        sizes = [flat.nbytes for flat in flats]
        segment, problem = share_segment(self.group, self.hosts, sizes, what)
        if segment is not None:
            return self.make_buckets(segment, flats)
        if not self._has_complained and self.group.rank() == 0:
            log.warning("Gradients go through c10d instead of shared memory: %s.", problem)
        self._has_complained = True
        self.description = f"c10d: {problem}"
        return C10d(self.group, problem)

    def _move(self, method: str, tensor: Tensor, what: str) -> Reduction:
        """Let a buffer that was not placed go through memory of its size, one at a time."""
        flat = Flat(tensor.numel(), tensor.dtype, tensor.device)
        if flat in self._under_way:
            self._under_way.pop(flat).wait()
        memory = self._memory_for(flat, what)
        if isinstance(memory, C10d):
            started: Reduction = getattr(memory, method)(tensor, what)
            return started
        work = {
            "sum": memory.sum_slice,
            "scatter_sum": memory.sum_own_slice,
            "gather": memory.take_slices,
        }
        self._under_way[flat] = memory.begin(0, tensor, work[method], what)
        return self._under_way[flat]

    def _memory_for(self, flat: Flat, what: str) -> SharedBuckets | C10d:
        """What was used longest ago gives way; all ranks ask for the same in the same order."""
        found = self._kept.pop(flat, None)
        if found is None:
            while len(self._kept) >= KEPT_BUFFERS:
                oldest = next(iter(self._kept))
                if oldest in self._under_way:
                    self._under_way.pop(oldest).wait()
                del self._kept[oldest]
            found = self._share([flat], what)
        self._kept[flat] = found
        return found


def open_channel(group: Group, hosts: Hosts, peers: Peers) -> tuple[Channel | None, str]:
    """A channel on every host of the group, or the reason why there is none."""
    segment, problem = share_segment(group, hosts, [SLOT_BYTES] * SLOTS, "Sharing memory")
    if segment is None:
        return None, problem
    return Channel(segment, hosts.neighbours, group, peers), ""
