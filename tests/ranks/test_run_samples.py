"""The sample of an index is the same on every worker of a run, or the run does not begin."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from paceline import Run, World
from paceline.errors import DesyncError
from paceline.run.loader import refuse_other_samples, sum_up_samples
from paceline.testing import run_ranks, seeded

ROWS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


def begin(world: World, dataset: Any) -> None:
    model = seeded(nn.Linear(4, 1), 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    Run(model, optimizer, dataset, global_batch=4, epochs=1, world=world)


class Made(Dataset[Any]):
    """Every sample is made when it is asked for."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


@pytest.mark.parametrize("size", [2, 3])
def test_a_dataset_from_other_random_numbers_on_one_worker_is_refused(size: int) -> None:
    def body(world: World) -> None:
        generator = torch.Generator().manual_seed(int(world.rank == size - 1))
        begin(world, TensorDataset(torch.randn(20, 4, generator=generator)))

    with pytest.raises(DesyncError) as caught:
        run_ranks(size, body)
    assert says(str(caught.value), "0", "rank 0", f"rank {size - 1}", "sample[0]")


@pytest.mark.parametrize("index", [0, 10, 19])
def test_the_index_and_the_values_that_differ_are_named(index: int) -> None:
    def body(world: World) -> None:
        rows = ROWS.clone()
        rows[index] = world.rank + 2.5
        begin(world, TensorDataset(rows))

    with pytest.raises(DesyncError) as caught:
        run_ranks(2, body)
    assert says(str(caught.value), index, "rank 0", "rank 1", "2.5", "3.5")


@pytest.mark.parametrize(
    "make",
    [
        lambda index: (ROWS[index], index),
        lambda index: ROWS[index] + torch.randn(4),
        lambda index: {"x": ROWS[index].numpy(), "y": random.random()},
        lambda index: ROWS[index] + random.SystemRandom().random(),
        lambda index: {"words": {"a", "b", "c"}, "x": b"bytes"},
        lambda index: 1 / 0,
    ],
    ids=["plain", "seeded", "dictionary", "unseeded", "sets", "an error"],
)
def test_augmented_samples_and_those_that_cannot_be_compared_are_accepted(make: Any) -> None:
    run_ranks(2, lambda world: begin(world, Made(make)))


def test_what_two_kinds_of_machines_round_differently_is_accepted() -> None:
    def body(world: World) -> None:
        begin(world, TensorDataset(ROWS * (1 + 1e-5 * world.rank)))

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])),
        (b"bytes", b"bites"),
        (3, 4),
        ("some text", "other text"),
        ({"x": torch.zeros(2)}, {"x": torch.zeros(3)}),
        ([1.0, 2.0], [1.0]),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])),
    ],
)
def test_samples_of_every_kind_are_compared(one: Any, other: Any) -> None:
    ours, theirs = (
        sum_up_samples(Made(lambda _, value=value: value), 20, 0, 0) for value in (one, other)
    )
    assert len(ours) == len(theirs) == 3
    refuse_other_samples(ours, ours, "here", "there")
    with pytest.raises(DesyncError):
        refuse_other_samples(ours, theirs, "here", "there")


def test_random_numbers_stand_where_they_stood() -> None:
    before = torch.random.get_rng_state(), random.getstate()
    sum_up_samples(Made(lambda _: torch.randn(3) + random.random()), 20, 0, 0)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == random.getstate()


class Counted(Made):
    """Notices in which process it is read."""

    reads = 0

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return ROWS[index]


def test_where_other_processes_load_this_one_reads_nothing() -> None:
    dataset = Counted(None)
    assert len(sum_up_samples(dataset, 20, 0, 2)) == 3
    assert dataset.reads == 0
