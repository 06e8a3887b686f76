"""Compressed gradients between processes: join()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.testing import run_processes, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def small() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), 0)


def joined(world: World, name: str, divide: bool) -> Any:
    options = DDPOptions(compression=name)
    model = DistributedDataParallel(small(), bucket_cap_mb=1e-4, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=divide):
        for number in range(2 + 2 * world.rank):
            optimizer.zero_grad()
            model(X[number : number + 2]).square().mean().backward()
            optimizer.step()
    model.check_in_sync()
    assert model.compression is not None
    return [param.detach() for param in model.parameters()], model.compression.steps


def alone(size: int, divide: bool) -> list[Tensor]:
    """What one process computes that knows which ranks take part in which step."""
    expected = small()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number in range(2 * size):
        optimizer.zero_grad()
        active = sum(number < 2 + 2 * rank for rank in range(size))
        value = expected(X[number : number + 2]).square().mean()
        (value * active / (size if divide else active)).backward()
        optimizer.step()
    return [param.detach() for param in expected.parameters()]


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 5e-3), ("fp16", 1e-3)])
def test_ranks_without_inputs_keep_company_while_gradients_are_compressed(
    name: str, tolerance: float, divide: bool
) -> None:
    for params, steps in run_processes(3, joined, name, divide):
        assert steps == 6
        torch.testing.assert_close(params, alone(3, divide), atol=tolerance, rtol=tolerance)
