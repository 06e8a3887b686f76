"""The arithmetic of steps and shards: every sample once per epoch, whoever computes."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.data.plan import Generators, Plan, shards_of
from paceline.errors import UsageError


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    shards = draw(st.integers(1, 9))
    global_batch = draw(st.integers(shards, 40))
    drop_last = draw(st.booleans())
    samples = draw(st.integers(global_batch if drop_last else 1, 300))
    return Plan(
        samples=samples,
        global_batch=global_batch,
        shards=shards,
        epochs=draw(st.integers(1, 4)),
        drop_last=drop_last,
    )


@given(plans())
def test_every_position_is_in_exactly_one_shard_of_each_epoch(plan: Plan) -> None:
    for epoch in range(plan.epochs):
        first = epoch * plan.steps_per_epoch + 1
        seen = Counter(
            position
            for step in range(first, first + plan.steps_per_epoch)
            for shard in range(plan.shards)
            for position in plan.batch(step)[shard :: plan.shards]
        )
        left_out = plan.samples % plan.global_batch if plan.drop_last else 0
        assert seen == Counter(range(plan.samples - left_out))


@given(plans())
def test_shards_of_a_batch_differ_by_at_most_one_sample(plan: Plan) -> None:
    for step in (1, plan.steps_per_epoch, plan.steps):
        portion = next(plan.portions(step - 1, 0, 1))
        sizes = [len(shard.indices) for shard in portion.shards]
        sizes += [0] * (plan.shards - len(sizes))
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) == len(plan.batch(step))


@given(plans(), st.integers(1, 12))
def test_every_shard_has_exactly_one_worker(plan: Plan, size: int) -> None:
    dealt = [shard for rank in range(size) for shard in shards_of(rank, size, plan.shards)]
    assert sorted(dealt) == list(range(plan.shards))


@given(plans())
def test_steps_and_epochs_agree(plan: Plan) -> None:
    portions = list(plan.portions(0, 0, 1))
    epochs = [portion.epoch for portion in portions]
    assert epochs == sorted(epochs)
    assert Counter(epochs) == dict.fromkeys(range(plan.epochs), plan.steps_per_epoch)
    ends = [portion.step for portion in portions if portion.ends_epoch]
    assert len(ends) == plan.epochs
    assert ends[-1] == plan.steps
    assert plan.shortest_batch == min(len(plan.batch(s)) for s in range(1, plan.steps + 1))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 0}, "dataset.* empty"),
        ({"shards": 9}, "cannot be cut into 9 shards"),
        ({"samples": 5, "drop_last": True}, "do not fill one global batch"),
    ],
)
def test_impossible_numbers_are_refused_with_advice(
    changed: dict[str, object], message: str
) -> None:
    numbers: dict[str, object] = {"samples": 20, "global_batch": 8, "shards": 2, "epochs": 3}
    with pytest.raises(UsageError, match=message) as raised:
        Plan(**{**numbers, **changed})  # type: ignore[arg-type]
    assert raised.value.advice


@pytest.mark.parametrize("seed", [0, -1, 2**40])
def test_one_call_seeds_initial_weights_and_every_shared_generator(seed: int) -> None:
    with Generators().kept():
        drawn = []
        for _ in range(2):
            paceline.seed_everything(seed)
            weight = torch.nn.Linear(3, 2).weight.tolist()
            drawn.append([weight, random.random(), float(numpy.random.rand())])
        paceline.seed_everything(seed + 1)
        assert drawn[0] == drawn[1]
        assert torch.nn.Linear(3, 2).weight.tolist() != drawn[0][0]


@pytest.mark.parametrize("seed", [1.5, "0", True, None, 2**64])
def test_what_is_not_a_seed_is_refused(seed: Any) -> None:
    with pytest.raises(UsageError, match=rf"seed.* {re.escape(repr(seed))}\."):
        paceline.seed_everything(seed)
