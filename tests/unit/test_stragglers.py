"""Stragglers: a slow rank is named with its phase, and noise is nobody's fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import says

from paceline.telemetry.blame import (
    Blame,
    OwnWork,
    find_slow,
    find_slow_worker,
    has_lead,
    summarise,
)
from paceline.telemetry.phases import MEASURED, OWN, Phase
from paceline.telemetry.stragglers import LEAST_PERIOD, MOST_PERIOD, next_period

WINDOW = 5

NOISES: dict[str, Callable[[random.Random], float]] = {
    "even": lambda rng: rng.random(),
    "normal": lambda rng: max(0.0, rng.gauss(1, 0.1)),
    "exponential": lambda rng: rng.expovariate(1),
    "heavy tail": lambda rng: rng.paretovariate(1.5),
    "rare spikes": lambda rng: 20.0 if rng.random() < 0.1 else 1.0,
    "log-normal": lambda rng: rng.lognormvariate(0, 1),
}


Step = dict[Phase, float]


def step(**ms_by_phase: float) -> Step:
    return {phase: ms_by_phase.get(phase, 0) / 1000 for phase in MEASURED}


def usual(rng: random.Random, noise: Callable[[random.Random], float]) -> Step:
    return step(**{phase: 5 * noise(rng) for phase in ("data", "forward", "backward", "optimizer")})


def window(by_rank: Sequence[Sequence[Step]]) -> list[OwnWork]:
    return [summarise(steps) for steps in by_rank]


def windows_with_delay(
    size: int, slow: int, phase: Phase, ms: float, *, count: int = 4, seed: int = 0
) -> list[list[OwnWork]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        by_rank = [[usual(rng, NOISES["normal"]) for _ in range(WINDOW)] for _ in range(size)]
        for times in by_rank[slow]:
            times[phase] += ms / 1000
        found.append(window(by_rank))
    return found


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([2, 3, 5, 8]),
    slow=st.integers(0, 7),
    phase=st.sampled_from(OWN),
    ms=st.sampled_from([20.0, 50.0, 200.0]),
    seed=st.integers(0, 1000),
)
def test_a_delay_is_blamed_on_its_rank_and_phase_within_ten_steps(
    size: int, slow: int, phase: Phase, ms: float, seed: int
) -> None:
    blame = find_slow(windows_with_delay(size, slow % size, phase, ms, count=2, seed=seed))
    assert blame is not None
    assert (blame.rank, blame.phase) == (slow % size, phase)
    assert blame.slower_by_s * 1000 == pytest.approx(ms, rel=0.2)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("size", [2, 3])
def test_nobody_is_blamed_when_all_are_equally_noisy(noise: str, size: int) -> None:
    rng = random.Random(7)
    windows: list[list[OwnWork]] = []
    for _ in range(600):
        windows.append(
            window([[usual(rng, NOISES[noise]) for _ in range(WINDOW)] for _ in range(size)])
        )
        assert find_slow(windows[-4:]) is None


def test_one_long_step_is_no_slow_rank() -> None:
    windows = []
    for number in range(6):
        by_rank = [[step(forward=5 + 0.1 * i, backward=10) for i in range(WINDOW)] for _ in "012"]
        if number % 3 == 0:
            by_rank[0][2] = step(forward=5, backward=10, other=3000)  # a checkpoint, say
        windows.append(window(by_rank))
        assert find_slow(windows) is None


def test_one_bad_window_is_an_accident() -> None:
    windows = windows_with_delay(3, 1, Phase.DATA, 0, count=3)
    windows += windows_with_delay(3, 1, Phase.DATA, 500, count=1)
    assert find_slow(windows) is None


def test_a_rank_that_recovers_is_forgiven() -> None:
    windows = windows_with_delay(3, 1, Phase.DATA, 200) + windows_with_delay(
        3, 1, Phase.DATA, 0, count=2
    )
    assert find_slow(windows) is None


def test_steps_before_a_rank_became_slow_are_not_counted() -> None:
    windows = windows_with_delay(3, 1, Phase.DATA, 0, count=2)
    windows += windows_with_delay(3, 1, Phase.DATA, 500, count=2)
    blame = find_slow(windows)
    assert blame is not None
    assert blame.steps <= 2 * WINDOW
    assert blame.slower_by_s > 0.4
    assert [has_lead(window) for window in windows] == [False, False, True, True]


def test_waiting_is_not_work() -> None:
    waiting = [step(forward=5, wait=200) for _ in range(WINDOW)]
    working = [step(forward=205, wait=0) for _ in range(WINDOW)]
    blame = find_slow([window([waiting, working, waiting])] * 2)
    assert blame is not None
    assert (blame.rank, blame.phase) == (1, "forward")


def test_small_differences_are_not_worth_a_word() -> None:
    assert find_slow(windows_with_delay(3, 1, Phase.DATA, 1)) is None


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_without_anybody_to_compare_with_is_not_blamed(size: int) -> None:
    windows = windows_with_delay(2, 1, Phase.DATA, 200)
    idle = summarise([])
    assert find_slow([[w[1], idle][:size] for w in windows]) is None


def test_too_few_windows_say_nothing() -> None:
    assert find_slow([]) is None
    assert find_slow(windows_with_delay(3, 1, Phase.DATA, 500, count=1)) is None


def recorded(count: int, slow_ms: float = 0) -> dict[int, list[Step]]:
    """The steps of workers 3, 5 and 8, of which worker 5 is slow in data."""
    rng = random.Random(3)
    found = {worker: [usual(rng, NOISES["normal"]) for _ in range(count)] for worker in (3, 5, 8)}
    for times in found[5]:
        times[Phase.DATA] += slow_ms / 1000
    return found


@pytest.mark.parametrize("count", [10, 37, 100])
def test_recorded_steps_name_the_slow_worker_too(count: int) -> None:
    blame = find_slow_worker(recorded(count, slow_ms=20))
    assert blame is not None
    assert (blame.rank, blame.phase) == (5, Phase.DATA)
    assert blame.slower_by_s * 1000 == pytest.approx(20, rel=0.2)
    assert find_slow_worker(recorded(count)) is None


def test_a_worker_that_has_joined_since_does_not_hide_the_slow_one() -> None:
    steps = recorded(100, slow_ms=20)
    steps[8] = steps[8][:3]
    blame = find_slow_worker(steps)
    assert blame is not None
    assert blame.rank == 5


@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_few_recorded_steps_say_nothing(count: int) -> None:
    assert find_slow_worker(recorded(count, slow_ms=500)) is None
    assert find_slow_worker({}) is None


def numbers(took_s: float, step_s: float) -> OwnWork:
    return replace(summarise([step(forward=5)], took_s), step_s=step_s)


def test_what_a_rank_tells_survives_a_row_of_floats() -> None:
    told = numbers(0.002, 0.1)
    assert OwnWork.from_row(told.row()) == told


def test_comparing_takes_two_thousandths_of_the_time() -> None:
    assert next_period([numbers(0.002, 0.1), numbers(0.5, 0.1)]) == 10  # who waited does not count
    assert next_period([numbers(0.00001, 0.1)]) == LEAST_PERIOD
    assert next_period([numbers(1.0, 0.001)]) == MOST_PERIOD
    assert next_period([numbers(0.001, 0.0)]) == MOST_PERIOD


def test_the_sentence_says_who_what_and_how_much() -> None:
    blame = Blame(
        rank=2,
        phase=Phase.FORWARD,
        slower_by_s=0.2012,
        phase_s=0.212,
        others_phase_s=0.0044,
        steps=16,
    )
    parts = ("Worker 2", "slow", "forward", "212 ms", "others", "4.4 ms", "201 ms", "16 steps")
    assert says(str(blame), *parts)
