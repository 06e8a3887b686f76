"""Compression chosen by name when a model is wrapped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.errors import UsageError
from paceline.testing import run_ranks


def wrapped(world: World, name: str | None) -> DistributedDataParallel:
    generator = torch.Generator().manual_seed(0)
    net = nn.Linear(30, 20)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    options = DDPOptions(compression=name)
    return DistributedDataParallel(net, process_group=world.group, options=options)


@pytest.mark.parametrize("name", ["bf16", "fp16", "powersgd:rank=2,start_step=1"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_name_is_enough_and_weights_still_count(size: int, name: str) -> None:
    def body(world: World) -> tuple[torch.Tensor, int, int]:
        model = wrapped(world, name)
        rows = torch.ones(world.rank + 1, 30)
        for _ in range(2):
            model.zero_grad()
            with model.weighted(len(rows)):
                model(rows).sum(dim=1).sum().backward()
        state = model.compression
        assert state is not None
        return model.module.weight.grad, state.bytes_before, state.bytes_sent

    for grad, before, sent in run_ranks(size, body):
        torch.testing.assert_close(grad, torch.ones(20, 30), rtol=1e-2, atol=1e-2)
        assert (before, sent) == (0, 0) if size == 1 else sent < before


def test_without_a_name_nothing_is_compressed() -> None:
    assert run_ranks(2, lambda world: wrapped(world, None).compression) == [None, None]


def test_a_copy_of_a_compressed_model_counts_for_itself() -> None:
    def body(world: World) -> tuple[int, int]:
        model = wrapped(world, "bf16")
        clone = copy.deepcopy(model)
        clone(torch.ones(2, 30)).sum().backward()
        assert model.compression is not None
        assert clone.compression is not None
        return model.compression.bytes_sent, clone.compression.bytes_sent

    assert run_ranks(2, body) == [(0, 2 * 620)] * 2


def test_a_name_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="bf16"):
        DDPOptions(compression="bf61")
