"""Buckets in memory that the ranks of one host share: summed, copied, and waited for.

    filled --(start)--> ready on this rank --(all ready, this rank comes by)--> its slice summed
           --(all slices summed)--> the sum

Every rank's bucket lies in the segment, and its gradients are views of it. When a bucket is ready
on all ranks, each sums its own slice of all buckets and writes the sum back to all. No rank
waits before the end of backward: what can be summed is summed whenever this rank comes by.

A rank that waits looks at flags in shared memory. It first looks again and again, then gives its
core away between looks, then sleeps, longer and longer. Meanwhile it watches the processes
behind the flags: one that has ended, was stopped, or has left word of its failure will not answer.

Invariant: ranks are added up in rank order whichever rank adds, so the result has the same bits on
every rank and in every run.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline import env
from paceline.errors import DesyncError, PeerError
from paceline.group import Group, explain_failure, have_left, is_aborted, waiting, world_ranks
from paceline.torch_private import group_timeout_s
from paceline.transport.interface import Flat, Reduction, mean_factor, slices
from paceline.transport.segment import ALIVE, COPIED, FAILED, READY, SUMMED, WEIGHT, Segment

SLOT_BYTES = 2**20
SLOTS = [Flat(SLOT_BYTES, torch.uint8, torch.device("cpu"))] * 2
"""Through which a channel copies."""
SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)
"""In their own precision small ranks' gradients would vanish in the sum."""
MIN_SLICE_NUMEL = 4096
"""Smaller parts cost more to hand over than to sum."""
CHUNK_NUMEL = 65_536
"""Summed at a time, so that what was just read is still in the cache when it is written."""

SPIN_S = 0.001
"""How long to look without sleeping where every rank has a core of its own."""
FIRST_SLEEP_S, LONGEST_SLEEP_S = 50e-6, 1e-3
LOOK_EVERY_S = 0.02
"""How often to look after the processes while sleeping."""
STOPPED_PATIENCE_S = 10.0
"""A process that is stopped for longer, while this one runs, does not count as alive."""
WORDS_EVERY_S = 1.0  # each time the store is asked for them
DEFAULT_TIMEOUT_S = 1800.0

Chunk = tuple[tuple[Tensor, ...], bool]
"""One piece of every rank's bucket, and whether it holds gradients."""
Work = Callable[[int], None]
"""What a rank does for a bucket, by its number."""


