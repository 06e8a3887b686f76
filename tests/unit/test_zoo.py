"""The promises of the zoo, on which the tests of the engines rely."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, Case, shard

ROWS = 12

each_case = pytest.mark.parametrize("case", CASES, ids=str)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Dense gradients, zero where there is none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


@each_case
def test_a_model_is_the_same_every_time(case: Case) -> None:
    torch.manual_seed(1)
    first = case.build().state_dict()
    torch.manual_seed(2)
    torch.testing.assert_close(case.build().state_dict(), first, rtol=0, atol=0)


@each_case
def test_a_small_batch_is_the_start_of_a_large_one(case: Case) -> None:
    for small, large in zip(case.batch(4), case.batch(ROWS), strict=True):
        assert len(large) == ROWS
        torch.testing.assert_close(small, large[:4], rtol=0, atol=0)


@each_case
@pytest.mark.parametrize("size", [2, 3])
def test_losses_and_gradients_of_equal_shards_average_to_those_of_the_whole(
    case: Case, size: int
) -> None:
    whole = case.build()
    inputs = case.batch(ROWS)
    loss = case.loss(whole, inputs)
    loss.backward()
    assert torch.isfinite(loss)

    parts = []
    for rank in range(size):
        model = case.build()
        (case.loss(model, shard(inputs, rank, size)) / size).backward()
        parts.append(gradients(model))
    averaged = {name: torch.stack([p[name] for p in parts]).sum(0) for name in parts[0]}
    tolerance = {"rtol": 0.05, "atol": 0.05} if "rough" in case.traits else {}
    for name, expected in gradients(whole).items():
        torch.testing.assert_close(averaged[name], expected, **tolerance, msg=name)


@each_case
def test_the_traits_are_true(case: Case) -> None:
    model = case.build()
    inputs = case.batch(ROWS)
    case.loss(model, inputs).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert ("frozen" in case.traits) == any(not p.requires_grad for p in model.parameters())
    assert ("unused" in case.traits) == any(p.grad is None for p in trained)
    assert ("sparse" in case.traits) == any(
        p.grad is not None and p.grad.is_sparse for p in trained
    )
    assert ("complex" in case.traits) == any(p.is_complex() for p in trained)
    assert ("mixed" in case.traits) == (len({p.dtype for p in model.parameters()}) > 1)

    used = set()
    for rank in range(4):
        shard_model = case.build()
        case.loss(shard_model, shard(inputs, rank, 4)).backward()
        used.add(tuple(p.grad is None for p in shard_model.parameters()))
    assert ("varying" in case.traits) == (len(used) > 1)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
