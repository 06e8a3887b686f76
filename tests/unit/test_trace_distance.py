"""How far two computations are apart, where numbers are not finite or very large."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from paceline import DataParallel
from paceline.record import record_step
from paceline.record.reference import distance
from paceline.record.stages import Check
from paceline.testing import seeded

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, INF], [1.0, INF], 0.0),
        ([1.0, -INF], [1.5, -INF], 0.5),
        ([INF], [-INF], INF),
        ([INF], [3.0], INF),
    ],
)
def test_what_is_no_number_on_both_sides_is_no_difference(
    ours: list[float], theirs: list[float], expected: float
) -> None:
    assert distance([(torch.tensor(ours), torch.tensor(theirs))])[0] == expected


def test_what_is_no_number_on_one_side_only_is_the_worst_difference() -> None:
    pairs = [(torch.tensor([1.0]), torch.tensor([NAN])), (torch.tensor([1.0]), torch.tensor([9.0]))]
    assert math.isnan(distance(pairs)[0])


@pytest.mark.parametrize("odd", [NAN, INF])
def test_a_number_that_is_not_finite_does_not_excuse_the_others(odd: float) -> None:
    _, scale = distance([(torch.tensor([odd, 2.0]), torch.tensor([odd, 1.0]))])
    assert scale == 2.0


def check_of(inputs: Tensor, targets: Tensor) -> Check:
    model = DataParallel(seeded(nn.Linear(4, 1)).to(inputs.dtype), ["cpu:0", "cpu:1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.functional.mse_loss
    with record_step(model, optimizer, loss_fn=loss_fn) as recording:
        loss = loss_fn(model(inputs), targets)
        recording.note_loss(loss, targets=targets)
        torch.autograd.backward(loss)
        optimizer.step()
    assert recording.trace is not None
    assert recording.trace.check is not None
    return recording.trace.check


def test_a_batch_with_a_nan_is_the_same_as_in_one_process_and_that_is_said() -> None:
    inputs = torch.ones(8, 4)
    inputs[3] = NAN
    check = check_of(inputs, torch.zeros(8, 1))
    assert check.is_same
    assert "not finite" in check.reason


def test_a_loss_beyond_float32_is_compared_in_double_precision() -> None:
    check = check_of(torch.full((8, 4), 1e30, dtype=torch.float64), torch.zeros(8, 1).double())
    assert check.is_same, check
    assert check.reason == ""
