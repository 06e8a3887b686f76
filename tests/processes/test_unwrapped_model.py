"""A rank that trains a model which is not wrapped is told so, by its own optimizer."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
import torch
from sentences import says
from torch import nn
from torch.optim.optimizer import Optimizer

from paceline import DistributedDataParallel, World
from paceline.ddp import alone
from paceline.errors import DesyncError, PacelineError, PeerError
from paceline.testing import run_processes

ALWAYS = 10**9


def step(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def train(world: World, wraps_before: bool, alone_steps: int) -> str:
    """Rank 1 trains a bare model while the others wait; returns what it was told."""
    os.environ["PACELINE_STALL_S"] = "0.3"
    alone.LOOK_S = 0.0
    model: nn.Module = nn.Linear(4, 2)
    is_alone = world.rank == 1
    if wraps_before or not is_alone:
        wrapped = DistributedDataParallel(model, process_group=world.group)
        model = nn.Linear(4, 2) if is_alone else wrapped
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with suppress(PeerError):
        for _ in range(alone_steps if is_alone else 1):
            try:
                step(model, optimizer)
            except DesyncError as error:
                return str(error)
    return ""


@pytest.mark.parametrize(("size", "wraps_before"), [(2, False), (3, False), (2, True)])
def test_a_rank_that_trains_an_unwrapped_model_raises_while_others_wait(
    size: int, wraps_before: bool
) -> None:
    told = run_processes(size, train, wraps_before, ALWAYS, return_exceptions=True)
    assert isinstance(told[1], str)
    assert says(told[1], "Rank 1", "rank")
    assert all(not each or isinstance(each, PacelineError) for each in [told[0], *told[2:]])


def train_alone_later(world: World) -> int:
    """A probe on one rank, while the others wait in the second step."""
    os.environ["PACELINE_STALL_S"] = "0.01"
    alone.LOOK_S = 0.0
    model = DistributedDataParallel(nn.Linear(4, 2), process_group=world.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step(model, optimizer)
    probe = nn.Linear(4, 2)
    for _ in range(200 * (world.rank == 1)):
        step(probe, torch.optim.SGD(probe.parameters(), 0.1))
    step(model, optimizer)
    return model._reducer.steps


def test_a_rank_that_trains_alone_after_the_first_step_does_so_on_purpose() -> None:
    assert run_processes(2, train_alone_later) == [2, 2]
