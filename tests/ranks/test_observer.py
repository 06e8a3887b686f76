"""The engine observed: phases, blame and recordings of real models on real ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from updates import update

from paceline import DistributedDataParallel, SyncBatchNorm
from paceline.comm.world import World
from paceline.observe import stopwatch
from paceline.observe.stopwatch import PHASES
from paceline.testing import Faults, run_ranks, seeded

STEPS = 20
DELAY_S = 0.03


class Slow(nn.Module):
    """A layer that strikes planned faults in its forward and its backward pass."""

    def __init__(self, faults: Faults, rank: int) -> None:
        super().__init__()
        self.faults, self.rank, self.step = faults, rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self.faults.strike(self.rank, self.step, "forward")
        x = x.clone()
        if x.requires_grad:
            x.register_hook(lambda _: self.faults.strike(self.rank, self.step, "backward"))
        return x


def train(world: World, phase: str, slow_rank: int) -> Any:
    faults = Faults()
    for step in range(STEPS):
        faults = faults.delay(rank=slow_rank, step=step, where=phase, seconds=DELAY_S)
    slow = Slow(faults, world.rank)
    net = nn.Sequential(nn.Linear(8, 8), slow, nn.BatchNorm1d(8), nn.Linear(8, 2))
    model = DistributedDataParallel(seeded(net), process_group=world.group)
    told = []
    observer = model._reducer.observer
    assert observer is not None
    assert observer.comparison is not None
    observer.comparison.listeners.append(lambda step, blame: told.append((step, blame)))
    for step in range(STEPS):
        slow.step = step
        faults.strike(world.rank, step, "data")
        model.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        faults.strike(world.rank, step, "other")
        update(model)
    return told


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "other"])
def test_a_delay_is_blamed_on_its_rank_and_phase_within_twenty_steps(phase: str) -> None:
    told, *others = run_ranks(3, train, phase, 1)
    assert [(blame.rank, blame.phase) for _, blame in told] == [(1, phase)]
    assert others == [[], []]


def watched(world: World) -> tuple[dict[str, float], tuple[float, float], int]:
    """Seconds by phase, the least and the most they can add up to, and the steps counted."""
    model = DistributedDataParallel(seeded(nn.Linear(4, 2)), process_group=world.group)
    watch = stopwatch.find(world.group)
    assert watch is not None
    earliest = time.monotonic()
    watch.enter("other")
    latest = time.monotonic()
    before = watch.totals()
    for step in range(6):
        with model.no_sync(enabled=step % 2 == 0):
            model(torch.ones(3, 4)).sum().backward()
        update(model)
    with torch.no_grad():
        model(torch.ones(3, 4))
    least = time.monotonic() - latest
    watch.enter("other")
    most = time.monotonic() - earliest
    totals = {phase: seconds - before[phase] for phase, seconds in watch.totals().items()}
    return totals, (least, most), watch.step


def test_phases_add_up_to_the_time_and_only_synchronised_backwards_are_steps() -> None:
    for totals, (least, most), steps in run_ranks(2, watched):
        assert set(totals) == set(PHASES)
        assert all(seconds > 0 for seconds in totals.values())
        assert least <= sum(totals.values()) <= most
        assert steps == 3


def test_a_world_of_one_is_not_observed() -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(nn.Linear(4, 2), process_group=world.group)
        assert model._reducer.observer is None
        assert stopwatch.find(world.group) is None

    run_ranks(1, body)


def wait_inside_forward(world: World) -> tuple[float, float]:
    net = nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4, process_group=world.group))
    model = DistributedDataParallel(seeded(net), process_group=world.group)
    for _ in range(3):
        if world.rank == 1:
            time.sleep(0.1)
        model(torch.randn(8, 4)).sum().backward()
    watch = stopwatch.find(world.group)
    assert watch is not None
    return watch.totals()["forward"], watch.totals()["wait"]


def test_what_a_layer_waits_for_is_not_its_own_work() -> None:
    (forward, wait), _ = run_ranks(2, wait_inside_forward)
    assert forward < 0.2 < wait
