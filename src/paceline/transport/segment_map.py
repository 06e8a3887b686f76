"""What lies where in a shared segment: pure arithmetic, the same on every rank of a host.

    header | status by rank | ready by rank | summed by rank | copied by rank | weights by rank |
    buckets of rank 0 | buckets of rank 1 | ... | spare buckets of rank 0 | ...

Every rank writes its own words only, and they lie on cache lines of their own. Spare buckets
cost nothing until they are touched: they are used while somebody still holds a gradient of an
earlier step that lives in the bucket itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

LINE_BYTES = 64
PAGE_BYTES = 4096
WORD_BYTES = 8
NONCE_BYTES = 16

MIN_SLICE_NUMEL = 4096
"""Smaller parts cost more to hand over than to sum."""
CHUNK_NUMEL = 65_536
"""Summed at a time, so that what was just read is still in the cache when it is written."""


@dataclass(frozen=True)
class SegmentMap:
    """Offsets in bytes for `ranks` ranks and buckets of the sizes given.

    Whatever depends on all buckets is worked out once: there may be thousands.
    """

    ranks: int
    buckets_bytes: tuple[int, ...]

    @property
    def _row_words(self) -> int:
        """Words of one kind of one rank, filling whole cache lines."""
        return _round_up(max(1, len(self.buckets_bytes)) * WORD_BYTES, LINE_BYTES) // WORD_BYTES

    def status_word(self, rank: int) -> int:
        return (LINE_BYTES + rank * LINE_BYTES) // WORD_BYTES

    def ready_word(self, rank: int) -> int:
        """The first of a rank's ready words; bucket b's is b further on."""
        return self._rows(0) + rank * self._row_words

    def summed_word(self, rank: int) -> int:
        return self._rows(1) + rank * self._row_words

    def copied_word(self, rank: int) -> int:
        return self._rows(2) + rank * self._row_words

    def weight_word(self, rank: int) -> int:
        return self._rows(3) + rank * self._row_words

    def _rows(self, kind: int) -> int:
        return LINE_BYTES * (1 + self.ranks) // WORD_BYTES + kind * self.ranks * self._row_words

    @cached_property
    def control_bytes(self) -> int:
        return _round_up(self._rows(4) * WORD_BYTES, PAGE_BYTES)

    @cached_property
    def _starts(self) -> list[int]:
        """By bucket, its place among the buckets of a rank; then where these end."""
        sizes = (_round_up(size, LINE_BYTES) for size in self.buckets_bytes)
        return list(accumulate(sizes, initial=0))

    @cached_property
    def _rank_bytes(self) -> int:
        return _round_up(self._starts[-1], PAGE_BYTES)

    def bucket_offset(self, rank: int, bucket: int, spare: bool) -> int:
        block = rank + self.ranks * spare
        return self.control_bytes + block * self._rank_bytes + self._starts[bucket]

    @property
    def used_bytes(self) -> int:
        """What will surely be touched."""
        return self.control_bytes + self.ranks * self._rank_bytes

    @property
    def total_bytes(self) -> int:
        return self.control_bytes + 2 * self.ranks * self._rank_bytes


def plan_slices(numel: int, ranks: int, bucket: int) -> list[tuple[int, int]]:
    """By rank, the elements of a bucket that it sums for all.

    A small bucket goes to few ranks, another one first for every bucket, so that nobody does
    it all. Slices begin on cache lines.
    """
    count = max(1, min(ranks, numel // MIN_SLICE_NUMEL))
    share = _round_up(-(-numel // count), LINE_BYTES)
    stops = [min(numel, stop) for stop in accumulate([share] * count)]
    slices = [(0, 0)] * ranks
    for position, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        slices[(bucket + position) % ranks] = (start, stop)
    return slices


def plan_chunks(start: int, stop: int, gradients: int) -> list[tuple[int, int, bool]]:
    """A slice in pieces, each all gradients or all trailer: start, stop, whether it is scaled."""
    chunks = []
    while start < stop:
        limit = gradients if start < gradients else stop
        end = min(stop, limit, start + CHUNK_NUMEL)
        chunks.append((start, end, start < gradients))
        start = end
    return chunks


def has_room(needed_bytes: int, available_bytes: Sequence[int]) -> bool:
    """Whether a segment leaves at least as much memory as it takes, by every limit known."""
    return all(2 * needed_bytes <= available for available in available_bytes)


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to
