"""Compression chosen by name when a model is wrapped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.errors import UsageError
from paceline.testing import run_ranks


def wrapped(world: World, name: str | None, net: nn.Module | None = None) -> Any:
    if net is None:
        net = nn.Linear(30, 20)
        with torch.no_grad():
            for param in net.parameters():
                param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
    options = DDPOptions(compression=name)
    return DistributedDataParallel(net, process_group=world.group, options=options)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_name_is_enough_and_weights_still_count(size: int, name: str) -> None:
    def body(world: World) -> tuple[Tensor, int, int]:
        model = wrapped(world, name)
        rows = torch.ones(world.rank + 1, 30)
        for _ in range(2):
            model.zero_grad()
            with model.weighted(len(rows)):
                model(rows).sum(dim=1).sum().backward()
        state = model.compression
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
        return model.compression.bytes_sent, clone.compression.bytes_sent

    assert run_ranks(2, body) == [(0, 2 * 620)] * 2


@pytest.mark.parametrize(("name", "precision"), [("bf16", 2**-8), ("fp16", 2**-11)])
@pytest.mark.parametrize("size", [2, 3])
def test_rounded_gradients_are_within_the_precision_of_their_format(
    size: int, name: str, precision: float
) -> None:
    def body(world: World) -> None:
        model = wrapped(world, name)
        x = torch.linspace(0.1, 3, 30).repeat(4, 1) * (world.rank + 1)
        model(x).sum().backward()
        expected = (4 * torch.linspace(0.1, 3, 30) * (size + 1) / 2).repeat(20, 1)
        grad = model.module.weight.grad
        assert ((grad - expected).abs() <= 2 * size * precision * expected).all()

    run_ranks(size, body)


def test_float16_survives_a_loss_that_is_a_sum_over_many_items() -> None:
    def body(world: World) -> Tensor:
        model = wrapped(world, "fp16")
        with model.weighted(100_000):
            (model(torch.ones(1, 30)).sum() * 100_000).backward()
        return model.module.weight.grad

    for grad in run_ranks(2, body):
        torch.testing.assert_close(grad, torch.ones(20, 30), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_infinities_arrive_so_that_a_scaler_can_see_them(name: str) -> None:
    def body(world: World) -> Tensor:
        model = wrapped(world, name)
        model(torch.full((1, 30), float("inf") if world.rank else 1.0)).sum().backward()
        return model.module.weight.grad

    assert all(not torch.isfinite(grad).any() for grad in run_ranks(2, body))


class Kinds(nn.Module):
    """Gradients of all kinds, none of which can be lost on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.exact = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.brief = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.ones(0, 4))

    def forward(self, scale: float) -> Tensor:
        parts = [self.exact.sum(), self.wave.imag.sum(), self.brief.sum(), self.nothing.sum()]
        return torch.stack([part.float() * scale for part in parts]).sum()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_kind_of_gradient_can_be_reduced(name: str) -> None:
    def body(world: World) -> None:
        model = wrapped(world, name, Kinds())
        model(world.rank + 1.0).backward()
        module = model.module
        assert module.exact.grad.tolist() == [1.5] * 3
        assert module.wave.grad.tolist() == [1.5j] * 3
        assert module.brief.grad.tolist() == [1.5] * 3

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("spec", "words"),
    [("bf61", "Did you mean 'bf16'"), ("powersgd", "'bf16', 'fp16'"), (3, "'fp16'")],
)
def test_what_does_not_exist_is_refused_at_once(spec: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DDPOptions(compression=spec)
