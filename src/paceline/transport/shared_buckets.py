"""Buckets in memory that the ranks of one host share, and the work that they do on them.

    filled --(start)--> ready on this rank --(all ready, this rank comes by)--> its slice summed
           --(all slices summed)--> the sum

Every rank's bucket lies in the segment, and its gradients are views of it. When a bucket is ready
on all ranks, each sums its own slice of everybody's and writes the sum back to all. Nobody
waits before the end of backward: what can be summed is summed whenever this rank comes by.

Invariant: ranks are added up in rank order by whoever adds, so the result has the same bits on
every rank and in every run.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Group
from paceline.errors import DesyncError
from paceline.transport.flat import Flat, slices
from paceline.transport.interface import Reduction, mean_factor
from paceline.transport.peers import Peers
from paceline.transport.segment import ALIVE, COPIED, FAILED, READY, SUMMED, WEIGHT, Segment

SLOT_BYTES = 2**20
SLOTS = 2
"""Through which a channel copies."""
SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)
"""In their own precision small ranks' gradients would vanish in the sum."""
MIN_SLICE_NUMEL = 4096
"""Smaller parts cost more to hand over than to sum."""
CHUNK_NUMEL = 65_536
"""Summed at a time, so that what was just read is still in the cache when it is written."""

Chunk = tuple[tuple[Tensor, ...], bool]
"""One piece of every rank's bucket, and whether it holds gradients."""
Work = Callable[[int], None]
"""What a rank does for a bucket, by its number."""


