"""Comparing the pace of real ranks, whose clocks are turned by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm.world import World
from paceline.observe.pace import (
    LEAST_PERIOD,
    MOST_PERIOD,
    Comparison,
    Message,
    Round,
    clock_offset,
    next_period,
)
from paceline.observe.stopwatch import Stopwatch
from paceline.observe.stragglers import Blame
from paceline.testing import run_ranks

CPU = torch.device("cpu")
STEP_MS = {"data": 2, "forward": 5, "other": 1, "backward": 10}


class Clock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def train(world: World, steps: int, slow: int, phase: str, ms: float) -> dict[str, Any]:
    """Steps as a rank lives them, with a delay in one phase on one rank."""
    clock = Clock()
    watch = Stopwatch(clock)
    comparison = Comparison(watch)
    told: list[tuple[int, Blame]] = []
    comparison.listeners.append(lambda step, blame: told.append((step, blame)))
    for _ in range(steps):
        for name, usual_ms in {**STEP_MS, "wait": 1}.items():
            watch.enter(name)
            late = ms if name == phase and world.rank == slow else 0
            clock.ns += int((usual_ms + late) * 1e6)
        watch.end_step()
        comparison.on_step(world.group, CPU)
    return {"blame": comparison.blame, "told": told}


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_two_hundred_milliseconds_are_blamed_on_rank_and_phase_within_twenty_steps(
    phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_ranks(3, train, 20, 1, phase, 200)
    for result in results:  # all ranks know, rank 0 speaks
        assert (result["blame"].rank, result["blame"].phase) == (1, phase)
    ((step, blame),) = results[0]["told"]
    assert step <= 20
    assert blame.slower_by_s == pytest.approx(0.2)
    assert results[1]["told"] == results[2]["told"] == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paceline: step {step}: Rank 1 is slow: its {phase} takes")


def test_ranks_of_one_pace_hear_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_ranks(3, train, 30, 0, "data", 0)
    assert all(result["blame"] is None for result in results)
    assert capsys.readouterr().err == ""


def message(took_s: float, step_s: float) -> Message:
    zeros = dict.fromkeys(Message._fields, 0.0)
    return Message(**{**zeros, "took_s": took_s, "step_s": step_s})


def test_comparing_takes_a_thousandth_of_the_time() -> None:
    assert next_period([message(0.002, 0.1), message(0.5, 0.1)]) == 20  # who waited does not count
    assert next_period([message(0.00001, 0.1)]) == LEAST_PERIOD
    assert next_period([message(1.0, 0.001)]) == MOST_PERIOD
    assert next_period([message(0.001, 0.0)]) == MOST_PERIOD


@settings(deadline=None)
@given(
    offset=st.integers(-(10**15), 10**15),
    rounds=st.lists(st.tuples(*[st.integers(0, 10**9)] * 3), min_size=1, max_size=8),
)
def test_clock_bounds_always_hold(offset: int, rounds: list[tuple[int, int, int]]) -> None:
    """Both enter, both leave after the later one; clocks differ by `offset`."""
    seen = []
    for number, (mine, zero, after) in enumerate(rounds):
        begin = number * 10**10
        met = begin + max(mine, zero)
        seen.append(
            Round(
                my_begin=begin + mine,
                my_end=met + after,
                zero_begin=begin + zero + offset,
                zero_end=met + offset,
            )
        )
    found, error = clock_offset(seen)
    assert abs(found - offset) <= error + 1
