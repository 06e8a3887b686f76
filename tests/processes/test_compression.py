"""Compressed gradients between processes: join(), and what PowerSGD leaves out and remembers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.gradients.compress import PowerSGD
from paceline.testing import run_processes, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
FULL = {"rank": 64, "start_step": 2, "min_ratio": 0.0}
"""As many columns as a matrix has: nothing is left out."""
THIN = {"rank": 1, "start_step": 2, "min_ratio": 0.0}


def small() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), 0)


def wrapped(net: nn.Module, spec: Any, **arguments: Any) -> Any:
    spec = PowerSGD(**spec) if isinstance(spec, dict) else spec
    return DistributedDataParallel(net, options=DDPOptions(compression=spec), **arguments)


def joined(world: World, spec: Any, divide: bool) -> Any:
    model = wrapped(small(), spec, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=divide):
        for number in range(2 + 2 * world.rank):
            optimizer.zero_grad()
            model(X[number : number + 2]).square().mean().backward()
            optimizer.step()
    model.check_in_sync()
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
@pytest.mark.parametrize(("spec", "tolerance"), [("bf16", 5e-3), ("fp16", 1e-3), (FULL, 1e-5)])
def test_ranks_without_inputs_keep_company_while_gradients_are_compressed(
    spec: Any, tolerance: float, divide: bool
) -> None:
    for params, steps in run_processes(3, joined, spec, divide):
        assert steps == 6
        torch.testing.assert_close(params, alone(3, divide), atol=tolerance, rtol=tolerance)


class Shapes(nn.Module):
    """A matrix, a convolution laid out channels-last, a vector, a scalar and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(12, 9))
        conv = torch.zeros(8, 6, 3, 3).to(memory_format=torch.channels_last)
        self.conv = nn.Parameter(conv)
        self.vector = nn.Parameter(torch.zeros(5))
        self.scalar = nn.Parameter(torch.tensor(0.0))
        self.nothing = nn.Parameter(torch.zeros(0, 4))


def targets(step: int, rank: int) -> list[Tensor]:
    """Gradients of one rank, per item."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(param.shape, generator=generator) for param in Shapes().parameters()]


def backward(model: Any, step: int, rank: int, items: float) -> list[Tensor]:
    model.zero_grad()
    params = list(model.parameters())
    products = [
        (param * target).sum() for param, target in zip(params, targets(step, rank), strict=True)
    ]
    with model.weighted(items):
        (torch.stack(products).sum() * items).backward()
    return [param.grad.clone() for param in params]


def mean_of(step: int, items: list[float]) -> list[Tensor]:
    ranks = [targets(step, rank) for rank in range(len(items))]
    weighted = [[grad * n for grad in grads] for grads, n in zip(ranks, items, strict=True)]
    return [torch.stack(list(grads)).sum(0) / sum(items) for grads in zip(*weighted, strict=True)]


def add_up(world: World) -> None:
    """All columns are exact, and what one column leaves out arrives later, whatever the weights."""
    full, thin = wrapped(Shapes(), FULL), wrapped(Shapes(), THIN)
    applied = [torch.zeros_like(param) for param in thin.parameters()]
    wanted = [torch.zeros_like(param) for param in thin.parameters()]
    for step in range(8):
        items = [[3.0, 1.0], [1000.0, 1.0], [0.0, 5.0]][step % 3]
        mean = mean_of(step, items)
        torch.testing.assert_close(
            backward(full, step, world.rank, items[world.rank]), mean, rtol=1e-3, atol=1e-4
        )
        torch._foreach_add_(applied, backward(thin, step, world.rank, items[world.rank]))
        torch._foreach_add_(wanted, mean)
    assert thin.compression.bytes_sent < thin.compression.bytes_before
    left_out = thin.compression.state_dict()["memory"][0]
    everyone = torch.cat([left_out[index] for index in sorted(left_out)]).double()
    world.group.allreduce([everyone]).wait()
    missing = torch.cat([(w - a).flatten() for w, a in zip(wanted, applied, strict=True)])
    assert missing.abs().max() > 0.1  # one column is not enough
    torch.testing.assert_close(
        (everyone / 2).sort().values.float(), missing.sort().values, rtol=1e-3, atol=1e-3
    )


def test_powersgd_loses_nothing_for_good() -> None:
    run_processes(2, add_up)


def survive_infinity(world: World) -> None:
    model = wrapped(Shapes(), THIN)
    for step in range(4):
        backward(model, step, world.rank, 1.0)
    before = model.compression.state_dict()["memory"][0]
    model.zero_grad()
    (sum(param.sum() for param in model.parameters()) * float("inf")).backward()
    assert not all(torch.isfinite(param.grad).all() for param in model.parameters())
    after = model.compression.state_dict()["memory"][0]
    assert all(torch.equal(after[index], before[index]) for index in before)
    assert all(torch.isfinite(grad).all() for grad in backward(model, 5, world.rank, 1.0))
    backward(model, 6, world.rank, 0.0)  # nobody has any item
    model.check_in_sync()


def test_a_step_that_is_not_finite_leaves_no_trace_in_what_is_remembered() -> None:
    run_processes(2, survive_infinity)


def resume(world: World) -> None:
    first = wrapped(Shapes(), THIN)
    for step in range(4):
        backward(first, step, world.rank, 1.0)
    second = wrapped(Shapes(), THIN)
    second.compression.load_state_dict(first.compression.state_dict())
    for step in range(4, 7):
        one = backward(first, step, world.rank, 1.0)
        two = backward(second, step, world.rank, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_powersgd_continues_from_a_saved_state_with_the_same_bits() -> None:
    run_processes(2, resume)
