"""Resuming in the middle of an epoch: nothing lost, nothing repeated, at any world size."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from paceline.data import DistributedBatchSampler, DistributedSampler
from paceline.data.deal import ResumableSampler
from paceline.errors import UsageError


def train_in_lock_step(samplers: list[Any], rounds: int, batch: int) -> list[list[Any]]:
    """Each rank draws `rounds` batches, as a data loader without workers does."""
    shares: list[list[Any]] = []
    for sampler in samplers:
        running = iter(sampler)
        shares.append([item for _ in range(rounds) for item in islice(running, batch)])
    return shares


def state_after(samplers: list[ResumableSampler[Any]]) -> dict[str, Any]:
    """The state of rank 0, through a file as it were."""
    loaded: dict[str, Any] = json.loads(json.dumps(samplers[0].state_dict()))
    return loaded


legs = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3), st.integers(1, 4)), max_size=6)


@given(
    total=st.integers(0, 80),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 9),
    legs=legs,
    last_size=st.integers(1, 7),
)
@settings(max_examples=200, deadline=None)
def test_each_sample_is_trained_on_exactly_once_over_any_sequence_of_world_sizes(
    total: int,
    shuffle: bool,
    seed: int,
    epoch: int,
    legs: list[tuple[int, int, int]],
    last_size: int,
) -> None:
    def build(size: int, state: dict[str, Any] | None) -> list[DistributedSampler]:
        samplers = [
            DistributedSampler(range(total), size, rank, shuffle, seed, pad=False)
            for rank in range(size)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            sampler.set_epoch(epoch)
        return samplers

    ledger: Counter[int] = Counter()
    state = None
    for size, rounds, batch in legs:
        samplers = build(size, state)
        for share in train_in_lock_step(samplers, rounds, batch):
            ledger.update(share)
        state = state_after(samplers)
        assert state["consumed"] == ledger.total()
    for sampler in build(last_size, state):
        announced = len(sampler)
        share = list(sampler)
        assert len(share) == announced
        ledger.update(share)
    assert ledger == Counter(range(total))


@given(
    total=st.integers(1, 60),
    size=st.integers(1, 6),
    taken=st.integers(0, 70),
    drop_last=st.booleans(),
)
@settings(deadline=None)
def test_resuming_with_the_same_ranks_goes_on_exactly_as_if_never_stopped(
    total: int, size: int, taken: int, drop_last: bool
) -> None:
    for rank in range(size):
        whole = list(DistributedSampler(range(total), size, rank, drop_last=drop_last))
        first = DistributedSampler(range(total), size, rank, drop_last=drop_last)
        before = list(islice(first, min(taken, len(whole))))
        second = DistributedSampler(range(total), size, rank, drop_last=drop_last)
        second.load_state_dict(first.state_dict())
        assert before + list(second) == whole


@pytest.mark.parametrize("split", [False, True])
@given(total=st.integers(0, 60), legs=legs, last_size=st.integers(1, 5))
@settings(deadline=None)
def test_each_batch_is_trained_on_exactly_once_over_any_sequence_of_world_sizes(
    split: bool, total: int, legs: list[tuple[int, int, int]], last_size: int
) -> None:
    def build(size: int, state: dict[str, Any] | None) -> list[DistributedBatchSampler]:
        data = range(max(total, 1))
        samplers = [
            DistributedBatchSampler(
                BatchSampler(RandomSampler(data), 7, False), size, rank, split=split, pad=False
            )
            for rank in range(size)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        return samplers

    ledger: Counter[int] = Counter()
    state = None
    for size, rounds, _ in legs:
        samplers = build(size, state)
        for batches in train_in_lock_step(samplers, rounds, 1):
            ledger.update(index for batch in batches for index in batch)
        state = state_after(samplers)
    for sampler in build(last_size, state):
        ledger.update(index for batch in sampler for index in batch)
    assert ledger == Counter(range(max(total, 1)))


class TestAfterLoading:
    @staticmethod
    def resumed(consumed: int = 6) -> DistributedSampler:
        sampler = DistributedSampler(range(10), 2, 0, shuffle=False)
        sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "consumed": consumed})
        return sampler

    def test_setting_the_same_epoch_keeps_the_place(self) -> None:
        sampler = self.resumed()
        sampler.set_epoch(3)
        assert list(sampler) == [6, 8]

    def test_setting_another_epoch_begins_at_its_start(self) -> None:
        sampler = self.resumed()
        sampler.set_epoch(4)
        assert (len(sampler), sampler.consumed, list(sampler)) == (5, 0, [0, 2, 4, 6, 8])

    def test_a_peek_does_not_lose_the_place(self) -> None:
        sampler = self.resumed()
        next(iter(sampler))
        assert list(sampler) == [6, 8]

    def test_the_length_is_what_is_left_and_num_samples_the_whole_share(self) -> None:
        sampler = self.resumed()
        assert (len(sampler), sampler.num_samples) == (2, 5)

    def test_the_pass_after_it_is_whole_again(self) -> None:
        sampler = self.resumed()
        list(sampler)
        assert len(sampler) == 5
        assert list(sampler) == [0, 2, 4, 6, 8]

    def test_a_finished_epoch_has_nothing_left(self) -> None:
        sampler = self.resumed(consumed=10)
        assert (len(sampler), list(sampler)) == (0, [])

    def test_the_state_is_the_one_that_was_loaded(self) -> None:
        sampler = self.resumed()
        assert (sampler.epoch, sampler.consumed) == (3, 6)


class TestAdvance:
    def test_counts_what_was_trained_on_instead_of_what_was_drawn(self) -> None:
        sampler = DistributedSampler(range(100), 4, 2)
        prefetched = list(islice(sampler, 20))
        sampler.advance(8)
        assert sampler.consumed == 32
        again = DistributedSampler(range(100), 4, 2)
        again.load_state_dict(sampler.state_dict())
        assert list(islice(again, 12)) == prefetched[8:]

    def test_counts_anew_in_the_next_epoch(self) -> None:
        sampler = DistributedSampler(range(10), 2, 0)
        list(sampler)
        sampler.advance(5)
        assert sampler.consumed == 10
        sampler.set_epoch(1)
        assert sampler.consumed == 0

    def test_does_not_lose_the_last_batches_when_the_loader_has_already_drawn_everything(
        self,
    ) -> None:
        sampler = DistributedSampler(range(10), 2, 0)
        list(sampler)
        sampler.advance(3)
        assert sampler.consumed == 6

    @pytest.mark.parametrize("count", [-1, 7])
    def test_refuses_more_than_was_drawn_and_less_than_nothing(self, count: int) -> None:
        sampler = DistributedSampler(range(100), 4, 1)
        list(islice(sampler, 6))
        with pytest.raises(UsageError, match=rf"advance\({count}\) on rank 1 .*drawn 6 "):
            sampler.advance(count)
        assert sampler.consumed == 24

    def test_counts_batches_in_a_batch_sampler(self) -> None:
        sampler = DistributedBatchSampler(BatchSampler(range(40), 4, False), 2, 0)
        list(islice(sampler, 3))
        sampler.advance()
        assert sampler.consumed == 2


class TestWrongState:
    @pytest.mark.parametrize(
        ("key", "value"), [("seed", 1), ("total", 11), ("order", "sequential"), ("unit", "batches")]
    )
    def test_of_another_order_names_the_first_difference(self, key: str, value: object) -> None:
        sampler = DistributedSampler(range(10), 2, 0)
        state = {**sampler.state_dict(), key: value}
        with pytest.raises(UsageError, match=f"First difference: {key}.* {value!r} in.* state"):
            sampler.load_state_dict(state)

    @pytest.mark.parametrize("consumed", [-1, 11])
    def test_with_an_impossible_place(self, consumed: int) -> None:
        sampler = DistributedSampler(range(10), 2, 0)
        with pytest.raises(UsageError, match=f"{consumed} of 10 samples are consumed"):
            sampler.load_state_dict({**sampler.state_dict(), "consumed": consumed})

    def test_of_something_else(self) -> None:
        with pytest.raises(UsageError, match=r"state has no 'consumed'; it has \['yielded'\]"):
            DistributedSampler(range(10), 2, 0).load_state_dict({"yielded": 3})

    def test_leaves_the_sampler_as_it_was(self) -> None:
        sampler = DistributedSampler(range(10), 2, 0, shuffle=False)
        with pytest.raises(UsageError):
            sampler.load_state_dict({**sampler.state_dict(), "epoch": 5, "consumed": -1})
        assert (sampler.epoch, list(sampler)) == (0, [0, 2, 4, 6, 8])
