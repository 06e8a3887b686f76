"""Summing and copying between the ranks of one host, through memory that they share."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Group
from paceline.gradients.backward import Reduction
from paceline.gradients.plan import BucketPlan
from paceline.transport.channel import SLOT_BYTES, SLOTS, Channel
from paceline.transport.hosts import Hosts
from paceline.transport.peers import Peers
from paceline.transport.segment import Segment, share_segment
from paceline.transport.shared_buckets import SUMMED_IN_FLOAT32, SharedBuckets

log = logging.getLogger("paceline.transport")


class SharedMemory:
    """All ranks are on one host.

    If memory for a layout cannot be had, it says so once and leaves that layout to c10d.
    """

    has_cheap_messages = True

    def __init__(self, group: Group, hosts: Hosts, peers: Peers, channel: Channel) -> None:
        self.description = f"shared memory between the {group.size()} ranks of this host"
        self.group = group
        self.hosts = hosts
        self.peers = peers
        self.channel = channel
        self._buckets: SharedBuckets | None = None
        self._has_complained = False
        weakref.finalize(self, peers.close)

    @property
    def applies_weights(self) -> bool:
        return self._buckets is not None and self._buckets.applies_weights

    def divides(self, dtype: torch.dtype) -> bool:
        return self._buckets is not None and dtype in SUMMED_IN_FLOAT32

    def place(self, plans: Sequence[BucketPlan], what: str) -> Sequence[Tensor | None]:
        self._buckets = None
        self.channel.meet(what)
        sizes = [(plan.numel + plan.trailer) * plan.dtype.itemsize for plan in plans]
        segment, problem = share_segment(self.group, self.hosts, sizes, what)
        if segment is None:
            self._complain(problem)
            return [None] * len(plans)
        self._buckets = self.make_buckets(segment, plans)
        return self._buckets.homes

    def make_buckets(self, segment: Segment, plans: Sequence[BucketPlan]) -> SharedBuckets:
        ranks = self.hosts.neighbours
        position = ranks.index(self.group.rank())
        return SharedBuckets(segment, plans, ranks, position, self.group.size(), self.peers)

    def start(self, number: int, buffer: Tensor, weight: float, what: str) -> Reduction:
        if self._buckets is None:
            return comm.start_all_reduce(self.group, buffer, what)
        return self._buckets.start(number, buffer, weight, what)

    def broadcast(self, tensor: Tensor, root: int, what: str) -> None:
        self.channel.broadcast(tensor, root, what)

    def _complain(self, problem: str) -> None:
        if not self._has_complained and self.group.rank() == 0:
            log.warning("Gradients go through c10d instead of shared memory: %s.", problem)
        self._has_complained = True
        self.description = f"c10d: {problem}"


def open_channel(group: Group, hosts: Hosts, peers: Peers) -> tuple[Channel | None, str]:
    """A channel on every host of the group, or the reason why there is none."""
    segment, problem = share_segment(group, hosts, [SLOT_BYTES] * SLOTS, "Sharing memory")
    if segment is None:
        return None, problem
    ranks = hosts.neighbours
    return Channel(group, segment, ranks, ranks.index(group.rank()), peers), ""
