"""Ranks of one host: buffers are summed and copied through memory that they share."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.transport.c10d import C10d
from paceline.transport.interface import Buckets, Flat, Reduction, Scattered
from paceline.transport.segment import Hosts, Segment, share_memory, share_segment
from paceline.transport.shared_buckets import HostChannel, Peers, SharedBuckets

log = logging.getLogger("paceline.transport")


class SharedMemory:
    """All ranks are on one host.

    Buckets are placed in memory that the ranks share. Buffers that were not placed, and buckets for
    which no memory can be had, are left to c10d.
    """

    has_cheap_messages = True

    def __init__(self, hosts: Hosts, peers: Peers, channel: HostChannel) -> None:
        self.group = peers.group
        self.description = f"shared memory between the {self.group.size()} ranks of this host"
        self.hosts = hosts
        self.peers = peers
        self.channel = channel
        self._unplaced = C10d(self.group, "it was not placed")
        self._has_complained = False
        weakref.finalize(self, peers.close)

    def place(self, flats: Sequence[Flat], what: str) -> Buckets:
        """Memory in which buckets are summed where they lie."""
        self.meet(what)
        sizes = [flat.nbytes for flat in flats]
        segment, problem = share_segment(self.group, self.hosts, sizes, what)
        if segment is not None:
            return self.make_buckets(segment, flats)
        if not self._has_complained and self.group.rank() == 0:
            log.warning("Gradients go through c10d instead of shared memory: %s.", problem)
        self._has_complained = True
        self.description = f"c10d: {problem}"
        return Scattered(self._unplaced, len(flats))

    def share(self, used_bytes: int, total_bytes: int, what: str) -> mmap.mmap | None:
        """Memory that all ranks map, and that outlives each of them; all begin to use it together.

        None where it is not to be had. Its first line is taken.
        """
        self.meet(what)
        return share_memory(self.group, self.hosts, used_bytes, total_bytes, what)[0]

    def sum(self, flat: Tensor, what: str) -> Reduction:
        self.meet(what)
        return self._unplaced.sum(flat, what)

    def gather(self, flat: Tensor, what: str) -> Reduction:
        self.meet(what)
        return self._unplaced.gather(flat, what)

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        self.channel.copy(flat.view(torch.uint8), root, what)

    def make_buckets(self, segment: Segment, flats: Sequence[Flat]) -> SharedBuckets:
        return SharedBuckets(segment, flats, self.peers)

    def meet(self, what: str, look: Callable[[], None] = lambda: None) -> None:
        """To be called before waiting in the process group, which notices no stopped rank."""
        self.channel.meet(what, look)
