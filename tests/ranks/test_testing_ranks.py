"""Ranks as threads: results in order, the first real error, and nothing left behind."""

from __future__ import annotations

import re
import threading
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline import group as comm
from paceline.errors import PeerError, UsageError, WorkerError
from paceline.group.world import World
from paceline.testing import assert_replicas_equal, run_ranks, seeded
from tests.faults.planned import Faults, PlannedFault

FOREVER_S = 3600.0
"""Longer than a test may take: a rank that waits for it never returns."""


def add(world: World) -> float:
    total = torch.tensor([float(world.rank + 1)])
    comm.all_reduce(world.group, total, "the sum")
    return total.item()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_talk_through_a_real_group_and_results_come_in_rank_order(size: int) -> None:
    def body(world: World) -> tuple[int, int, int, int, float]:
        return world.rank, world.size, world.local_rank, world.local_size, add(world)

    total = size * (size + 1) / 2
    assert run_ranks(size, body) == [(rank, size, rank, size, total) for rank in range(size)]


def test_arguments_reach_every_rank() -> None:
    assert run_ranks(2, lambda world, a, b: (world.rank, a, b), 1, "x") == [
        (0, 1, "x"),
        (1, 1, "x"),
    ]


def test_a_rank_may_return_nothing() -> None:
    assert run_ranks(2, lambda world: None) == [None, None]


def test_two_worlds_in_a_row_do_not_hear_each_other() -> None:
    assert [run_ranks(2, add) for _ in range(3)] == [[3.0, 3.0]] * 3


def test_there_is_no_default_group_in_a_thread_rank() -> None:
    assert run_ranks(1, lambda world: dist.is_initialized()) == [False]


def test_gradients_are_on_in_every_rank() -> None:
    with torch.no_grad():
        assert run_ranks(2, lambda world: torch.is_grad_enabled()) == [True, True]


def fail_on_one(world: World, failing: int) -> float:
    if world.rank == failing:
        raise ValueError("the first real one")
    return add(world)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_first_real_error_is_raised_with_its_rank_and_before_any_timeout(size: int) -> None:
    for failing in range(size):
        with pytest.raises(ValueError, match="the first real one") as caught:
            run_ranks(size, fail_on_one, failing, timeout_s=FOREVER_S)
        assert caught.value.__notes__[0] == f"rank {failing} raised this"
        assert len(caught.value.__notes__) == size


def test_the_raised_error_still_shows_the_line_that_raised_it() -> None:
    with pytest.raises(ValueError, match="real") as caught:
        run_ranks(2, fail_on_one, 1)
    assert "fail_on_one" in "".join(traceback.format_exception(caught.value))


def test_every_rank_s_end_can_be_asked_for() -> None:
    def body(world: World) -> float:
        add(world)
        return fail_on_one(world, 1)

    first, second, third = run_ranks(3, body, return_exceptions=True)
    assert isinstance(second, ValueError)
    assert isinstance(first, PeerError)
    assert isinstance(third, PeerError)
    assert "rank 1 raised ValueError: the first real one" in str(first).lower().replace(
        "valueerror", "ValueError"
    )


def test_a_rank_that_finishes_early_is_named_by_those_that_wait_for_it() -> None:
    ends = run_ranks(2, lambda world: world.rank == 1 or add(world), return_exceptions=True)
    assert ends[1] is True
    assert isinstance(ends[0], PeerError)
    assert "rank 1 finished" in str(ends[0]).lower()


def test_a_peer_error_is_raised_where_there_is_nothing_better() -> None:
    with pytest.raises(PeerError):
        run_ranks(2, lambda world: world.rank == 1 or add(world))


def test_peers_fail_before_any_timeout_although_an_error_chain_held_the_group() -> None:
    def body(world: World) -> float:
        if world.rank == 1:
            try:
                held = world.group
                raise KeyError(held.rank())
            except KeyError as error:
                raise ValueError("outer") from error
        return add(world)

    with pytest.raises(ValueError, match="outer"):
        run_ranks(2, body, timeout_s=FOREVER_S)


def test_peers_fail_before_any_timeout_although_a_cycle_holds_the_group() -> None:
    def body(world: World) -> Any:
        cycle: list[Any] = [world.group]
        cycle.append(cycle)
        return world.rank == 1 or add(world)

    with pytest.raises(PeerError):
        run_ranks(2, body, timeout_s=FOREVER_S)


def test_peers_fail_before_any_timeout_although_hooks_of_a_module_hold_the_group() -> None:
    def body(world: World) -> None:
        model = seeded(nn.Linear(2, 2))

        def on_grad_ready(grad: torch.Tensor) -> None:
            comm.all_reduce(world.group, grad.clone(), f"a gradient of {model}")
            if world.rank == 1:
                raise PlannedFault("in backward")

        for parameter in model.parameters():
            parameter.register_hook(on_grad_ready)
        model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(PlannedFault, match="in backward"):
        run_ranks(3, body, timeout_s=FOREVER_S)


def test_an_error_group_and_a_system_exit_are_errors_too() -> None:
    def body(world: World) -> float:
        if world.rank == 0:
            raise ExceptionGroup("both", [ValueError("a"), TypeError("b")])
        return add(world)

    with pytest.raises(ExceptionGroup, match="both"):
        run_ranks(2, body)
    with pytest.raises(SystemExit):
        run_ranks(
            2, lambda world: Faults().exit(rank=1, step=0).strike(world.rank, 0) or add(world)
        )


def test_a_failing_assertion_in_a_rank_fails_the_test() -> None:
    def body(world: World) -> None:
        assert world.rank == 0, "only rank 0 is 0"

    with pytest.raises(AssertionError, match="only rank 0"):
        run_ranks(2, body)


def test_a_rank_that_never_returns_is_named_with_the_line_it_is_at() -> None:
    release = threading.Event()

    def wait_for_nobody(world: World) -> None:
        if world.rank == 1:
            release.wait()

    try:
        with pytest.raises(WorkerError, match=r"Rank 1.* still running after 11.5 s") as caught:
            run_ranks(2, wait_for_nobody, timeout_s=1.5)
    finally:
        release.set()
    assert caught.value.rank == 1
    assert "wait_for_nobody" in caught.value.traceback


def test_a_collective_that_one_rank_never_joins_ends_at_the_timeout() -> None:
    release = threading.Event()

    def body(world: World) -> None:
        if world.rank == 0:
            try:
                add(world)
            finally:
                release.set()
        release.wait()

    with pytest.raises(PeerError):
        run_ranks(2, body, timeout_s=0.3)


def test_faults_that_end_a_process_are_refused_in_a_thread() -> None:
    plan = Faults().kill(rank=1, step=0).stop(rank=0, step=0)
    for end in run_ranks(2, lambda world: plan.strike(world.rank, 0), return_exceptions=True):
        assert isinstance(end, UsageError)
        assert "run_processes" in str(end)


def test_models_from_one_seed_are_equal_on_all_ranks_at_once() -> None:
    states = run_ranks(3, lambda world: seeded(nn.Linear(20, 20), 4).state_dict())
    assert_replicas_equal(states)


@pytest.mark.parametrize("size", [0, -1, True, 1.0, "2", None])
def test_a_world_without_ranks_is_refused(size: Any) -> None:
    with pytest.raises(UsageError, match=rf"size.* {re.escape(repr(size))}"):
        run_ranks(size, add)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_timeout_that_is_over_is_refused(timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        run_ranks(1, add, timeout_s=timeout_s)
