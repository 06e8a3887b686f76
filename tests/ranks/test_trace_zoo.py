"""Recording models that have broken engines elsewhere: every step is found to be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import CASES, Case, shard

from paceline import DataParallel, DistributedDataParallel
from paceline.group.world import World
from paceline.record import record_step
from paceline.record.stages import Check
from paceline.testing import run_ranks

ROWS = 12

each_case = pytest.mark.parametrize("case", CASES, ids=str)


def recorded(model: Any, case: Case, inputs: Any) -> Check:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with record_step(model, optimizer, values=True, sample=1) as recording:
        loss = case.loss(model, inputs)
        recording.note_loss(loss)
        torch.autograd.backward(loss)
        optimizer.step()
    assert recording.trace is not None
    assert recording.trace.check is not None
    return recording.trace.check


def assert_right(check: Check, case: Case) -> None:
    if "inner" in case.traits:
        assert (check.how, check.is_same) == ("not computed", None)
        assert "computed from gradients" in check.reason
    else:
        assert check.is_same, check


@each_case
def test_a_step_of_two_workers_is_recorded_and_right(case: Case) -> None:
    def body(world: World) -> Check:
        model = DistributedDataParallel(case.build(), process_group=world.group)
        return recorded(model, case, shard(case.batch(ROWS), world.rank, world.size))

    check = run_ranks(2, body)[0]
    assert check.is_equal_on_all
    assert check.how in ("whole batch", "not computed")
    assert_right(check, case)


@each_case
def test_a_step_of_three_replicas_is_recorded_and_right(case: Case) -> None:
    model = DataParallel(case.build(), ["cpu:0", "cpu:1", "cpu:2"])
    check = recorded(model, case, case.batch(ROWS))
    assert_right(check, case)
