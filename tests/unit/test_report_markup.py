"""Markup, numbers and curves of the report: text stays text, and no extreme is lost."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.explain.report.markup import (
    Html,
    as_number,
    count,
    data_block,
    duration,
    figure,
    html,
    percent,
    size,
    table,
    text,
)
from paceline.explain.report.series import Column, Point


class Reading(HTMLParser):
    """What a browser would take from markup: elements, attributes and text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@given(st.text(max_size=200))
def test_any_text_is_read_back_as_the_same_text_and_makes_no_element(words: str) -> None:
    reading = Reading(html('<p title="{}">{}</p>', words, words))
    assert reading.elements == ["p"]
    assert "".join(reading.texts) == text(words)
    assert [name for name, _ in reading.attributes] == ["title"]


@given(st.recursive(st.text(max_size=30), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_a_data_block_cannot_be_ended_from_inside_and_holds_what_it_was_given(
    value: object,
) -> None:
    block = data_block(value)
    inside = block.partition(">")[2].removesuffix("</script>")
    assert "<" not in inside
    assert "\u2028" not in inside
    assert json.loads(inside) == value


def test_a_data_block_survives_the_end_of_a_script_in_a_string() -> None:
    block = data_block(["</script><script>alert(1)</script>", "<!--"])
    assert block.count("</script>") == 1
    assert Reading(block).elements == ["script"]


def test_only_what_is_markup_already_is_not_escaped() -> None:
    inside = ["<i>", Html("<i></i>"), None]
    assert html("<b>{}{x}</b>", inside, x='"') == "<b>&lt;i&gt;<i></i>&quot;</b>"


def test_characters_that_hide_or_turn_text_are_shown_as_unknown() -> None:
    assert text("a\u202eb\x00c\ud800d") == "a\ufffdb\ufffdc\ufffdd"
    assert text("two\nlines\tand a tab") == "two\nlines\tand a tab"


def test_endless_text_is_cut() -> None:
    assert text("x" * 5000, 10) == "x" * 10 + "…"


def test_a_table_has_a_caption_and_heads_for_its_columns() -> None:
    shown = table(("a", "b"), [("x", 1)], caption="Things")
    assert "<caption>Things</caption>" in shown
    assert shown.count('scope="col"') == 2
    assert '<td class="number">1</td>' in shown


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (duration(0.2), "200 ms"),
        (duration(None), "\N{EN DASH}"),
        (duration(math.nan), "\N{EN DASH}"),
        (size(423_104), "423.1 kB"),
        (size(None), "\N{EN DASH}"),
        (percent(0.8325), "83 %"),
        (percent(0.046), "4.6 %"),
        (percent(0), "0 %"),
        (figure(52_650), "52,650"),
        (figure(0.123456), "0.123"),
        (figure(999.7), "1,000"),
        (figure(-2.5), "-2.5"),
        (figure(1e-9), "1.00e-09"),
        (figure(math.nan), "not a number"),
        (figure(0), "0"),
        (count(1, "worker"), "1 worker"),
        (count(1000, "worker"), "1,000 workers"),
        (f"{as_number(10**400)} {as_number(True)} {as_number(3)}", "None None 3.0"),
    ],
)
def test_numbers_are_said_as_people_say_them(said: str, expected: str) -> None:
    assert said.replace("\N{NO-BREAK SPACE}", " ") == expected


def test_a_curve_is_the_sum_over_all_ranks_divided_by_the_count() -> None:
    column = Column()
    column.add(7, total=6.0, weight=2)
    column.add(7, total=1.0, weight=1)
    assert column.points(10) == [Point(7, 7 / 3, 7 / 3, 7 / 3)]


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(min_value=1, max_value=50)
)
def test_fewer_points_keep_the_lowest_the_highest_and_the_mean(
    values: list[float], limit: int
) -> None:
    column = Column()
    for step, value in enumerate(values):
        column.add(step, value, 1)
    points = column.points(limit)
    assert len(points) <= limit
    assert min(p.low for p in points) == min(values)
    assert max(p.high for p in points) == max(values)
    assert all(p.low - 1e-6 <= p.mean <= p.high + 1e-6 for p in points)


@pytest.mark.parametrize("steps", [1, 16, 17, 1000])
def test_a_run_longer_than_the_table_keeps_its_sums(steps: int) -> None:
    column = Column(cells=16)
    for step in range(steps):
        column.add(step, 2.0, 1)
    found = list(column.values())
    assert len(found) <= 16
    assert sum(total for _, total, _ in found) == 2.0 * steps
    assert column.last == steps - 1


def test_values_that_are_no_numbers_are_remembered_and_not_averaged() -> None:
    column = Column()
    column.add(5, math.nan, 1)
    column.add(3, math.inf, 1)
    column.add(4, 1.0, 1)
    assert column.first_bad == 3
    assert [p.mean for p in column.points(9)] == [1.0]
