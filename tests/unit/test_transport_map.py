"""Where things lie in a shared segment, who sums what, and who shares a host."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import DDPOptions
from paceline.errors import UsageError
from paceline.transport import check_transport
from paceline.transport.interface import ALIGNMENT, slices
from paceline.transport.segment import KINDS, LINE_BYTES, SegmentMap, has_room
from paceline.transport.select import group_by_host
from paceline.transport.shared_buckets import plan_chunks, plan_slices

RANKS = st.integers(1, 9)
SIZES = st.lists(st.integers(4, 100_000), max_size=6)


@given(RANKS, SIZES)
def test_no_two_buckets_overlap_and_all_lie_inside(ranks: int, sizes: list[int]) -> None:
    places = SegmentMap(ranks, tuple(sizes))
    spans = sorted(
        (places.bucket_offset(rank, number, spare), size)
        for spare in (False, True)
        for rank in range(ranks)
        for number, size in enumerate(sizes)
    )
    end = places.control_bytes
    for offset, size in spans:
        assert offset >= end
        assert offset % LINE_BYTES == 0
        end = offset + size
    assert end <= places.total_bytes


@given(RANKS, SIZES)
def test_no_two_ranks_write_to_the_same_cache_line_of_words(ranks: int, sizes: list[int]) -> None:
    places = SegmentMap(ranks, tuple(sizes))
    lines = [
        {
            (places.rows[kind][rank] + number) * 8 // LINE_BYTES
            for number in range(max(1, len(sizes)))
        }
        for kind in range(KINDS)
        for rank in range(ranks)
    ] + [{places.status[rank] * 8 // LINE_BYTES} for rank in range(ranks)]
    assert sum(map(len, lines)) == len(set().union(*lines))
    assert min(set().union(*lines)) > 0  # the first line is the header's
    assert (max(set().union(*lines)) + 1) * LINE_BYTES <= places.control_bytes


@given(st.integers(0, 300_000), RANKS, st.integers(0, 20))
def test_every_element_is_summed_by_exactly_one_rank(numel: int, ranks: int, bucket: int) -> None:
    slices = sorted(part for part in plan_slices(numel, ranks, bucket) if part[0] < part[1])
    end = 0
    for start, stop in slices:
        assert start == end
        end = stop
    assert end == numel


def test_small_buckets_are_summed_by_another_rank_each_time() -> None:
    owners = [
        next(rank for rank, part in enumerate(plan_slices(100, 3, bucket)) if part[1])
        for bucket in range(6)
    ]
    assert owners == [0, 1, 2, 0, 1, 2]


def test_large_buckets_are_shared_evenly() -> None:
    sizes = [stop - start for start, stop in plan_slices(1_000_000, 4, 0)]
    assert max(sizes) - min(sizes) <= 4 * LINE_BYTES


@given(st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 200_000))
def test_chunks_cover_a_slice_and_never_mix_gradients_with_trailer(
    start: int, length: int, gradients: int
) -> None:
    stop, end = start + length, start
    for begin, finish, is_scaled in plan_chunks(start, stop, gradients):
        assert begin == end < finish
        assert finish <= gradients if is_scaled else begin >= gradients
        end = finish
    assert end == max(start, stop)


def test_ranks_are_grouped_by_what_they_say_of_their_host() -> None:
    hosts = group_by_host(["a", "b", "a", "c", "b"], rank=4)
    assert hosts.ranks_by_host == ((0, 2), (1, 4), (3,))
    assert hosts.neighbours == (1, 4)
    assert hosts.leaders == (0, 1, 3)
    assert hosts.host_of(2) == 0


def test_a_segment_must_leave_as_much_memory_as_it_takes() -> None:
    assert has_room(10, [20, 100])
    assert not has_room(10, [19, 100])
    assert has_room(10**15, [])  # no limit is known


def test_a_transport_that_does_not_exist_is_refused_with_the_names_of_those_that_do() -> None:
    with pytest.raises(UsageError, match="shared_memory"):
        check_transport("shm")


@given(st.integers(0, 300_000), RANKS)
def test_slices_cover_a_buffer_and_their_borders_are_aligned(length: int, count: int) -> None:
    found = slices(length, count)
    assert len(found) == count
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == length
    assert all(start % ALIGNMENT == 0 or start == length for start, _ in found)


class Gatherless:
    """A transport that cannot gather."""

    def sum(self, flat: object, what: str) -> None: ...
    def copy(self, flat: object, root: int, what: str) -> None: ...


@pytest.mark.parametrize("transport", [Gatherless(), None, 3])
def test_an_object_that_lacks_a_method_is_refused_by_its_name(transport: Any) -> None:
    with pytest.raises(UsageError, match=r"has no .*gather\(\)"):
        DDPOptions(transport=transport)
