"""Curves and bounds of the report: no extreme is lost, and nothing out of a file is endless."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.files.documents import plain_json
from paceline.show.report.bounds import amount, bounded, number, text, whole
from paceline.show.report.curves import Curve, CurvePoint


def test_a_curve_is_the_sum_over_all_ranks_divided_by_the_count() -> None:
    curve = Curve()
    curve.add(7, total=6.0, weight=2)
    curve.add(7, total=1.0, weight=1)
    assert curve.points(10) == [CurvePoint(7, 7 / 3, 7 / 3, 7 / 3)]


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(min_value=1, max_value=50)
)
def test_fewer_points_keep_the_lowest_the_highest_and_the_mean(
    values: list[float], limit: int
) -> None:
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value, 1)
    points = curve.points(limit)
    assert len(points) <= limit
    assert min(p.low for p in points) == min(values)
    assert max(p.high for p in points) == max(values)
    assert all(p.low - 1e-6 <= p.mean <= p.high + 1e-6 for p in points)


@pytest.mark.parametrize("steps", [1, 16, 17, 1000])
def test_a_run_longer_than_the_table_keeps_its_mean(steps: int) -> None:
    curve = Curve(cells=16)
    for step in range(steps):
        curve.add(step, float(step), 1)
    assert len(curve.points()) <= 16
    assert curve.points(1)[0].mean == pytest.approx((steps - 1) / 2)
    assert curve.last == steps - 1


def test_values_that_are_no_numbers_are_remembered_and_not_averaged() -> None:
    curve = Curve()
    curve.add(5, math.nan, 1)
    curve.add(3, math.inf, 1)
    curve.add(4, 1.0, 1)
    assert curve.first_bad == 3
    assert [p.mean for p in curve.points(9)] == [1.0]


def test_characters_that_hide_or_turn_text_are_shown_as_unknown() -> None:
    assert text("a\u202eb\x00c\ud800d") == "a\ufffdb\ufffdc\ufffdd"
    assert text("two\nlines\tand a tab") == "two\nlines\tand a tab"


def test_the_mean_of_a_step_is_known_where_a_drawing_has_fewer_points_than_steps() -> None:
    curve = Curve()
    for step in range(1, 1001):
        curve.add(step, 2.0 * step, 2.0)
    assert len(curve.points()) < 1000
    assert [curve.mean_at(step) for step in range(1, 1001)] == [float(n) for n in range(1, 1001)]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(ANYTHING)
def test_what_is_bounded_is_strict_json_and_is_bounded_already(value: Any) -> None:
    once = plain_json(bounded(value))
    assert bounded(once) == once
    json.dumps(once, allow_nan=False).encode()


def test_long_wide_deep_and_large_values_are_cut() -> None:
    deep: Any = 0
    for _ in range(50):
        deep = [deep]
    assert len(text("x" * 5000)) < 1000
    assert len(bounded(list(range(10**5)))) == 2000
    assert len(bounded({str(key): key for key in range(1000)})) == 64
    assert json.dumps(bounded(deep)).count("[") < 20
    assert bounded([10**400, 3]) == [None, 3]


@pytest.mark.parametrize("value", [10**400, True, "3", None, [], math.nan])
def test_what_is_not_a_number_is_neither_counted_nor_added_up(value: Any) -> None:
    assert amount(value) == 0
    assert whole(value) is None
    assert (number(value) is None) == (value is not math.nan and not isinstance(value, float))
