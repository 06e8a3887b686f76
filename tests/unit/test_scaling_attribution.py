"""Lost time: the parts always add up, and each loss is found where it was put."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.explain.scaling.attribution import (
    PARTS,
    Machine,
    Mode,
    attribute,
    detect_mode,
    percentages,
)
from paceline.explain.scaling.profile import PHASES, Profile

JOB = {"data": 4.0, "forward": 20.0, "backward": 40.0, "optimizer": 8.0, "other": 8.0}


def profile(workers: int, seconds: dict[str, float] | None = None, **facts: Any) -> Profile:
    every = {**dict.fromkeys(PHASES, 0.0), **(seconds or {})}
    return Profile(workers=workers, step_s=sum(every.values()), seconds=every, **facts)


def shrunk(factor: float, **changes: float) -> dict[str, float]:
    """The job of `factor` times the samples, with some phases changed."""
    kept = {phase: value * factor for phase, value in JOB.items()}
    return {**kept, "optimizer": JOB["optimizer"], **changes}


phases = st.fixed_dictionaries({phase: st.floats(0, 1e3) for phase in PHASES})
modes: st.SearchStrategy[Mode] = st.sampled_from(["strong", "weak"])


@given(phases, phases, st.integers(1, 64), modes, st.floats(1, 8), st.floats(1, 8))
def test_parts_are_never_negative_and_add_up_to_what_is_lost(
    before: dict[str, float],
    after: dict[str, float],
    workers: int,
    mode: Mode,
    crowding: float,
    others: float,
) -> None:
    before["forward"] += 1e-3
    after["forward"] += 1e-3
    result = attribute(profile(1, before), profile(workers, after), mode, crowding, others)

    assert set(result.lost_s) == set(PARTS)
    assert all(value >= 0 for value in result.lost_s.values())
    lost = max(0.0, result.step_s - result.ideal_s)
    assert sum(result.lost_s.values()) == pytest.approx(lost, rel=1e-9, abs=1e-9)
    assert sum(percentages(result.lost_s).values()) in ({100} if lost > 1e-9 else {0, 100})


@pytest.mark.parametrize(
    ("phase", "part"),
    [
        ("communication", "communication"),
        ("waiting", "waiting"),
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

    lost = attribute(one, before, "strong").lost_s
    now = attribute(one, after, "strong").lost_s

    assert {name: now[name] - lost[name] for name in PARTS} == pytest.approx(
        {name: 5.0 if name == part else 0.0 for name in PARTS}
    )


def test_an_update_that_every_worker_repeats_is_lost_in_strong_scaling_only() -> None:
    strong = attribute(profile(1, JOB), profile(4, shrunk(1 / 4)), "strong")
    weak = attribute(profile(1, JOB), profile(4, shrunk(1.0)), "weak")

    assert strong.lost_s["optimizer"] == pytest.approx(6.0)
    assert sum(strong.lost_s.values()) == pytest.approx(6.0)
    assert weak.efficiency == pytest.approx(1.0)
    assert sum(weak.lost_s.values()) == 0


def test_work_that_takes_twice_as_long_on_shared_cores_is_lost_to_sharing() -> None:
    crowded = {phase: 2 * value for phase, value in shrunk(1 / 4).items()}

    result = attribute(profile(1, JOB), profile(4, crowded), "strong", crowding=2.0)

    assert result.lost_s["sharing"] == pytest.approx(4 + 10 + 5 + 3 - 4 + 8)
    assert result.lost_s["compute"] == pytest.approx(0.0)


def test_what_gets_faster_pays_for_the_rest() -> None:
    better = shrunk(1 / 2, data=1.0, forward=11.0, optimizer=4.0, communication=3.0)

    lost = attribute(profile(1, JOB), profile(2, better), "strong").lost_s

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
    result = attribute(profile(1, JOB, samples=64), profile(3, JOB, samples=63), "strong")
    assert result.efficiency == pytest.approx(21 / 64)


def test_cores_and_devices_are_shared_by_workers_and_by_other_programs() -> None:
    machine = Machine(cores=2)
    one = profile(1, JOB)

    assert machine.crowding_of(profile(2, JOB), one) == 1
    assert machine.crowding_of(profile(4, JOB), one) == 2
    assert machine.crowding_of(profile(2, JOB, threads=2), profile(1, JOB, threads=2)) == 2
    assert machine.crowding_of(profile(2, JOB, ranks_per_device=2), one) == 2
    assert machine.crowding_with_others(profile(2, JOB, others_cores=1.0), one) == 1.5


@given(st.dictionaries(st.sampled_from(PARTS), st.floats(0, 1e6)))
def test_whole_percents_add_up_to_a_hundred(parts: dict[str, float]) -> None:
    found = percentages(parts)
    total = sum(parts.values())
    assert sum(found.values()) == (100 if total > 0 else 0)
    for name, value in parts.items():
        assert total == 0 or abs(found[name] - 100 * value / total) <= 1
