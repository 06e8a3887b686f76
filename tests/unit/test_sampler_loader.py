"""The samplers inside a real DataLoader, with and without workers."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from paceline.data import DistributedBatchSampler, DistributedSampler


class Squares(Dataset[Tensor]):
    def __init__(self, total: int) -> None:
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


DATA = Squares(47)


def loader_of(
    sampler: DistributedSampler, workers: int, persistent: bool = False
) -> DataLoader[Tensor]:
    return DataLoader(
        DATA, batch_size=4, sampler=sampler, num_workers=workers, persistent_workers=persistent
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ranks_batches_hold_every_sample_once(workers: int) -> None:
    ledger: Counter[int] = Counter()
    for rank in range(3):
        loader = loader_of(DistributedSampler(DATA, 3, rank, shuffle=False), workers)
        batches = [batch.tolist() for batch in loader]
        assert len(batches) == len(loader)
        ledger.update(index for batch in batches for index in batch)
    assert ledger == Counter(range(47))


@pytest.mark.parametrize("size", [1, 2, 3, 1024])
def test_every_rank_takes_the_same_number_of_steps_in_training(size: int) -> None:
    steps = {
        len(list(loader_of(DistributedSampler(DATA, size, rank), workers=0)))
        for rank in {0, size // 2, size - 1}
    }
    assert len(steps) == 1


def test_workers_that_stay_alive_see_each_epochs_order() -> None:
    sampler = DistributedSampler(DATA, 2, 1)
    loader = loader_of(sampler, workers=2, persistent=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected = DistributedSampler(DATA, 2, 1)
        expected.set_epoch(epoch)
        assert [index for batch in loader for index in batch.tolist()] == list(expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_loop_that_advances_resumes_exactly_with_any_number_of_loader_workers(
    workers: int, steps: int
) -> None:
    ledger: Counter[int] = Counter()
    samplers = [DistributedSampler(DATA, 2, rank, pad=False) for rank in range(2)]
    for sampler in samplers:
        for batch in islice(loader_of(sampler, workers), steps):
            ledger.update(batch.tolist())
            sampler.advance(len(batch))
        if steps == 0:
            sampler.advance(0)
    state = samplers[0].state_dict()
    assert samplers[1].state_dict() == state
    for rank in range(3):
        resumed = DistributedSampler(DATA, 3, rank, pad=False)
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        for batch in loader_of(resumed, workers):
            ledger.update(batch.tolist())
    assert ledger == Counter(range(47))


def test_without_loader_workers_what_is_drawn_is_what_is_trained_on() -> None:
    sampler = DistributedSampler(DATA, 2, 0)
    for _ in islice(loader_of(sampler, workers=0), 3):
        pass
    assert sampler.consumed == 3 * 4 * 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", [False, True])
def test_batches_of_a_batch_sampler_hold_every_sample_once(workers: int, split: bool) -> None:
    ledger: Counter[int] = Counter()
    for rank in range(2):
        batches = BatchSampler(RandomSampler(DATA), 6, False)
        sampler = DistributedBatchSampler(batches, 2, rank, split=split)
        loader = DataLoader(DATA, batch_sampler=sampler, num_workers=workers)
        for batch in loader:
            ledger.update(batch.tolist())
    assert ledger == Counter(range(47))


def test_a_loader_that_keeps_the_state_drawn_with_each_batch_resumes_from_it() -> None:
    """How torchdata's StatefulDataLoader uses a sampler, which needs no advance()."""
    sampler = DistributedSampler(DATA, 2, 0)
    running = iter(sampler)
    in_flight = [(list(islice(running, 4)), sampler.state_dict()) for _ in range(4)]
    _, state_of_the_trained_batch = in_flight[1]
    resumed = DistributedSampler(DATA, 2, 0)
    resumed.load_state_dict(state_of_the_trained_batch)
    assert list(islice(resumed, 8)) == in_flight[2][0] + in_flight[3][0]
