"""The arithmetic of dealing, without samplers."""

from __future__ import annotations

from itertools import chain, count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.deal import Tail, deal, share

totals = st.integers(0, 60)
sizes = st.one_of(st.integers(1, 9), st.just(1024))
tails = st.sampled_from(Tail)


@given(totals, st.integers(0, 70), sizes, tails, st.data())
@settings(deadline=None)
def test_reading_an_order_once_deals_the_positions_that_the_arithmetic_says(
    total: int, start: int, size: int, tail: Tail, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    positions = [p % total for p in share(total, start, rank, size, tail)]
    assert list(deal(range(total), start, rank, size, tail)) == positions


@given(totals, st.integers(0, 70), sizes)
@settings(deadline=None)
def test_a_short_tail_deals_every_item_that_is_left_exactly_once(
    total: int, start: int, size: int
) -> None:
    dealt = chain(*(share(total, start, rank, size, Tail.SHORT) for rank in range(size)))
    assert sorted(dealt) == list(range(start, total))


@given(totals, sizes, st.sampled_from([Tail.FILL, Tail.DROP]))
@settings(deadline=None)
def test_a_filled_or_dropped_tail_gives_every_rank_the_same_number(
    total: int, size: int, tail: Tail
) -> None:
    lengths = {len(share(total, 0, rank, size, tail)) for rank in range(size)}
    assert lengths == {-(-total // size) if tail is Tail.FILL else total // size}


@pytest.mark.parametrize("tail", Tail)
def test_an_order_that_never_ends_is_dealt_one_round_at_a_time(tail: Tail) -> None:
    read: list[int] = []
    endless = (read.append(i) or i for i in count())  # type: ignore[func-returns-value]
    assert list(islice(deal(endless, 4, 1, 3, tail), 2)) == [5, 8]
    assert len(read) == 10
