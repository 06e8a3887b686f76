"""What a reader types is compared as a value, and what is none is refused, never guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.show.learn import values
from paceline.show.learn.values import is_same, read, show

DEVICES = ["cpu:0", "cpu:1", "nowhere"]


@pytest.mark.parametrize(
    "text",
    [
        *("(16, 5)", "16x5", "[16,5]", "torch.Size([16, 5])", "16 5"),
        *("16 \N{MULTIPLICATION SIGN} 5", " ( 16 ,5, ) ", "Size([16,5])"),
    ],
)
def test_a_shape_may_be_written_in_any_way(text: str) -> None:
    assert read("shape", text) == [16, 5]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("shape", "(5,)", [5]),
        ("shape", "()", []),
        ("shape", "1,000 x 10", [1000, 10]),
        ("number", "3.33x", 3.33),
        ("number", "10/3", 10 / 3),
        ("number", "83 %", 83),
        ("number", "1,000", 1000),
        ("number", "3,33", 3.33),
        ("number", "\N{MINUS SIGN}0.5", -0.5),
        ("number", "1e-3", 0.001),
        ("number", "0.32 kB", 320),
        ("numbers", "6, 5, 5", [6, 5, 5]),
        ("numbers", "[6 5 5]", [6, 5, 5]),
        ("numbers", "6+5+5", [6, 5, 5]),
        ("numbers", "6, 5 and 5", [6, 5, 5]),
        ("choice", "b", "cpu:1"),
        ("choice", "B)", "cpu:1"),
        ("choice", "CPU:1", "cpu:1"),
        ("choice", "no", "nowhere"),
        ("order", "c, a, b", ["nowhere", "cpu:0", "cpu:1"]),
    ],
)
def test_other_values_too(kind: Any, text: str, value: Any) -> None:
    assert read(kind, text, DEVICES) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", "16 by 5"),
        ("shape", "(16, -5)"),
        ("shape", "sixteen"),
        ("shape", "٣x٤"),
        ("number", "twelve"),
        ("number", "12 apples"),
        ("number", "nan"),
        ("number", "inf"),
        ("number", "1e999"),
        ("number", "1/0"),
        ("number", "9" * 400),
        ("numbers", "6, x, 5"),
        ("numbers", "and"),
        ("choice", "cpu"),  # which one?
        ("choice", "d"),
        ("order", "a, b"),
        ("order", "a, b, b"),
        *((kind, "") for kind in ("shape", "number", "numbers", "choice", "order")),
    ],
)
def test_what_is_no_answer_is_refused_with_the_form_expected(kind: Any, text: str) -> None:
    with pytest.raises(UsageError, match="not an answer") as caught:
        read(kind, text, DEVICES)
    assert caught.value.advice == f"Type {values.form_of(kind, DEVICES)}."


@given(st.sampled_from(["shape", "number", "numbers", "choice", "order"]), st.text(max_size=400))
def test_any_text_is_a_value_or_a_usage_error(kind: Any, text: str) -> None:
    try:
        value = read(kind, text, DEVICES)
    except UsageError:
        return
    assert is_same(kind, value, value)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_what_is_shown_is_read_as_the_same_value(shape: list[int]) -> None:
    assert read("shape", show("shape", shape)) == shape


def test_whole_numbers_are_exact_and_others_may_be_rounded() -> None:
    assert not is_same("number", 7.999, 8)
    assert is_same("number", 3.3, 10 / 3)
    assert not is_same("number", 3, 10 / 3)
    assert is_same("number", 0.83, 83.33, unit="%")
    assert is_same("number", 17, 16.67, unit="%")
    assert not is_same("number", 18, 16.67, unit="%")
    assert is_same("number", 1.7, 1.9, tolerance=0.15)
    assert not is_same("number", 1.5, 1.9, tolerance=0.15)
    assert not is_same("numbers", [6, 5], [6, 5, 5])
    assert not is_same("numbers", [5, 6, 5], [6, 5, 5])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1, "copies", "1 copy"), (2, "copies", "2 copies"), (1, "rows", "1 row"), (1, "ms", "1 ms"),
     (10 / 3, "x", "3.333x"), (12345, "bytes", "12,345 bytes"), (0, "lines", "0 lines")],
)  # fmt: skip
def test_numbers_are_shown_with_their_unit(value: float, unit: str, text: str) -> None:
    assert show("number", value, unit) == text
