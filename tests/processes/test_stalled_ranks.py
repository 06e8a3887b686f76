"""Stalls of real processes: one is stopped, or busy, and the others say who."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time

import pytest
import torch
from sentences import says
from torch import Tensor, nn

from paceline import DDPOptions, DistributedDataParallel
from paceline import group as comm
from paceline.group.membership import Membership
from paceline.group.world import World
from paceline.telemetry import stopwatch, stragglers
from paceline.telemetry.phases import Phase
from paceline.testing import run_processes

stragglers.LEAST_SILENCE_S = 1.0  # here and in the processes, which import this module


def stop_one(world: World, culprit: int) -> list[str]:
    """All wait for a rank that has stopped itself; who hears its name wakes it up."""
    pids = comm.exchange(world.group, os.getpid(), torch.device("cpu"), "pids")
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        if f"for worker {culprit}, which sends no heartbeat" in line:
            os.kill(pids[culprit], signal.SIGCONT)

    membership = Membership(world.group)
    watch = stopwatch.get_stopwatch(membership)
    watch.stalls = stragglers.StallWatch(watch, 0.5, print_line=hear)
    watch.stalls.start()
    if world.rank == culprit:
        world.group.get_group_store().wait(["paceline/heartbeat/2"])
        os.kill(os.getpid(), signal.SIGSTOP)
    with comm.waiting(world.group):
        comm.all_reduce(world.group, torch.ones(1), "a sum")
    return lines


def test_a_stopped_rank_is_named_by_those_that_wait() -> None:
    first, second, _ = run_processes(3, stop_one, 2)
    assert "Workers 0 and 1 wait for worker 2, which sends no heartbeat: stopped or gone." in first
    assert any("Worker 0 has made no progress" in line and "waiting for" in line for line in first)
    assert any("Worker 1 has made no progress" in line for line in second)
    assert not any(" wait for " in line for line in second)  # one of them is enough


def hang_in_own_code(world: World, culprit: int) -> list[str]:
    """One rank waits for an event in its own code until the stall was told."""
    lines: list[str] = []
    told = threading.Event()

    def hear(line: str) -> None:
        lines.append(line)
        if " for worker " in line and world.rank == 0:
            world.group.get_group_store().set("told", "yes")

    def look_up() -> None:
        store = world.group.get_group_store().clone()
        store.wait(["told"])
        told.set()

    membership = Membership(world.group)
    watch = stopwatch.get_stopwatch(membership)
    watch.stalls = stragglers.StallWatch(watch, 0.5, print_line=hear)
    watch.stalls.start()
    if world.rank == culprit:
        threading.Thread(target=look_up, daemon=True).start()
        watch.enter(Phase.DATA)
        told.wait()  # the line to be named
    with comm.waiting(world.group):
        comm.all_reduce(world.group, torch.ones(1), "a sum")
    return lines


def test_a_rank_stuck_in_its_own_code_is_named_with_the_line() -> None:
    first, second = run_processes(2, hang_in_own_code, 1)
    (verdict,) = [line for line in first if " waits for " in line]
    assert verdict.startswith("Worker 0 waits for worker 1, which is in data, at ")
    assert verdict.endswith("in hang_in_own_code: told.wait()  # the line to be named.")
    assert any(line.startswith("Worker 1 has made no progress") for line in second)


class Stuck(nn.Module):
    """On one rank, passes its input on only when the others have said what they think of it."""

    def __init__(self, world: World, culprit: int) -> None:
        super().__init__()
        self.world, self.culprit, self.step = world, culprit, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.step == 2 and self.world.rank == self.culprit:
            store = self.world.group.get_group_store().clone()
            store.wait(["told"])  # the line to be named
        return x


def stall_a_model(world: World, culprit: int, transport: str, hosts: str = "aaa") -> str:
    os.environ["PACELINE_STALL_S"] = "1"
    os.environ["PACELINE_HOST"] = hosts[world.rank]
    sys.stderr = said = io.StringIO()
    stuck = Stuck(world, culprit)
    net = nn.Sequential(nn.Linear(3, 4), stuck, nn.Linear(4, 2))
    options = DDPOptions(transport=transport)  # type: ignore[arg-type]
    model = DistributedDataParallel(net, process_group=world.group, options=options)

    def release() -> None:
        while (
            "wait for worker" not in said.getvalue() and "waits for worker" not in said.getvalue()
        ):
            time.sleep(0.02)
        world.group.get_group_store().clone().set("told", "yes")

    if world.rank == 0:
        threading.Thread(target=release, daemon=True).start()
    for stuck.step in range(4):
        model(torch.ones(2, 3)).sum().backward()
    return said.getvalue()


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_a_model_that_stalls_names_step_bucket_parameters_and_lines(transport: str) -> None:
    first, _, culprit = run_processes(3, stall_a_model, 2, transport)
    lines = first.splitlines()
    (mine,) = [line for line in lines if "Worker 0 has made no progress" in line]
    assert says(mine, "at step 2, waiting for", "sum of bucket 0 ('2.bias' to '0.weight')")
    assert ("which lacks worker 2" in mine) == (transport == "shared_memory")
    assert "in stall_a_model: model(torch.ones(2, 3)).sum().backward()" in mine
    (verdict,) = [line for line in lines if " wait for " in line]
    assert says(verdict, "Workers 0 and 1 wait for worker 2, which", "in forward, at")
    assert 'in forward: store.wait(["told"])' in verdict
    assert "Worker 2 has made no progress" in culprit


def test_between_hosts_no_rank_of_the_own_host_is_named_for_another_hosts_lateness() -> None:
    first, second, _ = run_processes(3, stall_a_model, 2, "auto", "aab")
    (leader,) = [line for line in first.splitlines() if "Worker 0 has made no progress" in line]
    assert says(
        leader, "waiting for", "sum of bucket 0 ('2.bias' to '0.weight'), which lacks other"
    )
    assert "worker 1" not in leader
    (verdict,) = [line for line in first.splitlines() if " wait for " in line]
    assert says(verdict, "Workers 0 and 1 wait for worker 2, which", "in forward, at")
    assert "Worker 1 has made no progress" in second


def stop_early(world: World, moment: str, transport: str) -> str:
    """Rank 1 is stopped before it wraps its model, or before its first backward."""
    os.environ["PACELINE_STALL_S"] = "1"
    sys.stderr = said = io.StringIO()
    pids = comm.exchange(world.group, os.getpid(), torch.device("cpu"), "pids")

    def release() -> None:
        while "for worker 1" not in said.getvalue():
            time.sleep(0.02)
        os.kill(pids[1], signal.SIGCONT)

    if world.rank == 0:
        threading.Thread(target=release, daemon=True).start()
    if world.rank == 1 and moment == "wrapping":
        os.kill(os.getpid(), signal.SIGSTOP)
    options = DDPOptions(transport=transport)  # type: ignore[arg-type]
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=world.group, options=options)
    if world.rank == 1 and moment == "first backward":
        world.group.get_group_store().wait(["paceline/heartbeat/1"])
        os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(2, 3)).sum().backward()
    return said.getvalue()


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize(
    ("moment", "words"),
    [("wrapping", "has not come this far"), ("first backward", "sends no heartbeat")],
)
def test_a_rank_that_is_stopped_before_the_first_step_is_named(
    moment: str, words: str, transport: str
) -> None:
    first, _ = run_processes(2, stop_early, moment, transport)
    assert f"Worker 0 waits for worker 1, which {words}" in first
