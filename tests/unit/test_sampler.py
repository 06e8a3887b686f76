"""`DistributedSampler` against torch's class, and where it is meant to differ."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data import DistributedSampler, EpochNotSetWarning
from paceline.errors import NotInitializedError, UsageError

SIZES = [1, 2, 3, 1024]


def all_ranks(total: int, size: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(range(total), size, rank, **options) for rank in range(size)]


@given(
    total=st.integers(0, 200),
    size=st.one_of(st.integers(1, 9), st.just(1024)),
    shuffle=st.booleans(),
    seed=st.integers(-5, 2**40),
    drop_last=st.booleans(),
    epoch=st.integers(0, 50),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_with_padding_every_index_and_count_is_the_one_torch_gives(
    total: int,
    size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    epoch: int,
    data: st.DataObject,
) -> None:
    rank = data.draw(st.integers(0, size - 1))
    arguments = (range(total), size, rank, shuffle, seed, drop_last)
    theirs: TorchDistributedSampler[int] = TorchDistributedSampler(*arguments)  # type: ignore[arg-type]
    ours = DistributedSampler(*arguments, pad=True)
    theirs.set_epoch(epoch)
    ours.set_epoch(epoch)
    assert list(ours) == list(theirs)
    assert len(ours) == len(theirs)
    for name in vars(theirs):
        assert getattr(ours, name) == getattr(theirs, name), name


@given(total=st.integers(0, 60), size=st.integers(1, 9), rank=st.integers(0, 8))
@settings(deadline=None)
def test_training_and_dropping_are_torchs_without_saying_anything(
    total: int, size: int, rank: int
) -> None:
    rank %= size
    for options in ({}, {"drop_last": True}, {"shuffle": False, "drop_last": True}):
        theirs = TorchDistributedSampler(range(total), size, rank, **options)  # type: ignore[arg-type]
        assert list(DistributedSampler(range(total), size, rank, **options)) == list(theirs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("total", [0, 1, 5, 1025])
def test_an_evaluation_sees_every_sample_exactly_once(size: int, total: int) -> None:
    samplers = all_ranks(total, size, shuffle=False)
    shares = [list(sampler) for sampler in samplers]
    assert sorted(chain(*shares)) == list(range(total))
    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    assert [sampler.num_samples for sampler in samplers] == [len(share) for share in shares]
    assert {sampler.total_size for sampler in samplers} == {total}
    assert len(shares[0]) - len(shares[-1]) <= 1


@pytest.mark.parametrize("size", SIZES)
def test_asking_for_no_padding_holds_in_training_too(size: int) -> None:
    shares = [list(sampler) for sampler in all_ranks(1000, size, pad=False)]
    assert Counter(chain(*shares)) == Counter(range(1000))


@pytest.mark.parametrize("size", SIZES)
def test_asking_for_padding_holds_in_evaluation_too(size: int) -> None:
    samplers = all_ranks(5, size, shuffle=False, pad=True)
    assert {len(list(sampler)) for sampler in samplers} == {-(-5 // size)}


def test_it_is_a_sampler_and_torchs_distributed_sampler_to_libraries_that_ask() -> None:
    sampler = DistributedSampler(range(3), 1, 0)
    assert isinstance(sampler, TorchDistributedSampler)
    assert isinstance(sampler, Sampler)


def test_two_iterators_of_one_sampler_do_not_disturb_each_other() -> None:
    sampler = DistributedSampler(range(10), 2, 0, shuffle=False)
    assert list(zip(sampler, sampler, strict=True)) == [(i, i) for i in range(0, 10, 2)]


def test_a_pass_keeps_its_order_when_the_epoch_changes_meanwhile() -> None:
    sampler = DistributedSampler(range(50), 2, 0)
    expected = list(DistributedSampler(range(50), 2, 0))
    running = iter(sampler)
    sampler.set_epoch(3)
    assert list(running) == expected


def test_attributes_that_torch_reads_anew_for_each_pass_can_be_changed_between_passes() -> None:
    theirs: TorchDistributedSampler[int] = TorchDistributedSampler(range(9), 2, 1)  # type: ignore[arg-type]
    ours = DistributedSampler(range(9), 2, 1)
    for name, value in {"epoch": 4, "seed": 7, "shuffle": False, "rank": 0}.items():
        ours.set_epoch(ours.epoch)
        setattr(theirs, name, value)
        setattr(ours, name, value)
        assert list(ours) == list(theirs)


def test_a_subclass_written_for_torchs_class_keeps_its_own_count() -> None:
    class FirstHalf(DistributedSampler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.num_samples = 2

        def __iter__(self) -> Iterator[int]:
            return iter([0, 1])

    assert len(FirstHalf(range(10), 1, 0)) == 2


def test_a_copy_and_a_pickle_deal_the_same() -> None:
    sampler = DistributedSampler(list(range(20)), 3, 1, seed=4)
    sampler.set_epoch(2)
    copied, pickled = copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))
    assert list(copied) == list(pickled) == list(sampler)


def test_a_default_device_does_not_reach_the_order() -> None:
    expected = list(DistributedSampler(range(9), 2, 0))
    with torch.device("meta"):
        assert list(DistributedSampler(range(9), 2, 0)) == expected


class TestWhoseShare:
    def test_is_the_default_groups_when_there_is_one(self) -> None:
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
        dist.init_process_group("fake", store=dist.HashStore(), rank=5, world_size=1024)
        try:
            sampler = DistributedSampler(range(4096), shuffle=False)
            assert (sampler.num_replicas, sampler.rank) == (1024, 5)
            assert list(sampler) == [5, 1029, 2053, 3077]
        finally:
            dist.destroy_process_group()

    def test_is_everything_when_nothing_was_launched(self) -> None:
        assert list(DistributedSampler(range(4), shuffle=False)) == [0, 1, 2, 3]

    def test_is_everything_for_a_launched_world_of_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert len(DistributedSampler(range(4))) == 4

    def test_is_an_error_when_several_were_launched_but_no_group_was_made(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(NotInitializedError, match=r"rank 1 of 3.\nCall paceline.init_process"):
            DistributedSampler(range(4))
        assert len(DistributedSampler(range(6), num_replicas=3, rank=0)) == 2

    @pytest.mark.parametrize("half", [{"num_replicas": 4}, {"rank": 2}])
    def test_is_an_error_when_half_of_it_is_given_and_nothing_says_the_rest(
        self, half: dict[str, int]
    ) -> None:
        with pytest.raises(NotInitializedError, match=r"or.* num_replicas and rank"):
            DistributedSampler(range(4), **half)


class TestBadInput:
    @pytest.mark.parametrize("size", [0, -1])
    def test_an_impossible_number_of_ranks(self, size: int) -> None:
        with pytest.raises(UsageError, match=f"impossible with num_replicas={size}"):
            DistributedSampler(range(4), size, 0)

    @pytest.mark.parametrize("rank", [-1, 2, 7])
    def test_a_rank_outside_the_world(self, rank: int) -> None:
        with pytest.raises(UsageError, match=f"rank.* {rank}, .*\nRanks count from 0"):
            DistributedSampler(range(4), 2, rank)

    @pytest.mark.parametrize("name", ["num_replicas", "rank", "seed"])
    def test_a_number_that_is_not_whole(self, name: str) -> None:
        arguments: dict[str, Any] = {"num_replicas": 2, "rank": 0, name: 0.5}
        with pytest.raises(UsageError, match=f"{name}.* 0.5, a float"):
            DistributedSampler(range(4), **arguments)

    def test_an_epoch_that_is_not_a_number(self) -> None:
        with pytest.raises(UsageError, match=r"epoch.* 'two', a str"):
            DistributedSampler(range(4), 1, 0).set_epoch("two")  # type: ignore[arg-type]

    def test_a_dataset_without_a_length(self) -> None:
        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(4))

        with pytest.raises(UsageError, match="type Stream and no length"):
            DistributedSampler(Stream(), 2, 0)

    def test_a_dataset_that_changed_its_length(self) -> None:
        data = [0, 1, 2, 3]
        sampler = DistributedSampler(data, 2, 0)
        data.append(4)
        with pytest.raises(UsageError, match="Make a new sampler"):
            iter(sampler)

    def test_torch_users_catch_what_they_always_caught(self) -> None:
        with pytest.raises(ValueError, match=r"rank.* 2"):
            DistributedSampler(range(4), 2, 2)


class TestForgottenSetEpoch:
    @staticmethod
    def warnings_of(sampler: DistributedSampler, epochs: list[int | None]) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for epoch in epochs:
                if epoch is not None:
                    sampler.set_epoch(epoch)
                list(sampler)
        return sum(entry.category is EpochNotSetWarning for entry in caught)

    def test_is_warned_about_once_and_says_what_to_do(self) -> None:
        sampler = DistributedSampler(range(8), 2, 1)
        list(sampler)
        with pytest.warns(EpochNotSetWarning, match=r"still 0. Call sampler.set_epoch\(epoch\)"):
            list(sampler)
        assert self.warnings_of(sampler, [None, None]) == 0

    def test_is_noticed_in_a_world_of_one(self) -> None:
        assert self.warnings_of(DistributedSampler(range(8), 1, 0), [None, None]) == 1

    def test_is_noticed_where_the_epoch_is_set_once(self) -> None:
        assert self.warnings_of(DistributedSampler(range(8), 1, 0), [0, None, None]) == 1

    @pytest.mark.parametrize("total", [8, 64])
    @pytest.mark.parametrize(
        ("workers", "peeks_first"),  # each iteration forks workers anew
        [(0, 2), (0, 1), (0, 0), (1, 1), (1, 0)],
    )
    @pytest.mark.parametrize("is_set", [True, False])
    def test_is_told_from_looks_at_the_first_batch(
        self, workers: int, total: int, peeks_first: int, is_set: bool
    ) -> None:
        data = list(range(total))
        sampler = DistributedSampler(data, 2, 0)
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for epoch in range(3):
                for _ in range(peeks_first):
                    next(iter(loader))
                if is_set:
                    sampler.set_epoch(epoch)
                if not peeks_first:
                    next(iter(loader))
                list(loader)
        found = sum(entry.category is EpochNotSetWarning for entry in caught)
        assert found == (0 if is_set else 1)

    def test_is_not_seen_where_the_epoch_is_set(self) -> None:
        assert self.warnings_of(DistributedSampler(range(8), 2, 0), [0, 1, 2, 2]) == 0

    def test_is_not_seen_where_the_attribute_is_assigned(self) -> None:
        sampler = DistributedSampler(range(8), 2, 0)
        list(sampler)
        sampler.epoch = 1
        assert self.warnings_of(sampler, [None]) == 0

    def test_is_not_seen_in_evaluation(self) -> None:
        sampler = DistributedSampler(range(8), 2, 0, shuffle=False)
        assert self.warnings_of(sampler, [None, None, None]) == 0

    def test_is_not_seen_when_the_first_pass_was_only_a_peek(self) -> None:
        sampler = DistributedSampler(range(8), 2, 0)
        next(iter(sampler))
        assert self.warnings_of(sampler, [None]) == 0