class SharedBuckets:
    """The buckets of all ranks of this host, of one layout, seen from one rank.

    `position` is this rank's place among the peers.
    """

    applies_weights = True
    writes_to_all = True
    """Whether the sum is written to every rank's bucket, and not only to the first one's."""

    def __init__(self, segment: Segment, peers: Peers) -> None:
        self.group, self.ranks = group, ranks = peers.group, peers.ranks
        self.position = position = ranks.index(group.rank())
        self._size: int = group.size()
        self.homes = segment.join(self, position)
        """Where this rank's buckets lie; nothing here keeps another reference to their storage."""
        self._addresses = [home.data_ptr() for home in self.homes]
        self.peers = peers
        self.segment = segment
        self.words = segment.words
        self._status, rows = segment.places.status, segment.places.rows
        self.ready, self.summed, self._weight = rows[READY], rows[SUMMED], rows[WEIGHT]
        self.turns = [0] * len(segment.flats)
        """By bucket, how often it was started."""
        self._started: deque[tuple[int, Work]] = deque()
        """Buckets that wait for this rank's part of the work, and what that is."""
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        self._wide = torch.empty(0, dtype=torch.float32)

    def divides(self, dtype: torch.dtype) -> bool:
        return dtype in SUMMED_IN_FLOAT32

    def start(self, number: int, buffer: Tensor, weight: float, what: str) -> SharedSum:
        """Average one bucket over all items, as far as `applies_weights` and `divides` say."""
        self.segment.weights[self._weight[self.position] + number] = weight
        return self.begin(number, buffer, self._average_slice, what)

    def gather(self, number: int, buffer: Tensor, what: str) -> Reduction:
        return self.begin(number, buffer, self._take_slices, what)

    def begin(self, number: int, buffer: Tensor, work: Work, what: str) -> SharedSum:
        """Give one bucket to all ranks, for `work` on it; it may lie in memory of its own."""
        if not self.has_arrived(number, self.turns[number]):
            self.fail()
            raise DesyncError(
                f"{what} cannot start: an earlier one was given up before all ranks had summed it.",
                advice="After an error in a backward pass that was not averaged, end the program.",
            )
        turn = self.turns[number] = self.turns[number] + 1
        # The home itself may have moved: sharing a gradient with another process does that.
        is_private = buffer.data_ptr() != self._addresses[number]
        if is_private:
            self.spare(number).copy_(buffer)
        # Written last: others read the bucket as soon as they see it. The lowest bit says in which
        # memory it lies.
        self.words[self.ready[self.position] + number] = 2 * turn + is_private
        self._started.append((number, work))
        try:
            self.advance()
        except BaseException:
            self.fail()
            raise
        return SharedSum(self, number, turn, buffer if is_private else None, what)

    def advance(self) -> None:
        """Do this rank's part for the buckets that are ready everywhere."""
        while self._started and self._is_ready(self._started[0][0]):
            number, work = self._started.popleft()
            work(number)
            self.words[self.summed[self.position] + number] = self.turns[number]

    def has_arrived(self, number: int, turn: int) -> bool:
        """Whether this rank's bucket holds the sum; looks, and does nothing for it."""
        words = self.words
        for row in self.summed:  # noqa: SIM110  no generator: this is asked while spinning
            if words[row + number] < turn:
                return False
        return True

    def is_done(self, number: int, turn: int) -> bool:
        """Whether the whole bucket is summed, after doing what this rank can do for it."""
        if self._started:
            self.advance()
        return self.has_arrived(number, turn)

    def missing(self, number: int, turn: int) -> list[int]:
        """The ranks that a bucket waits for."""
        not_ready = self._behind(self.ready, number, 2 * turn)
        return not_ready or self._behind(self.summed, number, turn)

    def _behind(self, rows: Sequence[int], number: int, least: int) -> list[int]:
        """The ranks whose word for a bucket has not come that far."""
        words = self.words
        return [r for r, row in zip(self.ranks, rows, strict=False) if words[row + number] < least]

    def overtaking(self) -> list[int]:
        """The ranks that have begun a turn of the last bucket which this one has not."""
        last = len(self.turns) - 1
        rows = zip(self.ranks, self.ready, strict=True)
        return [rank for rank, row in rows if self.words[row + last] >> 1 > self.turns[last]]

    def has_left(self, rank: int) -> bool:
        return bool(self.words[self._status[self.ranks.index(rank)]] != ALIVE)

    def fail(self) -> None:
        """Tell the others not to wait for this rank any more."""
        self.words[self._status[self.position]] = FAILED

    def wait(
        self, is_done: Callable[[], bool], missing: Callable[[], list[int]], what: str
    ) -> None:
        """Wait until `is_done()`; if that fails, tell the others so."""
        try:
            if not is_done():
                self.peers.wait(is_done, missing, self.has_left, what)
        except BaseException:
            self.fail()
            raise

    def spare(self, number: int) -> Tensor:
        """Where this rank's bucket is handed over while its home is still in use."""
        return self.segment.bucket(self.position, number, spare=True)

    def _is_ready(self, number: int) -> bool:
        words, turn = self.words, self.turns[number]
        for row in self.ready:  # noqa: SIM110
            if words[row + number] >> 1 < turn:
                return False
        return True

    def _average_slice(self, number: int) -> None:
        """Sum this rank's slice of all ranks' buckets; 16-bit sums are divided by the size."""
        is_wide = self.segment.flats[number].dtype in SUMMED_IN_FLOAT32
        factor = 1.0
        if self.applies_weights:
            weight = sum([self.segment.weights[row + number] for row in self._weight])
            factor = 1.0 if weight == self._size else mean_factor(self._size, weight)
        if is_wide:
            factor /= self._size
        for tensors, is_scaled in self.chunks(number):
            total = self._widened(tensors[0]) if is_wide else tensors[0]
            for tensor in tensors[1:]:
                total.add_(tensor)
            if factor != 1.0 and (is_scaled or is_wide):
                total.mul_(factor)
            if is_wide:
                tensors[0].copy_(total)
            for tensor in tensors[1:] if self.writes_to_all else ():
                tensor.copy_(total)

    def _take_slices(self, number: int) -> None:
        """Copy every other rank's own slice from its bucket."""
        buckets = self._buckets_of_all(number)
        cut = slices(self.segment.flats[number].length, len(self.ranks))
        for position, (start, stop) in enumerate(cut):
            if position != self.position:
                buckets[self.position][start:stop].copy_(buckets[position][start:stop])

    def _widened(self, tensor: Tensor) -> Tensor:
        if self._wide.numel() == 0:
            self._wide = torch.empty(CHUNK_NUMEL, dtype=torch.float32)
        return self._wide[: tensor.numel()].copy_(tensor)

    def chunks(self, number: int) -> list[Chunk]:
        """This rank's slice of all ranks' buckets, in pieces."""
        # One bit per rank: in which of its two places in the segment its bucket lies.
        spares = sum([(self.words[row + number] & 1) << p for p, row in enumerate(self.ready)])
        found = self._chunks.get((number, spares))
        if found is None:
            found = self._chunks[number, spares] = self._make_chunks(number)
        return found

    def _make_chunks(self, number: int) -> list[Chunk]:
        flat, buckets = self.segment.flats[number], self._buckets_of_all(number)
        start, stop = plan_slices(flat.length, len(self.ranks), number)[self.position]
        return [
            (tuple(bucket[begin:end] for bucket in buckets), is_scaled)
            for begin, end, is_scaled in plan_chunks(start, stop, flat.numel)
        ]

    def _buckets_of_all(self, number: int) -> list[Tensor]:
        """Every rank's bucket, where that rank has put it in this turn."""
        return [
            self.segment.bucket(position, number, spare=bool(self.words[row + number] & 1))
            for position, row in enumerate(self.ready)
        ]


