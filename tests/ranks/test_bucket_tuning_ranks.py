"""Tuning while training: agreed by all, bounded, invisible in the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.gradients.tuning import CPU_CANDIDATES_BYTES, SCORED_STEPS, WARM_UP_STEPS
from paceline.testing import run_ranks

STEPS = 2 + len(CPU_CANDIDATES_BYTES) * (WARM_UP_STEPS + SCORED_STEPS)


def train(world: World, steps: int, **arguments: Any) -> tuple[str, list[Tensor]]:
    """Eighteen megabytes of gradients, so that capacities make a difference."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(*(nn.Linear(700, 700, bias=False) for _ in range(9)))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 26)
    model = DistributedDataParallel(net, process_group=world.group, **arguments)
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 700), (step + world.rank) / 9)).square().mean().backward()
        with torch.no_grad():
            for param in net.parameters():
                assert param.grad is not None
                param.sub_(param.grad, alpha=0.01)
    return model.bucket_tuning, [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_choose_the_same_and_the_result_does_not_show_it(size: int) -> None:
    tuned = run_ranks(size, lambda world: train(world, STEPS))
    fixed = run_ranks(size, lambda world: train(world, STEPS, bucket_cap_mb=3))
    assert len({told for told, _ in tuned}) == 1
    assert tuned[0][0].startswith("buckets of ")
    for _, params in tuned:
        assert all(torch.equal(a, b) for a, b in zip(params, fixed[0][1], strict=True))


def test_a_capacity_that_was_given_stays() -> None:
    assert run_ranks(2, lambda world: train(world, 3, bucket_cap_mb=3)[0]) == ["not tuned"] * 2


def test_through_gloo_three_ranks_keep_their_bits_unless_asked() -> None:
    over_gloo = DDPOptions(transport="c10d")
    told = run_ranks(3, lambda world: train(world, 2, options=over_gloo)[0])
    assert all("would change the last bits" in each for each in told)
    asked = DDPOptions(transport="c10d", tune_buckets=True)
    told = run_ranks(3, lambda world: train(world, STEPS, options=asked)[0])
    assert all(each.startswith("buckets of ") for each in told)


def test_small_models_are_not_tuned() -> None:
    def body(world: World) -> str:
        return DistributedDataParallel(nn.Linear(2, 2), process_group=world.group).bucket_tuning

    assert all("same buckets" in told for told in run_ranks(2, body))


def test_the_default_is_tried_first_and_capacities_that_change_nothing_are_left_out() -> None:
    def body(world: World) -> str:
        net = nn.Sequential(*(nn.Linear(350, 350, bias=False) for _ in range(6)))  # 3 MiB
        model = DistributedDataParallel(net, process_group=world.group)
        for _ in range(STEPS):
            model(torch.ones(2, 350)).sum().backward()
        return model.bucket_tuning

    for told in run_ranks(2, body):
        assert told.partition("step: ")[2].startswith("4 MiB")
        assert "16 MiB" not in told
