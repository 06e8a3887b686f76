"""Ranks that train on the same rows are told, once; those that have rows of their own are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from paceline import DistributedDataParallel, DistributedSampler, World
from paceline.ddp import SameRowsWarning
from paceline.ddp.fingerprint import DATASET_STEP, INPUT_STEPS, InputCheck
from paceline.testing import run_processes, seeded

ROWS = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Loading = Callable[[World], Iterable[Any]]


def train(world: World, loading: Loading, passes: int) -> int:
    """How often this rank is warned."""
    model = DistributedDataParallel(seeded(nn.Linear(6, 3), 0), process_group=world.group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in loading(world):
            for left in range(passes - 1, -1, -1):
                with model.no_sync(enabled=left > 0):
                    model(x).square().mean().backward()
    return sum(each.category is SameRowsWarning for each in caught)


def shuffled(dataset: Dataset[Any], seed: int, workers: int = 0) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, 4, shuffle=True, generator=generator, num_workers=workers)


def same_rows(_: World) -> DataLoader[Any]:
    return shuffled(TensorDataset(ROWS), 0)


def same_rows_without_a_loader(_: World) -> Iterator[tuple[Tensor]]:
    return ((part,) for part in ROWS.split(4))


def same_dataset(world: World) -> DataLoader[Any]:
    return shuffled(TensorDataset(ROWS), world.rank)


def same_dataset_in_processes(world: World) -> DataLoader[Any]:
    return shuffled(TensorDataset(ROWS), world.rank, workers=1)


def dealt(world: World) -> DataLoader[Any]:
    data = TensorDataset(ROWS)
    return DataLoader(data, 4, sampler=DistributedSampler(data, world.size, world.rank))


def one_batch_again_and_again(_: World) -> Iterator[tuple[Tensor]]:
    return ((ROWS[:4],) for _ in range(8))


def alike_in_one_step_only(world: World) -> Iterator[tuple[Tensor]]:
    for step, part in enumerate(ROWS.split(4)):
        yield (part + (world.rank if step == INPUT_STEPS[-1] else 0),)


class Part(Dataset[Any]):
    """A dataset that picks its rank's rows itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.names = [f"row{index}" for index in range(rank, 48, size)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (ROWS[int(self.names[index][3:])],)


def parts(world: World) -> DataLoader[Any]:
    return shuffled(Part(world.rank, world.size), world.rank)


def subsets(world: World) -> DataLoader[Any]:
    mine = range(world.rank, 48, world.size)
    return shuffled(Subset(TensorDataset(ROWS), mine), world.rank)


def beside_another_loader(world: World) -> Iterator[tuple[Tensor]]:
    """Somebody else shuffles for itself, and has begun, as evaluations and libraries do."""
    others = iter(same_dataset(world))
    next(others)
    for step, batch in enumerate(dealt(world)):
        if step in INPUT_STEPS:
            next(others)
        yield batch


def slices(world: World) -> DataLoader[Any]:
    return shuffled(TensorDataset(ROWS[world.rank :: world.size]), world.rank)


@pytest.mark.parametrize(
    ("loading", "size", "passes"),
    [
        (same_rows, 2, 1),
        (same_rows, 3, 2),
        (same_rows_without_a_loader, 2, 1),
        (same_dataset, 2, 1),
        (same_dataset, 3, 2),
        (same_dataset_in_processes, 2, 1),
    ],
)
def test_ranks_with_the_same_rows_are_warned_by_one_of_them(
    loading: Loading, size: int, passes: int
) -> None:
    assert run_processes(size, train, loading, passes) == [1, *[0] * (size - 1)]


@pytest.mark.parametrize(
    "loading",
    [
        *(dealt, one_batch_again_and_again, alike_in_one_step_only),
        *(parts, subsets, slices, beside_another_loader),
    ],
)
def test_ranks_with_rows_of_their_own_or_one_batch_for_ever_are_not_warned(
    loading: Loading,
) -> None:
    assert run_processes(2, train, loading, 1) == [0, 0]


def test_a_world_of_one_is_not_warned() -> None:
    assert run_processes(1, train, same_rows, 1) == [0]


def test_after_the_first_steps_nothing_is_hashed() -> None:
    check = InputCheck()
    for step in range(10):
        check.see(step, ROWS)
        words = check.words(step, torch.device("cpu"))
        assert (words is not None) == (step in INPUT_STEPS)


def test_the_inputs_of_a_step_that_broke_off_are_not_taken_for_a_dataset() -> None:
    check = InputCheck()
    check.see(INPUT_STEPS[-1], ROWS)
    assert check.words(DATASET_STEP, torch.device("cpu")) is None
