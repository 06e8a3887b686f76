"""Counting gradients once per bucket gives, bit for bit, what counting each as it comes gives."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import CASES, WIDTH, Breaks, Case, filled, rows_of, shard

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.testing import gradients, run_ranks

BUCKET_MB = 5e-4
"""Several buckets of several gradients each, in models as small as these."""
ROWS = 6
LAYERS = 9
PLACES = [(1, "auto"), (2, "shared_memory"), (2, "c10d"), (3, "shared_memory"), (3, "c10d")]


def wrap(world: World, module: nn.Module, transport: str) -> DistributedDataParallel:
    options = DDPOptions(transport=transport)
    return DistributedDataParallel(
        module, process_group=world.group, bucket_cap_mb=BUCKET_MB, options=options
    )


def counting_each(model: DistributedDataParallel) -> DistributedDataParallel:
    """The same engine, with Python called for every gradient."""
    model.reducer.arrivals.listen = lambda *_: None  # type: ignore[method-assign]
    return model


def assert_same_bits(model: nn.Module, other: nn.Module) -> None:
    for (name, got), expected in zip(
        gradients(model).items(), gradients(other).values(), strict=True
    ):
        assert (got is None) == (expected is None), name
        if got is not None and expected is not None:
            assert torch.equal(got.to_dense(), expected.to_dense()), name
    for got, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=str)
def test_the_whole_zoo_trains_the_same(number: int, case: Case) -> None:
    size, transport = PLACES[number % len(PLACES)]

    def body(world: World) -> None:
        models = wrap(world, case.build(), transport), wrap(world, case.build(), transport)
        counting_each(models[1])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        inputs = shard(case.batch(ROWS), world.rank, world.size)
        for step in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad(set_to_none=step != 2 or "sparse" in case.traits)
                case.loss(model, inputs).backward()
                optimizer.step()
            assert_same_bits(*models)

    run_ranks(size, body)


class Wandering(nn.Module):
    """Goes through its layers in any order, through some not at all, through some again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, order: Sequence[int]) -> Any:
        for index in order:
            x = torch.tanh(self.layers[index](x)) * self.scale
        return x


def backward(model: DistributedDataParallel, x: Tensor, way: str, dice: random.Random) -> None:
    """One of the ways to a gradient that ranks may take in the same step."""
    order, other = (dice.choices(range(LAYERS), k=dice.randint(1, LAYERS)) for _ in range(2))
    if way == "accumulated":
        with model.no_sync():
            model(x, other).square().mean().backward()
        model(x, order).square().mean().backward()
    elif way == "two losses":
        (model(x, order).square().mean() + model(x, other).abs().mean()).backward()
    elif way == "twice":
        loss = model(x, order).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    elif way == "past the wrapper":
        model.module(x, order).square().mean().backward()
    elif way == "one layer":
        F.linear(x, model.module.layers[dice.randrange(LAYERS)].weight).sum().backward()
    elif way == "of higher order":
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x, order).sum(), x, create_graph=True)
        slope.square().mean().backward()
    else:
        model(x, order).square().mean().backward()


WAYS = [
    "as usual", "as usual", "accumulated", "two losses", "twice", "past the wrapper",
    "one layer", "of higher order", "as usual", "one layer", "as usual", "gradients kept",
]  # fmt: skip


@pytest.mark.parametrize(("size", "transport"), PLACES)
def test_orders_branches_and_ways_that_change_from_step_to_step(size: int, transport: str) -> None:
    def body(world: World) -> None:
        models = [wrap(world, filled(Wandering()), transport) for _ in range(2)]
        counting_each(models[1])
        for step in range(2 * len(WAYS)):
            way = WAYS[step % len(WAYS)]
            x = rows_of(4, (WIDTH,), seed=10 * step + world.rank)
            for model in models:
                model.zero_grad(set_to_none=way != "gradients kept")
                backward(model, x, way, random.Random(100 * step + world.rank))
                with torch.no_grad():
                    for param in model.parameters():
                        if param.grad is not None:
                            param -= 0.01 * param.grad
            assert_same_bits(*models)

    run_ranks(size, body)


def test_python_is_called_once_per_bucket_and_buckets_still_start_early() -> None:
    def body(world: World) -> tuple[int, int, list[int]]:
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(40)]
        model = DistributedDataParallel(
            filled(nn.Sequential(*layers)), process_group=world.group, bucket_cap_mb=1e-3
        )
        reducer = model.reducer
        calls, early = [], []
        on_gradients, finish = reducer._on_gradients, reducer._finish
        reducer._on_gradients = lambda current: (calls.append(1), on_gradients(current))[1]  # type: ignore
        reducer._finish = lambda ended: (early.append(len(ended.in_flight)), finish(ended))[1]  # type: ignore
        for _ in range(3):
            model.zero_grad()
            model(rows_of(2, (4,), seed=world.rank)).sum().backward()
        return len(calls), len(reducer.buckets), early

    for calls, buckets, early in run_ranks(2, body):
        assert 1 < buckets < 20
        assert early == [0, buckets - 1, buckets - 1]
        assert calls == 2 * (buckets - 1)


def test_a_changed_order_starts_buckets_early_again_a_step_later() -> None:
    def body(world: World) -> list[int]:
        model = wrap(world, filled(Wandering()), "c10d")
        reducer, early = model.reducer, []
        finish = reducer._finish
        reducer._finish = lambda ended: (early.append(len(ended.in_flight)), finish(ended))[1]  # type: ignore
        for order in [range(LAYERS)] * 2 + [range(LAYERS)[::-1]] * 2:
            model.zero_grad()
            model(rows_of(2, (WIDTH,)), order).sum().backward()
        return [*early, len(reducer.buckets)]

    for first, learned, changed, again, buckets in run_ranks(2, body):
        assert (first, learned, again) == (0, buckets - 1, buckets - 1)
        assert changed < again


def test_hooks_are_python_again_after_a_backward_that_broke_off() -> None:
    def body(world: World) -> None:
        first, last = nn.Linear(4, 4), nn.Linear(4, 2)
        module = filled(nn.Sequential(first, last))
        model = DistributedDataParallel(module, process_group=world.group)
        x = rows_of(2, (4,), seed=world.rank)
        model(x).sum().backward()
        kept = [dict(param._post_accumulate_grad_hooks) for param in model.parameters()]
        handle = first.register_forward_hook(lambda *call: Breaks.apply(call[2]))
        with pytest.raises(MemoryError, match="broken"):
            model(x).sum().backward()
        handle.remove()
        assert [dict(p._post_accumulate_grad_hooks) for p in model.parameters()] == kept
        model.zero_grad()
        module(x).sum().backward()  # on all ranks together, unannounced
        assert model.reducer.steps == 2
        gone = weakref.ref(model.reducer)
        del model, module, first, last, handle, kept
        gc.collect()
        assert gone() is None

    run_ranks(2, body)
