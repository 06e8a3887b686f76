"""Averaged gradients are those of one process on the whole batch, over a zoo of models."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, Case, shard, train_some

from paceline import DistributedDataParallel, World
from paceline.testing import assert_replicas_equal, gradients, run_ranks

ROWS = 12
MANY_BUCKETS = 1e-4


def tolerance(case: Case) -> dict[str, float]:
    return {"rtol": 0.05, "atol": 0.05} if "rough" in case.traits else {"rtol": 1e-4, "atol": 1e-5}


def dense(grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if g is None else g.to_dense().clone() for name, g in grads.items()}


def reference(case: Case) -> dict[str, Tensor | None]:
    model = case.build()
    case.loss(model, case.batch(ROWS)).backward()
    return dense(gradients(model))


@pytest.mark.parametrize(
    ("case", "size", "bucket_mb"),
    [
        *((case, 2, None) for case in CASES),
        *((case, 3, MANY_BUCKETS) for case in CASES),
        *product(CASES[::6], [1, 4], [None, MANY_BUCKETS]),
    ],
    ids=str,
)
def test_gradients_match_one_process_on_the_whole_batch(
    case: Case, size: int, bucket_mb: float | None
) -> None:
    expected = reference(case)

    def body(world: World) -> list[dict[str, Tensor | None]]:
        model = DistributedDataParallel(
            case.build(), process_group=world.group, bucket_cap_mb=bucket_mb
        )
        seen = []
        for _ in range(3):  # learns the order of buckets, uses it, uses the memory again
            model.zero_grad()
            case.loss(model, shard(case.batch(ROWS), world.rank, world.size)).backward()
            seen.append(dense(gradients(model)))
        return seen

    ranks = run_ranks(size, body)
    for step in range(3):
        for got in ranks:
            assert got[step].keys() == expected.keys()
            for name, grad in expected.items():
                assert (got[step][name] is None) == (grad is None), name
                if grad is not None:
                    torch.testing.assert_close(got[step][name], grad, **tolerance(case), msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_replicas_stay_equal_to_the_last_bit(case: Case) -> None:
    def body(world: World) -> dict[str, Any]:
        model = DistributedDataParallel(case.build(), process_group=world.group, bucket_cap_mb=1e-4)
        return train_some(model, case, world, lr=0.01)

    assert_replicas_equal(run_ranks(3, body))


def test_a_model_of_one_parameter_of_one_element_works() -> None:
    def body(world: World) -> float:
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=world.group)
        (model(torch.ones(1, 1)) * (world.rank + 1)).sum().backward()
        grad = model.module.weight.grad
        assert grad is not None
        return grad.item()

    assert run_ranks(3, body) == [2.0, 2.0, 2.0]
