"""`torch.compile` inside and around the wrapper: same gradients, same rules for `no_sync`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._C._dynamo import eval_frame

from paceline import DistributedDataParallel, World
from paceline.ddp.buffer import Bucket
from paceline.ddp.reducer import Reducer
from paceline.testing import assert_replicas_equal, gradients, run_processes, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def normed() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    net.register_buffer("scale", torch.ones(()))
    return seeded(net, 0)


def train(world: World, model: nn.Module) -> dict[str, Any]:
    mine = X[world.rank :: world.size]
    for _ in range(3):
        model.zero_grad()
        model(mine).square().mean().backward()
    averaged = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    with model.no_sync():
        inside = model(mine).square().mean()
    inside.backward()
    return averaged | {"local": next(iter(gradients(model).values())).clone()}


def compiled_around() -> nn.Module:
    return torch.compile(DistributedDataParallel(normed()), backend="aot_eager")


def compiled_inside() -> nn.Module:
    return DistributedDataParallel(torch.compile(normed(), backend="aot_eager"))


def compiled_in_place() -> nn.Module:
    model = DistributedDataParallel(normed())
    model.compile(backend="aot_eager")
    return model


def train_all(world: World) -> dict[str, Any]:
    """Each way with a compiler that remembers nothing; one start, because it takes seconds."""
    results = {}
    for build in (compiled_around, compiled_inside, compiled_in_place):
        torch.compiler.reset()
        results[build.__name__] = train(world, build())
    return results


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_processes(2, train_all, timeout_s=100)


@pytest.mark.parametrize("way", ["compiled_around", "compiled_inside", "compiled_in_place"])
def test_a_compiled_model_synchronises(trained: list[dict[str, Any]], way: str) -> None:
    results = [rank[way] for rank in trained]
    whole = normed()
    whole(X).square().mean().backward()
    locals_ = [rank.pop("local") for rank in results]
    assert not torch.equal(*locals_)
    assert_replicas_equal(results)
    got = {name.removeprefix("_orig_mod."): grad for name, grad in results[0].items()}
    torch.testing.assert_close(got, gradients(whole))


def compiled_step(world: World) -> dict[str, Any]:
    model = DistributedDataParallel(normed())

    @torch.compile(backend="eager")
    def step(rows: torch.Tensor) -> None:
        model(rows).square().mean().backward()

    for _ in range(2):
        model.zero_grad()
        step(X[world.rank :: world.size])
    inside = [Reducer._finish, Reducer._start_next, Bucket.fill, Reducer.on_output_grad]
    compiled = [f for f in inside if eval_frame._debug_get_cache_entry_list(f.__code__)]
    return {"gradients": gradients(model), "compiled": [f.__name__ for f in compiled]}


def test_a_compiled_function_with_a_backward_does_not_compile_the_engine() -> None:
    results = run_processes(2, compiled_step, timeout_s=100)
    assert [rank.pop("compiled") for rank in results] == [[], []]
    whole = normed()
    whole(X).square().mean().backward()
    torch.testing.assert_close(results[0]["gradients"], gradients(whole))
    assert_replicas_equal([rank["gradients"] for rank in results])