@dataclass(slots=True, eq=False)
class SharedSum:
    """One bucket on its way; `wait()` leaves the sum where the bucket is."""

    _buckets: SharedBuckets
    _number: int
    _turn: int
    _private: Tensor | None
    _what: str

    def missing(self) -> list[int]:
        """The ranks that it waits for."""
        return self._buckets.missing(self._number, self._turn)

    def is_completed(self) -> bool:
        """Whether the sum is there; looks, and does nothing for it."""
        return self._buckets.has_arrived(self._number, self._turn)

    def wait(self) -> None:
        is_done = partial(self._buckets.is_done, self._number, self._turn)
        self._buckets.wait(is_done, self.missing, self._what)
        if self._private is not None:
            self._private.copy_(self._buckets.spare(self._number))
            self._private = None


class HostChannel(SharedBuckets):
    """Copies tensors from one rank to the others of its host, through two slots of each rank.

    The root writes a piece into its slot and continues; it waits only when both slots are still
    being read. So a rank that has something to tell does not wait for those that listen late.
    """

    def __init__(self, segment: Segment, peers: Peers) -> None:
        super().__init__(segment, peers)
        self._turn = 0
        self._written = [0] * len(SLOTS)
        """By slot, the turn in which this rank last wrote into it."""
        self._others = [p for p in range(len(self.ranks)) if p != self.position]
        self._met = segment.places.rows[COPIED]
        self._meetings = 0
        with _lock:
            _channels.add(self)

    def copy(
        self, tensor: Tensor, root: int, what: str, ahead: Callable[[], Sequence[int]] = list
    ) -> None:
        """Overwrite `tensor`, flat bytes, with that of rank `root` of this host, unless it is
        `ahead`: waits for this rank in a backward pass."""
        source, mine = self.ranks.index(root), self.position

        def look() -> None:
            waits = self.words[self._met[source]] > self._meetings or root in ahead()
            # In this order: what it has written up to here was written before it began to wait.
            if waits and self.words[self.ready[source] + slot] < self._turn:
                raise DesyncError(
                    f"{what} on rank {self.group.rank()} waits for rank {root}, which waits in "
                    "its backward pass for this one.",
                    advice="Run the same forward and backward passes on every rank: leave a batch "
                    "out, for example because its loss is NaN, on all of them or on none.",
                )

        for start in range(0, tensor.numel(), SLOT_BYTES):
            piece = tensor[start : start + SLOT_BYTES]
            self._turn += 1
            slot, words = self._turn % len(SLOTS), self.words
            if source == mine:
                read = [(p, self.summed[p] + slot, self._written[slot]) for p in self._others]
                self._wait_for(read, what)
                self.homes[slot][: piece.numel()].copy_(piece)
                words[self.ready[mine] + slot] = self._written[slot] = self._turn
            else:
                self._wait_for([(source, self.ready[source] + slot, self._turn)], what, look)
                theirs = self.segment.bucket(source, slot)
                piece.copy_(theirs[: piece.numel()])
                words[self.summed[mine] + slot] = self._turn

    def meet(self, what: str, look: Callable[[], object] = bool) -> None:
        """Wait until all ranks of this host have met as often as this one has, for any model.

        `look` is called again and again, and may raise where the others will not come.

        Ranks that are at different models must not wait for each other here: they find out next.
        To be called before waiting in a process group, which does not notice a stopped rank.
        """
        with _lock:
            ours = [channel for channel in _channels if channel.group is self.group]
        for channel in ours:
            channel._meetings += 1
            channel.words[channel._met[channel.position]] = channel._meetings
        with waiting(self.group):
            wanted = [(p, self._met[p], self._meetings) for p in self._others]
            self._wait_for(wanted, what, look)

    def _wait_for(
        self,
        wanted: Sequence[tuple[int, int, int]],
        what: str,
        look: Callable[[], object] = bool,
    ) -> None:
        """Wait until each of the words (of a rank's position) has reached its turn."""

        def late() -> list[int]:
            return [self.ranks[p] for p, index, turn in wanted if self.words[index] < turn]

        def is_done() -> bool:
            look()
            return not late()

        self.wait(is_done, late, what)


