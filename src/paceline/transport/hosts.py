"""Ranks that share memory: of one host, or of several, with c10d between one leader per host.

    ready --(slices summed into the leader's bucket)--> summed on this host
          --(the leaders' all-reduce)--> arrived --(every rank copies the leader's)--> the sum

Only the leaders' sums cross the network, once per host instead of once per rank.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.group import Pending, broadcast, explain_failure, gloo_subgroup, have_left
from paceline.transport.interface import Buckets, C10d, Flat, Reduction, Scattered
from paceline.transport.segment import COPIED, Hosts, Segment, share_memory, share_segment
from paceline.transport.shared_buckets import (
    WORDS_EVERY_S,
    HostChannel,
    Peers,
    SharedBuckets,
    SharedSum,
    Work,
)

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

    def meet(self, what: str, look: Callable[[], object] = bool) -> None:
        """To be called before waiting in the process group, which notices no stopped rank."""
        self.channel.meet(what, look)


class BridgedBuckets(SharedBuckets):
    """Buckets that are summed on this host first, and then with those of the other hosts."""

    applies_weights = False  # this host does not know the weights of the others
    writes_to_all = False  # they copy the leader's, once it holds the sum of all hosts

    def __init__(self, segment: Segment, flats: Sequence[Flat], peers: Peers, leaders: Any) -> None:
        super().__init__(segment, flats, peers)
        self._leaders = leaders
        self._copied = segment.places.rows[COPIED]
        """The leader's says that the sum has arrived; the others' that they have taken it."""
        self._unsent: deque[tuple[int, str]] = deque()
        self._sent: deque[tuple[int, int, Pending, str]] = deque()
        self._abroad = [rank for rank in range(self._size) if rank not in peers.ranks]
        self._awaited = (0, 0)
        """Which bucket, in which turn, was on its way when this leader last waited."""
        self._look_at_s = 0.0

    def begin(self, number: int, buffer: Tensor, work: Work, what: str) -> SharedSum:
        if self.position == 0:
            self._unsent.append((number, what))
        return super().begin(number, buffer, work, what)

    def gather(self, number: int, buffer: Tensor, what: str) -> Reduction:
        return C10d(self.group, "slices belong to single ranks").gather(buffer, what)

    def advance(self) -> None:
        super().advance()
        while self._unsent and self._is_summed_here(self._unsent[0][0]):
            number, what = self._unsent.popleft()
            what = f"{what}, between hosts,"
            flat = self._leaders_bucket(number)
            try:
                work = self._leaders.allreduce([flat])
            except RuntimeError as error:
                raise explain_failure(self.group, what, error) from error
            pending = Pending(work, self.group, what, flat.is_cpu)
            self._sent.append((number, self.turns[number], pending, what))
        while self._sent and self._sent[0][2].is_completed():
            number, turn, pending, _ = self._sent.popleft()
            pending.wait()
            self.words[self._copied[0] + number] = turn

    def has_arrived(self, number: int, turn: int) -> bool:
        # The leader's gradients are what the others copy: it may not touch them before all have.
        rows = [self._copied[self.position]] if self.position else self._copied
        return all(self.words[row + number] >= turn for row in rows)

    def is_done(self, number: int, turn: int) -> bool:
        self.advance()
        words, mine = self.words, self._copied[self.position] + number
        if words[self._copied[0] + number] < turn:
            if self._sent:
                self._look_abroad()
            return False
        if self.position and words[mine] < turn:
            is_private = words[self.ready[self.position] + number] & 1
            own = self.spare(number) if is_private else self.homes[number]
            own.copy_(self._leaders_bucket(number))
            words[mine] = turn
        return self.has_arrived(number, turn)

    def missing(self, number: int, turn: int) -> list[int]:
        waits_for = self._copied if self.position == 0 else self._copied[:1]
        return super().missing(number, turn) or self._behind(waits_for, number, turn)

    def _look_abroad(self) -> None:
        """Raise if a rank of another host has given up, while its leader's connection stands.

        A leader that is stopped is noticed by its neighbours only; this is how others hear of it.
        """
        number, turn, _, what = self._sent[0]
        now_s = time.monotonic()
        if self._awaited != (number, turn):
            self._awaited, self._look_at_s = (number, turn), now_s + WORDS_EVERY_S
        elif now_s > self._look_at_s:
            self._look_at_s = now_s + WORDS_EVERY_S
            if have_left(self.group, self._abroad):
                cause = RuntimeError("a rank of another host has left")
                raise explain_failure(self.group, what, cause)

    def _is_summed_here(self, number: int) -> bool:
        return super().has_arrived(number, self.turns[number])

    def _leaders_bucket(self, number: int) -> Tensor:
        is_spare = bool(self.words[self.ready[0] + number] & 1)
        return self.bucket(0, number, is_spare=is_spare)


class BetweenHosts(SharedMemory):
    """Ranks on several hosts, at least two of them on one."""

    def __init__(self, hosts: Hosts, peers: Peers, channel: HostChannel, name: str) -> None:
        super().__init__(hosts, peers, channel)
        group = self.group
        count = len(hosts.ranks_by_host)
        self.description = f"shared memory on each of {count} hosts, c10d between their leaders"
        self._leaders: Any = None
        if group.rank() in hosts.leaders:
            self._leaders = gloo_subgroup(group, hosts.leaders, name)

    def make_buckets(self, segment: Segment, flats: Sequence[Flat]) -> SharedBuckets:
        return BridgedBuckets(segment, flats, self.peers, self._leaders)

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        """From the root to its host, from its leader to the other leaders, from these to all."""
        hosts, source, tensor = self.hosts, self.hosts.host_of(root), flat.view(torch.uint8)
        if hosts.mine == source:
            self.channel.copy(tensor, root, what)
        if self._leaders is not None:
            broadcast(self._leaders, tensor, source, what, blame=self.group)
        if hosts.mine != source:
            self.channel.copy(tensor, hosts.neighbours[0], what)
