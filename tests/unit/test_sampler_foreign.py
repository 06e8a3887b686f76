"""A distributed version of any sampler or batch sampler."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data import DistributedBatchSampler, DistributedSampler, EpochNotSetWarning
from paceline.errors import UsageError

DATA = range(23)


class Shuffled(Sampler[int]):
    """Draws from a global generator, as samplers found in the wild do."""

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        indices = list(DATA)
        self.shuffle(indices)
        yield from indices

    def __len__(self) -> int:
        return len(DATA)


class OneByOne(Sampler[int]):
    """Draws a number for every index, without end and without length."""

    def __iter__(self) -> Iterator[int]:
        for _ in count():
            yield int(torch.randint(1000, ()))


def with_torch(indices: list[int]) -> None:
    indices[:] = torch.randperm(len(indices)).tolist()


SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "random": lambda: RandomSampler(DATA),
    "random, with a generator": lambda: RandomSampler(DATA, generator=torch.Generator()),
    "random, with replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=100),
    "subset": lambda: SubsetRandomSampler(range(7, 19)),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0] * 7, 50),
    "torch's global generator": lambda: Shuffled(with_torch),
    "Python's": lambda: Shuffled(random.shuffle),
    "NumPy's": lambda: Shuffled(numpy.random.shuffle),
}
each_sampler = pytest.mark.parametrize("build", SAMPLERS.values(), ids=SAMPLERS)


def dealt(build: Callable[[], Any], size: int, epoch: int = 0, **options: Any) -> list[list[int]]:
    """What each rank gets, the global generators being in another state on each."""
    shares = []
    for rank in range(size):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(100 * epoch + rank)
        sampler = DistributedSampler.of(build(), size, rank, **options)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
    return shares


@each_sampler
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_together_get_what_one_rank_alone_would(
    build: Callable[[], Sampler[int]], size: int
) -> None:
    [alone] = dealt(build, 1)
    assert Counter(chain(*dealt(build, size, pad=False))) == Counter(alone)


@each_sampler
def test_another_epoch_has_another_order(build: Callable[[], Sampler[int]]) -> None:
    assert dealt(build, 2, epoch=1) != dealt(build, 2)
    assert dealt(build, 2, epoch=1) == dealt(build, 2, epoch=1)


@each_sampler
def test_the_global_generators_are_left_as_they_were(build: Callable[[], Sampler[int]]) -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(5)
    expected = [draws() for _ in range(3)]
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(5)
    running = iter(DistributedSampler.of(build(), 2, 0))
    got = []
    for _ in range(3):
        next(running)
        got.append(draws())
    assert got == expected


def test_what_the_training_draws_meanwhile_does_not_change_the_order() -> None:
    quiet = list(islice(DistributedSampler.of(OneByOne(), 2, 0), 300))
    noisy = []
    for index in islice(DistributedSampler.of(OneByOne(), 2, 0), 300):
        torch.rand(7)
        noisy.append(index)
    assert noisy == quiet


def test_a_users_generator_is_not_drawn_from() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    list(DistributedSampler.of(RandomSampler(DATA, generator=generator), 2, 0))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("size", [1, 2, 3, 1024])
def test_wrapping_a_random_sampler_is_the_same_as_shuffling(size: int) -> None:
    for rank in (0, size - 1):
        plain = DistributedSampler(DATA, size, rank, seed=8)
        wrapped = DistributedSampler.of(RandomSampler(DATA), size, rank, seed=8)
        for sampler in (plain, wrapped):
            sampler.set_epoch(6)
        assert list(wrapped) == list(plain)
        assert (wrapped.num_samples, wrapped.total_size) == (plain.num_samples, plain.total_size)


def test_two_samplers_in_one_do_not_draw_the_same_numbers() -> None:
    class Pair(Sampler[int]):
        def __init__(self) -> None:
            self.samplers = [RandomSampler(range(20)), RandomSampler(range(20))]

        def __iter__(self) -> Iterator[int]:
            return chain(*self.samplers)

    both = list(DistributedSampler.of(Pair(), 1, 0))
    assert sorted(both[:20]) == sorted(both[20:])
    assert both[:20] != both[20:]


def test_a_sampler_that_never_ends_can_be_dealt_and_resumed() -> None:
    samplers = [DistributedSampler.of(OneByOne(), 3, rank) for rank in range(3)]
    shares = [list(islice(sampler, 4)) for sampler in samplers]
    [whole] = [list(islice(DistributedSampler.of(OneByOne(), 1, 0), 15))]
    assert [shares[i % 3][i // 3] for i in range(12)] == whole[:12]

    resumed = DistributedSampler.of(OneByOne(), 1, 0)
    resumed.load_state_dict(samplers[0].state_dict())
    assert list(islice(resumed, 3)) == whole[12:]
    with pytest.raises(TypeError):
        len(resumed)


def test_a_sampler_with_epochs_of_its_own_is_told_the_epoch() -> None:
    class Rotated(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return (self.epoch * 10 + i for i in range(4))

    sampler = DistributedSampler.of(BatchSampler(Rotated(), 2, False), 1, 0)
    sampler.set_epoch(3)
    assert list(chain(*sampler)) == [30, 31, 32, 33]  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", [SequentialSampler(range(5)), [0, 1, 2, 3, 4], range(5)])
def test_an_order_known_to_be_fixed_is_an_evaluation(sampler: Any) -> None:
    shares = [DistributedSampler.of(sampler, 2, rank) for rank in range(2)]
    assert [list(share) for share in shares] == [[0, 2, 4], [1, 3]]
    list(shares[0])


def test_any_other_order_is_padded_and_misses_set_epoch() -> None:
    sampler = DistributedSampler.of(Shuffled(random.shuffle), 2, 1)
    assert len(list(sampler)) == 12
    with pytest.warns(EpochNotSetWarning):
        list(sampler)


class TestBatches:
    @staticmethod
    def of(total: int, batch: int, size: int, **options: Any) -> list[list[list[int]]]:
        return [
            list(DistributedBatchSampler(BatchSampler(range(total), batch, False), size, rank,
                                         **options))
            for rank in range(size)
        ]  # fmt: skip

    def test_are_dealt_whole(self) -> None:
        assert self.of(10, 2, 2) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]

    def test_are_repeated_or_dropped_so_that_all_take_the_same_steps(self) -> None:
        assert self.of(10, 2, 2, pad=True)[1] == [[2, 3], [6, 7], [0, 1]]
        assert self.of(10, 2, 2, drop_last=True)[0] == [[0, 1], [4, 5]]

    def test_of_a_random_order_are_padded_by_default(self) -> None:
        samplers = [
            DistributedBatchSampler(BatchSampler(RandomSampler(DATA), 5, False), 3, rank)
            for rank in range(3)
        ]
        assert [len(list(sampler)) for sampler in samplers] == [2, 2, 2]

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_that_are_split_make_up_the_same_global_batches(self, size: int) -> None:
        parts = self.of(31, 8, size, split=True)
        for step, batch in enumerate(BatchSampler(range(31), 8, False)):
            shares = [rank[step] for rank in parts]
            assert sorted(chain(*shares)) == batch
            assert max(map(len, shares)) - min(map(len, shares)) <= 1

    def test_that_are_split_can_be_padded_to_equal_parts(self) -> None:
        assert self.of(7, 5, 3, split=True, pad=True) == [
            [[0, 3], [5]], [[1, 4], [6]], [[2, 0], [5]],
        ]  # fmt: skip

    def test_too_small_to_split_are_refused_before_the_first_step(self) -> None:
        with pytest.raises(UsageError, match="A batch of 1 sample cannot be split over 2 ranks"):
            self.of(9, 4, 2, split=True)
        with pytest.raises(UsageError, match="A batch of 2 samples cannot be split over 3 ranks"):
            self.of(8, 2, 3, split=True)

    def test_too_small_to_split_are_refused_when_met_where_nobody_knew(self) -> None:
        for rank in range(2):
            running = iter(DistributedBatchSampler([[0, 1], [2]], 2, rank, split=True))
            assert next(running) == [rank]
            with pytest.raises(UsageError, match="A batch of 1 sample "):
                next(running)

    def test_too_small_to_split_leave_empty_parts_for_a_loop_that_is_ready(self) -> None:
        assert self.of(5, 4, 2, split=True, pad=False) == [[[0, 2], [4]], [[1, 3], []]]

    def test_cannot_lose_samples_of_each_when_split(self) -> None:
        with pytest.raises(UsageError, match="drop_last=True with split=True"):
            self.of(8, 4, 2, split=True, drop_last=True)

    @pytest.mark.parametrize(("split", "expected"), [(False, 8), (True, 3)])
    def test_have_the_size_a_rank_sees(self, split: bool, expected: int) -> None:
        batches = BatchSampler(range(24), 8, False)
        assert DistributedBatchSampler(batches, 3, 0, split=split).batch_size == expected
        assert DistributedBatchSampler([[1]], 1, 0).batch_size is None

    @pytest.mark.parametrize("split", [False, True])
    @pytest.mark.parametrize("size", [1, 2, 3, 1024])
    def test_are_as_many_as_the_length_says(self, split: bool, size: int) -> None:
        for rank in {0, size - 1}:
            batches = BatchSampler(RandomSampler(range(100)), 7, False)
            sampler = DistributedBatchSampler(batches, size, rank, split=split, pad=True)
            assert len(sampler) == len(list(sampler))

    def test_that_never_end_are_dealt(self) -> None:
        endless = BatchSampler(OneByOne(), 3, True)
        assert len(list(islice(DistributedBatchSampler(endless, 2, 1), 5))) == 5


class TestBadInput:
    def test_samples_that_are_already_dealt(self) -> None:
        dealt = TorchDistributedSampler(list(DATA), 2, 0)
        with pytest.raises(UsageError, match="DistributedSampler in this BatchSampler"):
            DistributedBatchSampler(BatchSampler(dealt, 4, False), 2, 0)

    def test_something_that_is_not_a_sampler(self) -> None:
        with pytest.raises(UsageError, match="type int, which cannot be iterated over"):
            DistributedSampler.of(5, 2, 0)  # type: ignore[arg-type]

    def test_something_that_can_be_read_only_once(self) -> None:
        with pytest.raises(UsageError, match="can be read only once"):
            DistributedSampler.of(iter(DATA), 2, 0)

    def test_a_rank_outside_the_world(self) -> None:
        with pytest.raises(UsageError, match=r"rank.* 2"):
            DistributedBatchSampler([[0]], 2, 2)
