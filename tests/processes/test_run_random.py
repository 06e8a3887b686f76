"""Random numbers follow the step and the shard, not the worker: dropout and augmentation.

In processes, because threads share torch's generators.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from runs import CLASSES, WIDTH, Rows, assert_same, train
from torch import Tensor, nn

from paceline.testing import run_processes, seeded
from paceline.world import World

SHARDS = 4


class Augmented(Rows):
    """Draws from all three generators in every sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x, y, index = super().__getitem__(index)
        noise = torch.randn(WIDTH) * 0.1 + random.random() * 0.1
        return x + noise + float(numpy.random.rand()) * 0.1, y, index


def dropping() -> nn.Module:
    return seeded(
        nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, CLASSES))
    )


def work(
    world: World | None, workers: int = 0, folder: str = "", stop_after: int | None = None
) -> dict[str, Any]:
    trained = train(
        world,
        dropping,
        Augmented(),
        shards=SHARDS,
        workers=workers,
        folder=folder or None,
        stop_after=stop_after,
    )
    return {
        "parameters": trained.parameters,
        "losses": [trained.losses[step][0] for step in sorted(trained.losses)],
        "between": trained.between,
        "ledger": [[epoch, index] for epoch, _, index in trained.ledger],
    }


def work_twice(world: World, folder: str) -> list[dict[str, Any]]:
    """The whole training, and the rest of one that was stopped; one start serves both."""
    return [work(world), work(world, workers=1, folder=folder)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return work(None)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_dropout_and_augmentation_do_not_depend_on_the_workers(
    size: int, alone: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    begun = work(None, workers=2, folder=folder, stop_after=5)
    results = run_processes(size, work_twice, folder, timeout_s=100)
    whole, rest = zip(*results, strict=True)

    losses = [sum(parts) for parts in zip(*(each["losses"] for each in whole), strict=True)]
    assert losses == pytest.approx(alone["losses"], rel=1e-4)
    for each in (*whole, *rest):
        assert_same(each["parameters"], alone["parameters"], rtol=1e-4, atol=1e-6)
    for each in rest:
        assert begun["between"] + each["between"] == alone["between"]
    for parts in ([begun, *rest], whole):
        seen = Counter((epoch, index) for part in parts for epoch, index in part["ledger"])
        assert seen == Counter((epoch, index) for epoch in (0, 1) for index in range(50))


@pytest.mark.parametrize("workers", [1, 2])
def test_augmentation_does_not_depend_on_who_loads(workers: int, alone: dict[str, Any]) -> None:
    result = work(None, workers=workers)
    assert result["losses"] == alone["losses"]
    assert_same(result["parameters"], alone["parameters"], rtol=0, atol=0)


def test_random_numbers_between_steps_are_new_after_every_step(alone: dict[str, Any]) -> None:
    assert len(set(alone["between"])) == len(alone["between"])
