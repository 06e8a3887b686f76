"""Summing and copying between the ranks of one host, through memory that they share.

    filled --(start)--> ready on this rank --(all ready, this rank comes by)--> its slice summed
           --(all slices summed)--> the sum

Every rank's bucket lies in the segment, and its gradients are views of it. When a bucket is ready
on all ranks, each sums its own slice of everybody's and writes the sum back to all. Nobody
waits before the end of backward: what can be summed is summed whenever this rank comes by.

Invariant: ranks are added up in rank order by whoever adds, so the result has the same bits on
every rank and in every run.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.errors import DesyncError
from paceline.transport.c10d import C10d
from paceline.transport.channel import SLOT_BYTES, SLOTS, Channel
from paceline.transport.flat import Flat, slices
from paceline.transport.interface import Buckets, Reduction, Scattered, mean_factor
from paceline.transport.peers import Peers
from paceline.transport.segment import ALIVE, FAILED, Hosts, Segment, share_segment

SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)
"""In their own precision small ranks' gradients would vanish in the sum."""
MIN_SLICE_NUMEL = 4096
"""Smaller parts cost more to hand over than to sum."""
CHUNK_NUMEL = 65_536
"""Summed at a time, so that what was just read is still in the cache when it is written."""
KEPT_BUFFERS = 4
"""So many sizes of buffers that were not placed keep their memory."""

log = logging.getLogger("paceline.transport")

Chunk = tuple[tuple[Tensor, ...], bool]
"""One piece of every rank's bucket, and whether it holds gradients."""


class SharedBuckets:
    """All ranks' buckets of one layout, seen from one rank.

    `position` is this rank's place among the `ranks` of its host; `size` is that of the world.
    """

    applies_weights = True

    def __init__(
        self,
        segment: Segment,
        flats: Sequence[Flat],
        ranks: Sequence[int],
        position: int,
        size: int,
        peers: Peers,
    ) -> None:
        self.homes = [segment.bucket(position, b, flat) for b, flat in enumerate(flats)]
        """Where this rank's buckets lie; nothing here keeps another reference to their storage."""
        self._addresses = [home.data_ptr() for home in self.homes]
        self.ranks = ranks
        self.position = position
        self.peers = peers
        self.segment = segment
        self._flats = flats
        self._size = size
        self.words = segment.words
        places = segment.places
        positions = range(len(ranks))
        self._status = [places.status_word(p) for p in positions]
        self.ready = [places.ready_word(p) for p in positions]
        self.summed = [places.summed_word(p) for p in positions]
        self._weight = [places.weight_word(p) for p in positions]
        self.turns = [0] * len(flats)
        """By bucket, how often it was started."""
        self._started: deque[tuple[int, Callable[[int], None]]] = deque()
        """Buckets that wait for this rank's part of the work, and what that is."""
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        self._spares: dict[int, Tensor] = {}
        self._wide = torch.empty(0, dtype=torch.float32)
        segment.leave_with(self, position)

    def divides(self, dtype: torch.dtype) -> bool:
        return dtype in SUMMED_IN_FLOAT32

    def start(self, number: int, buffer: Tensor, weight: float, what: str) -> SharedSum:
        """Average one bucket over all items, as far as `applies_weights` and `divides` say."""
        self.segment.weights[self._weight[self.position] + number] = weight
        return self.begin(number, buffer, self._average_slice, what)

    def begin(
        self, number: int, buffer: Tensor, work: Callable[[int], None], what: str
    ) -> SharedSum:
        """Give one bucket to all ranks, for `work` on it; it may lie in memory of its own."""
        if not self.has_arrived(number, self.turns[number]):
            self.fail()
            raise DesyncError(
                f"{what} cannot start: an earlier one was given up before all ranks had summed it.",
                advice="After an error in a backward pass that was not averaged, end the program.",
            )
        self.turns[number] += 1
        # The home itself may have moved: sharing a gradient with another process does that.
        is_private = buffer.data_ptr() != self._addresses[number]
        if is_private:
            self.spare(number).copy_(buffer)
        self.words[self.ready[self.position] + number] = 2 * self.turns[number] + is_private
        self._started.append((number, work))
        try:
            self.advance()
        except BaseException:
            self.fail()
            raise
        turn = self.turns[number]
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
        return all(words[row + number] >= turn for row in self.summed)

    def is_done(self, number: int, turn: int) -> bool:
        """Whether the whole bucket is summed, after doing what this rank can do for it."""
        self.advance()
        return self.has_arrived(number, turn)

    def missing(self, number: int, turn: int) -> list[int]:
        """The ranks that a bucket waits for."""
        words = self.words
        late = [
            rank
            for rank, row in zip(self.ranks, self.ready, strict=True)
            if words[row + number] // 2 < turn
        ]
        return late or [
            rank
            for rank, row in zip(self.ranks, self.summed, strict=True)
            if words[row + number] < turn
        ]

    def has_left(self, rank: int) -> bool:
        return self.words[self._status[self.ranks.index(rank)]] != ALIVE

    def fail(self) -> None:
        """Tell the others not to wait for this rank any more."""
        self.words[self._status[self.position]] = FAILED

    def finish(self, number: int, turn: int, what: str) -> None:
        """Wait for the whole bucket."""
        try:
            if self.is_done(number, turn):
                return
            self.peers.wait(
                lambda: self.is_done(number, turn),
                lambda: self.missing(number, turn),
                self.has_left,
                what,
            )
        except BaseException:
            self.fail()
            raise

    def spare(self, number: int) -> Tensor:
        """Where this rank's bucket is handed over while its home is still in use."""
        if number not in self._spares:
            self._spares[number] = self.bucket(self.position, number, is_spare=True)
        return self._spares[number]

    def targets(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Where else than in the first rank's bucket the sum is to be written."""
        return tensors[1:]

    def _is_ready(self, number: int) -> bool:
        words, turn = self.words, self.turns[number]
        return all(words[row + number] >> 1 >= turn for row in self.ready)

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
        self._buckets.finish(self._number, self._turn, self._what)
        if self._private is not None:
            self._private.copy_(self._buckets.spare(self._number))
            self._private = None


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
        ranks = self.hosts.neighbours
        position = ranks.index(self.group.rank())
        return SharedBuckets(segment, flats, ranks, position, self.group.size(), self.peers)

    def _share(self, flats: Sequence[Flat], what: str) -> SharedBuckets | C10d:
        self.channel.meet(what)
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
    ranks = hosts.neighbours
    return Channel(group, segment, ranks, ranks.index(group.rank()), peers), ""


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
