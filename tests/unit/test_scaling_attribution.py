"""Lost time: the parts always add up, and each loss is found where it was put; `speedup`."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentences import says

import paceline
from paceline.errors import UsageError
from paceline.show.scaling.attribution import (
    PARTS,
    Mode,
    attribute,
    crowding_of,
    detect_mode,
)
from paceline.show.scaling.measure import Profile
from paceline.telemetry.phases import Phase
from paceline.telemetry.units import percentages

JOB = {"data": 4.0, "forward": 20.0, "backward": 40.0, "optimizer": 8.0, "other": 8.0}
CORES = 1000


def profile(workers: int, seconds: dict[str, float] | None = None, **facts: Any) -> Profile:
    every = {**dict.fromkeys(Phase, 0.0), **{Phase(p): s for p, s in (seconds or {}).items()}}
    return Profile(workers=workers, seconds=every, **{"steps": 100, **facts})


def shrunk(factor: float, **changes: float) -> dict[str, float]:
    """The job of `factor` times the samples, with some phases changed."""
    kept = {phase: value * factor for phase, value in JOB.items()}
    return {**kept, "optimizer": JOB["optimizer"], **changes}


phases = st.fixed_dictionaries({phase.value: st.floats(0, 1e3) for phase in Phase})
modes: st.SearchStrategy[Mode] = st.sampled_from(["strong", "weak"])


@given(phases, phases, st.integers(1, 64), modes, st.integers(1, 64))
def test_parts_are_never_negative_and_add_up_to_what_is_lost(
    before: dict[str, float],
    after: dict[str, float],
    workers: int,
    mode: Mode,
    cores: int,
) -> None:
    before["forward"] += 1e-3
    after["forward"] += 1e-3
    many = profile(workers, after)
    result = attribute(profile(1, before), many, mode, cores)

    assert set(result.lost) == set(PARTS)
    assert all(value >= 0 for value in result.lost.values())
    lost = max(0.0, result.step_s - result.ideal_s)
    assert sum(result.lost.values()) == pytest.approx(lost, rel=1e-9, abs=1e-9)
    assert sum(percentages(result.lost).values()) in ({100} if lost > 1e-9 else {0, 100})


@pytest.mark.parametrize(
    ("phase", "part"),
    [
        ("transfer", "communication"),
        ("wait", "waiting"),
        ("data", "data"),
        ("forward", "compute"),
        ("backward", "compute"),
        ("other", "other"),
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_time_that_is_added_to_a_phase_is_lost_there(phase: str, part: str, workers: int) -> None:
    usual = shrunk(1 / workers)
    one, before = profile(1, JOB), profile(workers, usual)
    after = profile(workers, {**usual, phase: usual.get(phase, 0.0) + 5.0})

    lost = attribute(one, before, "strong", CORES).lost
    now = attribute(one, after, "strong", CORES).lost

    assert {name: now[name] - lost[name] for name in PARTS} == pytest.approx(
        {name: 5.0 if name == part else 0.0 for name in PARTS}
    )


def test_an_update_that_every_worker_repeats_is_lost_in_strong_scaling_only() -> None:
    strong = attribute(profile(1, JOB), profile(4, shrunk(1 / 4)), "strong", CORES)
    weak = attribute(profile(1, JOB), profile(4, shrunk(1.0)), "weak", CORES)

    assert strong.lost["optimizer"] == pytest.approx(6.0)
    assert sum(strong.lost.values()) == pytest.approx(6.0)
    assert weak.efficiency == pytest.approx(1.0)
    assert sum(weak.lost.values()) == 0


def test_work_that_takes_twice_as_long_on_shared_cores_is_lost_to_sharing() -> None:
    crowded = {phase: 2 * value for phase, value in shrunk(1 / 4).items()}

    result = attribute(profile(1, JOB), profile(4, crowded), "strong", cores=2)

    assert result.lost["sharing"] == pytest.approx(4 + 10 + 5 + 3 - 4 + 8)
    assert result.lost["compute"] == pytest.approx(0.0)


def test_what_gets_faster_pays_for_the_rest() -> None:
    better = shrunk(1 / 2, data=1.0, forward=11.0, optimizer=4.0, transfer=3.0)

    lost = attribute(profile(1, JOB), profile(2, better), "strong", CORES).lost

    # 1 and 3 are lost, 1 is gained: 3 in all.
    assert lost["compute"] == pytest.approx(0.75)
    assert lost["communication"] == pytest.approx(2.25)
    assert lost["data"] == 0


def test_samples_of_a_step_tell_strong_from_weak_scaling() -> None:
    def study(*samples: int | None) -> tuple[str, str]:
        sizes = (1, 2, 4)
        return detect_mode(
            [profile(n, JOB, samples=s) for n, s in zip(sizes, samples, strict=True)]
        )

    assert study(64, 64, 64) == (
        "strong",
        "found: 64 samples a step with 1 worker, 64 with 4",
    )
    assert study(64, 128, 256)[0] == "weak"
    assert study(64, 64, 63)[0] == "strong"  # not divisible
    assert study(None, 64, 64)[1].startswith("assumed")


def test_samples_that_do_not_fit_the_mode_count_as_they_are() -> None:
    result = attribute(profile(1, JOB, samples=64), profile(3, JOB, samples=63), "strong", CORES)
    assert result.efficiency == pytest.approx(21 / 64)


def test_cores_and_devices_are_shared_by_workers() -> None:
    one = profile(1, JOB)
    assert crowding_of(profile(2, JOB), one, 2) == 1
    assert crowding_of(profile(4, JOB), one, 2) == 2
    assert crowding_of(profile(2, JOB, threads=2), profile(1, JOB, threads=2), 2) == 2
    assert crowding_of(profile(2, JOB, ranks_per_device=2), one, 2) == 2


@given(st.dictionaries(st.sampled_from(PARTS), st.floats(0, 1e6)))
def test_whole_percents_add_up_to_a_hundred(parts: dict[str, float]) -> None:
    found = percentages(parts)
    total = sum(parts.values())
    assert sum(found.values()) == (100 if total > 0 else 0)
    for name, value in parts.items():
        assert total == 0 or abs(found[name] - 100 * value / total) <= 1


times = st.floats(min_value=1e-6, max_value=1e6)


def test_it_says_how_much_faster_how_efficient_and_how_much_is_lost() -> None:
    found = paceline.speedup(before=100, after=30, workers=4)

    assert found.ratio == pytest.approx(10 / 3)
    assert found.efficiency == pytest.approx(10 / 12)
    assert found.lost == pytest.approx(2 / 12)
    assert found.serial_share == pytest.approx(1 / 15)
    parts = ("3.33x", "4 workers", "83 % efficiency", "17 %", "4x", "6.7 %", "Amdahl")
    assert says(str(found), *parts)


@pytest.mark.parametrize(
    ("before", "after", "workers", "parts"),
    [
        (10, 10, 1, ["1.00x", "1 worker", "100 % efficiency", "0 %"]),
        (100, 20, 4, ["more than", "ideal"]),
        (10, 20, 2, ["25 % efficiency", "75 %", "2x"]),
    ],
)
def test_it_says_what_is_unusual(
    before: float, after: float, workers: int, parts: list[str]
) -> None:
    assert says(str(paceline.speedup(before=before, after=after, workers=workers)), *parts)


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
        "import paceline.show.scaling.command; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
