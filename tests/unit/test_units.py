"""Numbers as people read them."""

from __future__ import annotations

import pytest

from paceline.telemetry.units import (
    bytes_text,
    count_text,
    list_text,
    seconds_text,
    shape_text,
    share_text,
    table_lines,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (12e-6, "12 us"),
        (0.00031, "0.31 ms"),
        (0.42, "420 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (9.994, "9.99 s"),
        (17.2, "17 s"),
        (59.6, "1:00"),
        (185, "3:05"),
        (7209, "2:00:09"),
        (4 * 86400 + 3 * 3600 + 12 * 60, "4 d 03:12"),
        (float("inf"), "?"),
        (-1, "?"),
    ],
)
def test_a_time_is_said_in_the_unit_people_would_use(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (400, "400 B"),
        (4000, "4.0 kB"),
        (999_950, "1.0 MB"),
        (97_700_000, "97.7 MB"),
        (2_500_000_000_000, "2.5 TB"),
        (2_500_000_000_000_000, "2,500.0 TB"),
    ],
)
def test_bytes_are_counted_in_powers_of_ten(number: int, text: str) -> None:
    assert bytes_text(number) == text


def test_counts_shapes_shares_and_lists_read_as_sentences_have_them() -> None:
    assert [count_text(n, "row") for n in (0, 1, 1000)] == ["0 rows", "1 row", "1,000 rows"]
    assert [shape_text(s) for s in ([], [7], [1000, 10])] == ["1 number", "7", "1,000 x 10"]
    assert [share_text(0.833), share_text(0.0666, 1)] == ["83 %", "6.7 %"]
    assert [list_text(w) for w in ([], [50], [50, 30, 20])] == ["", "50", "50, 30 and 20"]


def test_a_table_aligns_each_column_and_ends_no_line_in_blanks() -> None:
    rows = [["name", "n", "m"], ["a", "10", "5"], ["longer", "2", ""]]
    assert table_lines(rows, "<>") == ["name     n  m", "a       10  5", "longer   2"]
