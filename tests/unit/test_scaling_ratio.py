"""`paceline.speedup`: the arithmetic, its words, and what it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.errors import UsageError

times = st.floats(min_value=1e-6, max_value=1e6)


def test_it_says_how_much_faster_how_efficient_and_how_much_is_lost() -> None:
    found = paceline.speedup(before=100, after=30, workers=4)

    assert found.ratio == pytest.approx(10 / 3)
    assert found.efficiency == pytest.approx(10 / 12)
    assert found.lost == pytest.approx(2 / 12)
    assert found.serial_share == pytest.approx(1 / 15)
    assert str(found) == (
        "3.33x with 4 workers: 83 % efficiency, 17 % of the ideal 4x is lost, as if 6.7 % of the "
        "work could not be shared (Amdahl)."
    )


@pytest.mark.parametrize(
    ("before", "after", "workers", "words"),
    [
        (10, 10, 1, "1.00x with 1 worker: 100 % efficiency, the ideal."),
        (90, 30, 3, "the ideal."),
        (100, 20, 4, "more than the ideal"),
        (10, 20, 2, "It is slower than before."),
    ],
)
def test_it_says_what_is_unusual(before: float, after: float, workers: int, words: str) -> None:
    assert words in str(paceline.speedup(before=before, after=after, workers=workers))


@given(times, st.floats(min_value=0.0, max_value=1.0), st.integers(2, 10_000))
def test_the_serial_share_is_the_one_that_amdahl_starts_from(
    before: float, share: float, workers: int
) -> None:
    after = before * (share + (1 - share) / workers)

    found = paceline.speedup(before=before, after=after, workers=workers)

    if found.serial_share is not None:
        assert found.serial_share == pytest.approx(share, abs=1e-6)
    assert found.lost + min(found.efficiency, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"before": 0.0},
        {"before": -1},
        {"after": math.nan},
        {"after": math.inf},
        {"after": True},
        {"before": "100"},
        {"workers": 0},
        {"workers": 2.5},
        {"workers": True},
        {"before": 1e308, "after": 1e-308},
    ],
)
def test_impossible_values_are_named(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"before": 100, "after": 30, "workers": 4, **wrong}
    with pytest.raises(UsageError, match=next(iter(wrong))):
        paceline.speedup(**given)


def test_it_needs_no_torch() -> None:
    program = (
        "import sys, paceline; print(paceline.speedup(before=4, after=2, workers=2));"
        "import paceline.explain.scaling.command; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
