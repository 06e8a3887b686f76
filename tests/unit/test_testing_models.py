"""Models that are equal without the global random numbers, and replicas compared bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.testing import assert_replicas_equal, gradients, seeded


def test_the_same_seed_gives_the_same_model_and_another_seed_another() -> None:
    a, b, c = (seeded(nn.Linear(3, 2), seed) for seed in (0, 0, 1))
    assert_replicas_equal([a.state_dict(), b.state_dict()])
    assert not torch.equal(a.weight, c.weight)


def test_filling_a_model_leaves_the_global_random_numbers_alone() -> None:
    model = nn.Linear(3, 2)
    before = torch.get_rng_state()
    seeded(model, 3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_floating_dtype_is_filled(dtype: torch.dtype) -> None:
    model = seeded(nn.Linear(3, 2, dtype=dtype), 1)
    assert model.weight.dtype == dtype
    assert model.weight.abs().max() > 0


def test_scalars_empty_and_integer_parameters_are_survived() -> None:
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(9.0))
    model.empty = nn.Parameter(torch.empty(0, 3))
    model.count = nn.Parameter(torch.tensor([7]), requires_grad=False)
    seeded(model)
    assert model.scalar.item() != 9.0
    assert model.count.item() == 7


def test_gradients_are_copies_by_name_with_none_where_there_is_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0](torch.ones(1, 2)).sum().backward()
    grads = gradients(model)
    assert list(grads) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert grads["1.weight"] is None
    model.zero_grad(set_to_none=False)
    assert grads["0.bias"].tolist() == [1.0, 1.0]


def state(value: float, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(3), "b": torch.tensor([1.0, value]), **more}


def test_equal_replicas_pass_whatever_their_number_or_layout() -> None:
    assert_replicas_equal([state(1.0)])
    assert_replicas_equal([state(1.0), state(1.0), state(1.0)])
    nan = float("nan")
    assert_replicas_equal([state(nan), state(nan)])
    assert_replicas_equal([{"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2).t()}])
    assert_replicas_equal([{"a": None}, {"a": None}])
    assert_replicas_equal([{"a": torch.eye(2).to_sparse()}, {"a": torch.eye(2).to_sparse()}])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (state(1.0 + 2**-23), r"'b' differs between rank 0 and rank 1: 1 of 2 .* 1.19e-07"),
        (state(1.0, c=torch.zeros(1)), "other names than rank 0, such as 'c'"),
        ({"b": torch.ones(2), "a": torch.zeros(3)}, "another order"),
        ({"a": -torch.zeros(3), "b": torch.ones(2)}, "'a' differs .* 3 of 3"),
        ({"a": torch.zeros(3, dtype=torch.float64), "b": torch.ones(2)}, "float32 .*float64"),
        ({"a": torch.zeros(1, 3), "b": torch.ones(2)}, r"\(3,\) against .*\(1, 3\)"),
        ({"a": None, "b": torch.ones(2)}, "a tensor on rank 0 only"),
    ],
)
def test_the_first_difference_is_named_with_its_rank(other: object, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_replicas_equal([state(1.0), other])


def test_comparing_nothing_is_refused() -> None:
    with pytest.raises(UsageError):
        assert_replicas_equal([])
