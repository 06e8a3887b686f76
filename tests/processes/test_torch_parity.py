"""Beside torch's DistributedDataParallel, in the same processes: same gradients, same training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from zoo import CASES, Case, named, shard

from paceline import DistributedDataParallel, World
from paceline.testing import assert_replicas_equal, gradients, run_processes

ROWS = 12


def dense(model: nn.Module) -> dict[str, Tensor | None]:
    bare = model.module if isinstance(model, TorchDDP) else model
    return {n: None if g is None else g.to_dense().clone() for n, g in gradients(bare).items()}


# torch refuses complex parameters over Gloo, and to look for unused parameters when a checkpoint
# runs a backward of its own.
CASES_OF_TORCH = [c for c in CASES if "complex" not in c.traits and "reentrant" not in c.name]


def train_both(world: World, names: list[str]) -> dict[str, Any]:
    """By case, the gradients of three steps under both classes. One start serves all cases,
    because torch's class takes seconds to import what it needs in every new process."""
    return {name: [_train(world, named(name), wrap) for wrap in (_ours, _torchs)] for name in names}


def _ours(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, bucket_cap_mb=1e-4)


def _torchs(module: nn.Module) -> nn.Module:
    return TorchDDP(module, find_unused_parameters=True, bucket_cap_mb=1)


def _train(world: World, case: Case, wrap: Callable[[nn.Module], nn.Module]) -> list[Any]:
    model = wrap(case.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        case.loss(model, shard(case.batch(ROWS), world.rank, world.size)).backward()
        seen.append(dense(model))
        optimizer.step()
    return seen


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_processes(2, train_both, [case.name for case in CASES_OF_TORCH], timeout_s=100)


@pytest.mark.parametrize("case", CASES_OF_TORCH, ids=str)
def test_gradients_match_torchs(trained: list[dict[str, Any]], case: Case) -> None:
    tolerance = {"rtol": 0.05, "atol": 0.05} if "rough" in case.traits else {}
    for rank in trained:
        ours, theirs = rank[case.name]
        for mine, its in zip(ours, theirs, strict=True):
            for name, grad in its.items():
                assert (mine[name] is None) == (grad is None), name
                if grad is not None:
                    torch.testing.assert_close(mine[name], grad, **tolerance, msg=name)


def train_long(world: World, name: str) -> Any:
    case = named(name)
    model = DistributedDataParallel(case.build(), bucket_cap_mb=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(50):
        optimizer.zero_grad()
        inputs = shard(case.batch(ROWS + 3 * step), world.rank, world.size)
        case.loss(model, inputs).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.check_in_sync()
    return dict(model.state_dict())


SOME = [case.name for case in CASES if not case.traits & {"sparse", "complex"}][::12]


@pytest.mark.parametrize(
    ("name", "size"), [(SOME[0], 2), *((name, 3) for name in SOME), (SOME[0], 4)]
)
def test_parameters_are_equal_to_the_last_bit_after_50_steps(name: str, size: int) -> None:
    assert_replicas_equal(run_processes(size, train_long, name))