class SharedBuckets:
    """All ranks' buckets of one layout, seen from one rank.

    `ranks` are those of this host; `position` is this rank's place among them.
    """

    applies_weights = True

    def __init__(
        self,
        segment: Segment,
        flats: Sequence[Flat],
        ranks: Sequence[int],
        group: Group,
        peers: Peers,
    ) -> None:
        self.group = group
        self.position = position = ranks.index(group.rank())
        self._size: int = group.size()
        self.homes = [segment.bucket(position, b, flat) for b, flat in enumerate(flats)]
        """Where this rank's buckets lie; nothing here keeps another reference to their storage."""
        self._addresses = [home.data_ptr() for home in self.homes]
        self.ranks = ranks
        self.peers = peers
        self.segment = segment
        self._flats = flats
        self.words = segment.words
        places = segment.places
        positions = range(len(ranks))
        self._status = [places.status_word(p) for p in positions]
        self.ready = [places.row(READY, p) for p in positions]
        self.summed = [places.row(SUMMED, p) for p in positions]
        self._weight = [places.row(WEIGHT, p) for p in positions]
        self.turns = [0] * len(flats)
        """By bucket, how often it was started."""
        self._started: deque[tuple[int, Work]] = deque()
        """Buckets that wait for this rank's part of the work, and what that is."""
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        self._wide = torch.empty(0, dtype=torch.float32)
        segment.leave_with(self, position)

    def divides(self, dtype: torch.dtype) -> bool:
        return dtype in SUMMED_IN_FLOAT32

    def start(self, number: int, buffer: Tensor, weight: float, what: str) -> SharedSum:
        """Average one bucket over all items, as far as `applies_weights` and `divides` say."""
        self.segment.weights[self._weight[self.position] + number] = weight
        return self.begin(number, buffer, self._average_slice, what)

    def gather(self, number: int, buffer: Tensor, what: str) -> Reduction:
        return self.begin(number, buffer, self.take_slices, what)

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
        """The ranks that have begun a turn of the first bucket which this one has not."""
        mine = self.turns[0]
        rows = zip(self.ranks, self.ready, strict=True)
        return [rank for rank, row in rows if self.words[row] >> 1 > mine]

    def has_left(self, rank: int) -> bool:
        return self.words[self._status[self.ranks.index(rank)]] != ALIVE

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
        return self.bucket(self.position, number, is_spare=True)

    def targets(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Where else than in the first rank's bucket the sum is to be written."""
        return tensors[1:]

    def _is_ready(self, number: int) -> bool:
        words, turn = self.words, self.turns[number]
        for row in self.ready:  # noqa: SIM110
            if words[row + number] >> 1 < turn:
                return False
        return True

    def _average_slice(self, number: int) -> None:
        """Sum this rank's slice of everybody's bucket; 16-bit sums are divided by the size."""
        factor = 1.0
        if self.applies_weights:
            total = sum(self.segment.weights[row + number] for row in self._weight)
            factor = 1.0 if total == self._size else mean_factor(self._size, total)
        is_wide = self._flats[number].dtype in SUMMED_IN_FLOAT32
        self.sum_slice(number, factor / self._size if is_wide else factor)

    def sum_slice(self, number: int, factor: float = 1.0) -> None:
        spares = sum((self.words[row + number] & 1) << p for p, row in enumerate(self.ready))
        chunks = self._chunks.get((number, spares))
        if chunks is None:
            chunks = self._chunks[number, spares] = self._make_chunks(number)
        is_wide = self._flats[number].dtype in SUMMED_IN_FLOAT32
        for tensors, is_scaled in chunks:
            total = self._widened(tensors[0]) if is_wide else tensors[0]
            for tensor in tensors[1:]:
                total.add_(tensor)
            if factor != 1.0 and (is_scaled or is_wide):
                total.mul_(factor)
            if is_wide:
                tensors[0].copy_(total)
            for tensor in self.targets(tensors):
                tensor.copy_(total)

    def sum_own_slice(self, number: int) -> None:
        """Sum the slice that this rank owns into its own bucket only."""
        buckets = self._buckets_of_all(number)
        start, stop = slices(self._flats[number].length, len(self.ranks))[self.position]
        for begin in range(start, stop, CHUNK_NUMEL):
            parts = [bucket[begin : min(stop, begin + CHUNK_NUMEL)] for bucket in buckets]
            total = parts[0].to(self._wide.dtype) if self.divides(parts[0].dtype) else parts[0] + 0
            for part in parts[1:]:
                total.add_(part)
            parts[self.position].copy_(total)

    def take_slices(self, number: int) -> None:
        """Copy every other rank's own slice from its bucket."""
        buckets = self._buckets_of_all(number)
        cut = slices(self._flats[number].length, len(self.ranks))
        for position, (start, stop) in enumerate(cut):
            if position != self.position:
                buckets[self.position][start:stop].copy_(buckets[position][start:stop])

    def _widened(self, tensor: Tensor) -> Tensor:
        if self._wide.numel() == 0:
            self._wide = torch.empty(CHUNK_NUMEL, dtype=torch.float32)
        return self._wide[: tensor.numel()].copy_(tensor)

    def _make_chunks(self, number: int) -> list[Chunk]:
        flat, buckets = self._flats[number], self._buckets_of_all(number)
        start, stop = plan_slices(flat.length, len(self.ranks), number)[self.position]
        return [
            (tuple(bucket[begin:end] for bucket in buckets), is_scaled)
            for begin, end, is_scaled in plan_chunks(start, stop, flat.numel)
        ]

    def _buckets_of_all(self, number: int) -> list[Tensor]:
        """Every rank's bucket, where that rank has put it in this turn."""
        return [
            self.bucket(position, number, is_spare=bool(self.words[row + number] & 1))
            for position, row in enumerate(self.ready)
        ]

    def bucket(self, position: int, number: int, *, is_spare: bool) -> Tensor:
        return self.segment.bucket(position, number, self._flats[number], spare=is_spare)


class SharedSum:
    """One bucket on its way; `wait()` leaves the sum where the bucket is."""

    __slots__ = ("_buckets", "_number", "_private", "_turn", "_what")

    def __init__(
        self, buckets: SharedBuckets, number: int, turn: int, private: Tensor | None, what: str
    ) -> None:
        self._buckets = buckets
        self._number = number
        self._turn = turn
        self._private = private
        self._what = what

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


class Channel(SharedBuckets):
    """Copies tensors from one rank to the others of its host, through two slots of each rank.

    The root writes a piece into its slot and continues; it waits only when both slots are still
    being read. So a rank that has something to tell does not wait for those that listen late.
    """

    def __init__(self, segment: Segment, ranks: Sequence[int], group: Group, peers: Peers) -> None:
        slot = Flat(SLOT_BYTES, torch.uint8, torch.device("cpu"))
        super().__init__(segment, [slot] * SLOTS, ranks, group, peers)
        self._turn = 0
        self._written = [0] * SLOTS
        """By slot, the turn in which this rank last wrote into it."""
        self._others = [p for p in range(len(ranks)) if p != self.position]
        self._met = [segment.places.row(COPIED, p) for p in range(len(ranks))]
        self._meetings = 0
        with _lock:
            _channels.add(self)

    def copy(self, tensor: Tensor, root: int, what: str) -> None:
        """Overwrite `tensor`, flat bytes, with that of rank `root` of this host."""
        source, mine = self.ranks.index(root), self.position
        for start in range(0, tensor.numel(), SLOT_BYTES):
            piece = tensor[start : start + SLOT_BYTES]
            self._turn += 1
            slot, words = self._turn % SLOTS, self.words
            if source == mine:
                read = [(p, self.summed[p] + slot, self._written[slot]) for p in self._others]
                self._wait_for(read, what)
                self.homes[slot][: piece.numel()].copy_(piece)
                words[self.ready[mine] + slot] = self._written[slot] = self._turn
            else:
                self._wait_for([(source, self.ready[source] + slot, self._turn)], what)
                theirs = self.bucket(source, slot, is_spare=False)
                piece.copy_(theirs[: piece.numel()])
                words[self.summed[mine] + slot] = self._turn

    def meet(self, what: str, look: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks of this host have met as often as this one has, for any model.

        `look` is called again and again, and may raise where nobody will come.

        Ranks that are at different models must not wait for each other here: they find out next.
        To be called before waiting in a process group, which does not notice a stopped rank.
        """
        with _lock:
            ours = [channel for channel in _channels if channel.group is self.group]
        for channel in ours:
            channel._meetings += 1
            channel.words[channel._met[channel.position]] = channel._meetings
        with comm.waiting(self.group):
            wanted = [(p, self._met[p], self._meetings) for p in self._others]
            self._wait_for(wanted, what, look)

    def _wait_for(
        self,
        wanted: Sequence[tuple[int, int, int]],
        what: str,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until each of the words (of a rank's position) has reached its turn."""

        def late() -> list[int]:
            return [self.ranks[p] for p, index, turn in wanted if self.words[index] < turn]

        def is_done() -> bool:
            look()
            return not late()

        self.wait(is_done, late, what)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
"""All of this process: a model has one, and ranks can be threads."""
_lock = threading.Lock()


def plan_slices(length: int, ranks: int, bucket: int) -> list[tuple[int, int]]:
    """By rank, the elements of a bucket that it sums for all.

    A small bucket goes to few ranks, another one first for every bucket, so that nobody does
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
