"""Buffers: copied from rank 0 at the beginning of a forward pass, as torch promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DistributedDataParallel, World
from paceline.testing import run_ranks, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def normed() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), 0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        return x * self.weight * self.scale


def wrap(module: nn.Module, world: World, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, process_group=world.group, **options)


def test_wrapping_copies_parameters_and_buffers_of_rank_0() -> None:
    def body(world: World) -> tuple[Tensor, ...]:
        module = Scaled()
        with torch.no_grad():
            module.weight.fill_(world.rank)
            module.scale.fill_(world.rank + 10)
            module.mask.fill_(world.rank == 0)
        model = wrap(module, world)
        return model.weight.detach().clone(), model.scale.clone(), model.mask.clone()

    for weight, scale, mask in run_ranks(3, body):
        assert weight.tolist() == [0, 0, 0]
        assert scale.item() == 10
        assert mask.tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, 1.0), ({"broadcast_buffers": False}, 7.0), ({"forward_sync_buffers": False}, 7.0)],
)
def test_a_forward_starts_with_rank_0s_buffers(options: dict[str, bool], scale: float) -> None:
    def body(world: World) -> float:
        model = wrap(Scaled(), world, **options)
        if world.rank == 1:
            model.module.scale.fill_(7.0)
        return model(torch.ones(1, 3)).max().item()

    assert run_ranks(2, body) == [1.0, scale]


def test_buffers_can_be_left_alone_when_wrapping() -> None:
    def body(world: World) -> tuple[float, float]:
        module = Scaled()
        module.scale.fill_(world.rank)
        alone = wrap(module, world, broadcast_buffers=False).scale.item()
        copied = wrap(module, world, broadcast_buffers=False, forward_sync_buffers=False)
        return alone, copied.scale.item()

    assert run_ranks(2, body) == [(0.0, 0.0), (1.0, 0.0)]


def test_batch_statistics_are_equal_in_evaluation() -> None:
    def body(world: World) -> Tensor:
        model = wrap(normed(), world)
        for _ in range(3):
            model(X[world.rank :: world.size]).square().mean().backward()
        model.eval()
        with torch.no_grad():
            return model(X)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_evaluation_after_the_first_pass_needs_no_other_rank() -> None:
    def body(world: World) -> None:
        model = wrap(normed(), world)
        model(X[world.rank :: world.size]).square().mean().backward()
        model.eval()
        with torch.no_grad():
            model(X)
            if world.rank == 0:
                for _ in range(3):
                    model(X)
        model.train()
        model(X[world.rank :: world.size]).square().mean().backward()

    run_ranks(2, body)


def test_two_forwards_before_backward_work_with_batch_norm() -> None:
    def body(world: World) -> None:
        model = wrap(normed(), world)
        rows = X[world.rank :: world.size]
        (model(rows).square().mean() + model(rows * 2).square().mean()).backward()

    run_ranks(2, body)


def test_names_the_module_asks_to_ignore_are_left_alone() -> None:
    def body(world: World) -> tuple[float, float]:
        module = Scaled()
        module._ddp_params_and_buffers_to_ignore = ["scale", "other"]
        module.other = nn.Parameter(torch.tensor(float(world.rank)))
        module.scale.fill_(world.rank)
        model = wrap(module, world)
        (model(torch.ones(1, 3)).sum() + model.other * (world.rank + 1)).backward()
        assert model.other.grad is not None
        return model.scale.item(), model.other.grad.item()

    assert run_ranks(2, body) == [(0.0, 1.0), (1.0, 2.0)]
