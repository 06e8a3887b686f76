"""Random numbers follow the step and the shard, not the worker: dropout and augmentation.

In processes, because threads share torch's generators.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from runs import CLASSES, WIDTH, Rows, assert_same, train
from torch import Tensor, nn

from paceline.group.world import World
from paceline.testing import run_processes, seeded

SHARDS = 4
SIZES = (2, 3)


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
        loader_workers=workers,
        folder=folder or None,
        stop_after=stop_after,
    )
    return {
        "parameters": trained.parameters,
        "losses": [trained.losses[step][0] for step in sorted(trained.losses)],
        "between": trained.between,
        "ledger": [[epoch, index] for epoch, _, index in trained.ledger],
    }


def work_in_all_sizes(world: World, folder: str) -> dict[int, list[dict[str, Any]]]:
    """By size, the whole training, and the rest of one that was stopped.

    The first ranks of one world make the smaller ones, because to start a process costs seconds.
    """
    results: dict[int, list[dict[str, Any]]] = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if world.rank < size:
            part = World(rank=world.rank, size=size, group=group)
            results[size] = [work(part), work(part, workers=1, folder=f"{folder}/{size}")]
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return work(None)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """A training that was stopped in its first epoch, and copies of its folder."""
    folder = tmp_path_factory.mktemp("begun")
    result = work(None, workers=2, folder=str(folder / "first"), stop_after=5)
    for size in SIZES:
        shutil.copytree(folder / "first", folder / str(size))
    return result, str(folder)


@pytest.fixture(scope="module")
def results(begun: tuple[dict[str, Any], str]) -> list[dict[int, list[dict[str, Any]]]]:
    return run_processes(max(SIZES), work_in_all_sizes, begun[1], timeout_s=100)


@pytest.mark.parametrize("size", SIZES)
def test_dropout_and_augmentation_do_not_depend_on_the_workers(
    size: int,
    alone: dict[str, Any],
    begun: tuple[dict[str, Any], str],
    results: list[dict[int, list[dict[str, Any]]]],
) -> None:
    whole, rest = zip(*(each[size] for each in results[:size]), strict=True)
    losses = [sum(parts) for parts in zip(*(each["losses"] for each in whole), strict=True)]
    assert losses == pytest.approx(alone["losses"], rel=1e-4)
    for each in (*whole, *rest):
        assert_same(each["parameters"], alone["parameters"], rtol=1e-4, atol=1e-6)
    for each in rest:
        assert begun[0]["between"] + each["between"] == alone["between"]
    for parts in ([begun[0], *rest], whole):
        seen = Counter((epoch, index) for part in parts for epoch, index in part["ledger"])
        assert seen == Counter((epoch, index) for epoch in (0, 1) for index in range(50))


@pytest.mark.parametrize("workers", [1, 2])
def test_augmentation_does_not_depend_on_who_loads(workers: int, alone: dict[str, Any]) -> None:
    result = work(None, workers=workers)
    assert result["losses"] == alone["losses"]
    assert_same(result["parameters"], alone["parameters"], rtol=0, atol=0)


def test_random_numbers_between_steps_are_new_after_every_step(alone: dict[str, Any]) -> None:
    assert len(set(alone["between"])) == len(alone["between"])