_channels: weakref.WeakSet[HostChannel] = weakref.WeakSet()
"""All of this process: a model has one, and ranks can be threads."""
_lock = threading.Lock()


class Peers:
    """The ranks of a group that are on this host, in rank order, and their processes."""

    def __init__(self, group: Group, ranks: Sequence[int], pids: Sequence[int]) -> None:
        self.group, self.ranks = group, ranks
        self._timeout_s = group_timeout_s(group) or DEFAULT_TIMEOUT_S
        self._pid_by_rank = dict(zip(ranks, pids, strict=True))
        others = sorted({pid for pid in pids if pid != os.getpid()})
        # Opened while they live: later the number may be another process's.
        self._watched = {os.pidfd_open(pid): pid for pid in others}
        self._poll = select.poll()
        for descriptor in self._watched:
            self._poll.register(descriptor, select.POLLIN)
        cores = len(os.sched_getaffinity(0))
        # Ranks that are threads of one process take turns in Python anyway.
        is_roomy = len(ranks) <= cores and len(others) == len(ranks) - 1
        self._spin_s = SPIN_S if is_roomy else 0.0

    def close(self) -> None:
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched = {}

    def wait(
        self,
        is_done: Callable[[], bool],
        missing: Callable[[], list[int]],
        has_left: Callable[[int], bool],
        what: str,
    ) -> None:
        """Return when `is_done()`; raise if one of the `missing()` ranks will never answer.

        `is_done` may do work of its own, and is called between the looks.
        """
        yields = os.sched_yield if self._spin_s else _let_others_run
        begin = time.perf_counter()
        while not is_done():
            yields()
            if time.perf_counter() - begin > self._spin_s:
                break
        else:
            return
        nap_s, waited_s, stopped_s, looked_s = FIRST_SLEEP_S, 0.0, 0.0, 0.0
        words_at_s = WORDS_EVERY_S
        before = time.monotonic()
        while not is_done():
            time.sleep(nap_s)
            nap_s = min(LONGEST_SLEEP_S, nap_s * 1.2)
            now = time.monotonic()
            # Time in which this process itself was stopped does not count against the others.
            passed_s, before = min(now - before, 0.1), now
            waited_s += passed_s
            if waited_s < looked_s:
                continue
            looked_s = waited_s + LOOK_EVERY_S
            late = missing()
            stopped_s = stopped_s + LOOK_EVERY_S if self._is_any_stopped(late) else 0.0
            reason = self._why_gone(late, has_left)
            if not reason and is_aborted():  # those who are late may wait for this one elsewhere
                reason = "the group is given up"
            if not reason and stopped_s > STOPPED_PATIENCE_S:
                reason = f"a process was stopped for {STOPPED_PATIENCE_S:g} s"
            if not reason and waited_s > self._timeout_s:
                reason = f"nothing arrived for {self._timeout_s:g} s"
            if not reason and waited_s > words_at_s:
                words_at_s = waited_s + WORDS_EVERY_S
                reason = "it left word" if have_left(self.group, late) else ""
            # What is waited for may have come before its rank went.
            if reason and not is_done():
                raise self._explain(what, reason, missing())

    def is_gone(self, rank: int) -> bool:
        """Whether the process of a rank has ended, or is stopped."""
        return bool(self._why_gone([rank], lambda _: False)) or self._is_any_stopped([rank])

    def _why_gone(self, ranks: Sequence[int], has_left: Callable[[int], bool]) -> str:
        ended = {self._watched[descriptor] for descriptor, _ in self._poll.poll(0)}
        for rank in ranks:
            if self._pid_by_rank[rank] in ended:
                return f"process {self._pid_by_rank[rank]} has ended"
            if has_left(rank):
                return "it has left"
        return ""

    def _is_any_stopped(self, ranks: Sequence[int]) -> bool:
        states = (env.read_process(self._pid_by_rank[rank])[0] for rank in ranks)
        return any(state in (b"T", b"t") for state in states)

    def _explain(self, what: str, reason: str, late: Sequence[int]) -> PeerError:
        known = world_ranks(self.group)
        names = ", ".join(str(known[rank]) for rank in late)
        cause = RuntimeError(f"waiting for rank{'s' * (len(late) > 1)} {names}: {reason}")
        return explain_failure(self.group, what, cause)


def _let_others_run() -> None:
    time.sleep(0)  # unlike sched_yield, this also lets the other threads of this process run
    os.sched_yield()


def plan_slices(length: int, ranks: int, bucket: int) -> list[tuple[int, int]]:
    """By rank, the elements of a bucket that it sums for all.

    A small bucket goes to few ranks, another one first for every bucket, so that no rank does
    it all.
    """
    count = max(1, min(ranks, length // MIN_SLICE_NUMEL))
    by_rank = [(0, 0)] * ranks
    for position, part in enumerate(slices(length, count)):
        by_rank[(bucket + position) % ranks] = part
    return by_rank


def plan_chunks(start: int, stop: int, gradients: int) -> list[tuple[int, int, bool]]:
    """A slice in pieces, each all gradients or all trailer: start, stop, whether it is scaled."""
    chunks = []
    while start < stop:
        limit = gradients if start < gradients else stop
        end = min(stop, limit, start + CHUNK_NUMEL)
        chunks.append((start, end, start < gradients))
        start = end
    return chunks
