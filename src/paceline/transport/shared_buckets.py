"""The buckets of one layout in shared memory, and how they are summed.

    filled --(start)--> ready on this rank --(all ready, this rank comes by)--> its slice summed
           --(all slices summed)--> the sum

Every rank's bucket lies in the segment, and its gradients are views of it. When a bucket is ready
on all ranks, each sums its own slice of everybody's and writes the sum back to all. Nobody
waits before the end of backward: what can be summed is summed whenever this rank comes by.

Invariant: ranks are added up in rank order by whoever adds, so the result has the same bits on
every rank and in every run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import DesyncError
from paceline.gradients.plan import BucketPlan
from paceline.transport.peers import Peers
from paceline.transport.segment import ALIVE, FAILED, Segment
from paceline.transport.segment_map import CHUNK_NUMEL, plan_chunks, plan_slices

SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)
"""In their own precision small ranks' gradients would vanish in the sum."""

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
        plans: Sequence[BucketPlan],
        ranks: Sequence[int],
        position: int,
        size: int,
        peers: Peers,
    ) -> None:
        self.homes = [segment.bucket(position, b, plan) for b, plan in enumerate(plans)]
        """Where this rank's buckets lie; nothing here keeps another reference to their storage."""
        self._addresses = [home.data_ptr() for home in self.homes]
        self.ranks = ranks
        self.position = position
        self.peers = peers
        self.segment = segment
        self._plans = plans
        self._size = size
        self.words = segment.words
        places = segment.places
        positions = range(len(ranks))
        self._status = [places.status_word(p) for p in positions]
        self.ready = [places.ready_word(p) for p in positions]
        self.summed = [places.summed_word(p) for p in positions]
        self._weight = [places.weight_word(p) for p in positions]
        self.turns = [0] * len(plans)
        """By bucket, how often it was started."""
        self._started: deque[int] = deque()
        """Buckets whose slice this rank has not summed yet."""
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}
        self._spares: dict[int, Tensor] = {}
        self._wide = torch.empty(0, dtype=torch.float32)
        segment.leave_with(self, position)

    def start(self, number: int, buffer: Tensor, weight: float, what: str) -> SharedSum:
        """Give one bucket to all ranks; it may lie in memory of its own."""
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
        mine = self.position
        self.segment.weights[self._weight[mine] + number] = weight
        self.words[self.ready[mine] + number] = 2 * self.turns[number] + is_private
        self._started.append(number)
        try:
            self.advance()
        except BaseException:
            self.fail()
            raise
        turn = self.turns[number]
        return SharedSum(self, number, turn, buffer if is_private else None, what)

    def advance(self) -> None:
        """Sum this rank's slices of the buckets that are ready everywhere."""
        while self._started and self._is_ready(self._started[0]):
            number = self._started.popleft()
            self._sum_slice(number)
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

    def _sum_slice(self, number: int) -> None:
        factor = self._factor(number) if self.applies_weights else 1.0
        spares = sum((self.words[row + number] & 1) << p for p, row in enumerate(self.ready))
        chunks = self._chunks.get((number, spares))
        if chunks is None:
            chunks = self._chunks[number, spares] = self._make_chunks(number, spares)
        if self._plans[number].dtype in SUMMED_IN_FLOAT32:
            self._sum_in_float32(chunks, factor / self._size)
            return
        for tensors, is_scaled in chunks:
            total = tensors[0]
            for tensor in tensors[1:]:
                total.add_(tensor)
            if is_scaled and factor != 1.0:
                total.mul_(factor)
            for tensor in self.targets(tensors):
                tensor.copy_(total)

    def _sum_in_float32(self, chunks: Sequence[Chunk], factor: float) -> None:
        if self._wide.numel() == 0:
            self._wide = torch.empty(CHUNK_NUMEL, dtype=torch.float32)
        for tensors, _ in chunks:
            total = self._wide[: tensors[0].numel()]
            total.copy_(tensors[0])
            for tensor in tensors[1:]:
                total.add_(tensor)
            total.mul_(factor)
            for tensor in (tensors[0], *self.targets(tensors)):
                tensor.copy_(total)

    def _factor(self, number: int) -> float:
        """What turns a sum into the average over all items, where ranks have different numbers.

        Sums come divided by the number of ranks, as if each had one.
        """
        total = sum(self.segment.weights[row + number] for row in self._weight)
        return self._size / total if total else 0.0

    def _make_chunks(self, number: int, spares: int) -> list[Chunk]:
        plan = self._plans[number]
        numel = plan.numel + plan.trailer
        start, stop = plan_slices(numel, len(self.ranks), number)[self.position]
        buckets = [
            self.bucket(position, number, is_spare=bool(spares >> position & 1))
            for position in range(len(self.ranks))
        ]
        return [
            (tuple(bucket[begin:end] for bucket in buckets), is_scaled)
            for begin, end, is_scaled in plan_chunks(start, stop, plan.numel)
        ]

    def bucket(self, position: int, number: int, *, is_spare: bool) -> Tensor:
        return self.segment.bucket(position, number, self._plans[number], spare=is_spare)


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
