"""The computed order of an epoch: a permutation, well mixed, the same whoever asks for a part."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import DistributedSampler
from paceline.data.plan import KEEPS_UP_TO, KeyedOrder, Plan, choose_order, draw_order
from paceline.errors import UsageError


@given(st.integers(1, 3000), st.integers(-(2**63) + 1, 2**63 - 1), st.integers(0, 9))
def test_every_number_is_at_exactly_one_position(total: int, seed: int, epoch: int) -> None:
    numbers = draw_order("keyed", total, seed, epoch)[:total]
    assert torch.equal(numbers.sort().values, torch.arange(total))


@given(st.data())
def test_any_part_is_that_of_the_whole(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 500))
    start = data.draw(st.integers(0, total + 3))
    part = slice(start, data.draw(st.integers(0, total)), data.draw(st.integers(1, 9)))
    order = KeyedOrder(total, 7)
    assert order[part].tolist() == order[:].tolist()[part]


def test_the_order_of_a_trillion_samples_is_there_at_once() -> None:
    order = draw_order("keyed", 10**12, 0, 0)
    numbers = torch.cat([order[: 10**5], order[10**12 - 10**5 : 10**12]])
    assert len(numbers.unique()) == 2 * 10**5
    assert 0 <= int(numbers.min()) < 10**8
    assert 10**12 - 10**8 < int(numbers.max()) < 10**12


def test_the_order_stays_what_it_is_because_checkpoints_rely_on_it() -> None:
    assert draw_order("keyed", 10**9, 0, 0)[:4].tolist() == [
        191834755,
        11370749,
        885943950,
        552383275,
    ]
    assert draw_order("keyed", 10**9, 5, 2)[:4].tolist() == [
        772797873,
        935819133,
        878110556,
        405904104,
    ]
    assert draw_order("keyed", 7, 0, 0)[:7].tolist() == [1, 5, 4, 3, 0, 2, 6]


@pytest.mark.parametrize("total", [7, 30])
def test_over_many_seeds_every_number_is_equally_often_at_every_position(total: int) -> None:
    seeds, counts = 500, torch.zeros(total, total)
    for seed in range(seeds):
        counts[torch.arange(total), draw_order("keyed", total, seed, 0)[:total]] += 1
    assert_uniform(counts, degrees=(total - 1) ** 2)


@pytest.mark.parametrize("total", [1_000, 4_096, 10_000_019])
def test_neighbours_epochs_and_positions_have_nothing_to_do_with_each_other(total: int) -> None:
    positions = slice(300_000)
    here = draw_order("keyed", total, 0, 3)[positions]
    root = math.isqrt(total)
    others = {f"{lag} further": here.roll(-lag) for lag in (1, 2, 3, 64, root, root + 1)}
    others["position"] = torch.arange(here.numel())
    others["next epoch"] = draw_order("keyed", total, 0, 4)[positions]
    others["next seed"] = draw_order("keyed", total, 1, 3)[positions]
    for name, there in others.items():
        both = torch.stack([here, there]).double()
        deviation = float(torch.corrcoef(both)[0, 1]) * math.sqrt(here.numel())
        assert abs(deviation) < 4, f"{name}: {deviation:.1f} standard deviations"
        tenths = (here * 10 // total) * 10 + there * 10 // max(total, int(there.max()) + 1)
        if name != "position":
            assert_uniform(torch.bincount(tenths, minlength=100), degrees=99)
    residues = (here % 16) * 16 + torch.arange(here.numel()) % 16
    assert_uniform(torch.bincount(residues, minlength=256), degrees=255)


def assert_uniform(counts: torch.Tensor, degrees: int) -> None:
    """Fail where counts differ by more than four standard deviations of a fair draw."""
    expected = counts.double().mean()
    squares = float(((counts - expected) ** 2 / expected).sum())
    assert (squares - degrees) / math.sqrt(2 * degrees) < 4


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_plan_in_computed_order_is_the_same_at_any_number_of_workers(size: int) -> None:
    plan = Plan(samples=103, global_batch=20, shards=5, epochs=2, seed=3, order="keyed")
    seen: dict[tuple[int, int], list[int]] = {}
    for rank in range(size):
        for portion in plan.portions(2, rank, size):
            for shard in portion.shards:
                seen[portion.step, shard.number] = shard.indices
    alone = {(s.step, s.number): s.indices for p in plan.portions(2, 0, 1) for s in p.shards}
    assert seen == alone
    second = [index for (step, _), shard in seen.items() if step > 6 for index in shard]
    assert sorted(second) == list(range(103))


@pytest.mark.parametrize("pad", [True, False])
def test_a_sampler_in_computed_order_deals_the_same_samples_as_a_run(pad: bool) -> None:
    samplers = [
        DistributedSampler(range(103), 4, rank, seed=3, pad=pad, order="keyed") for rank in range(4)
    ]
    for sampler in samplers:
        sampler.set_epoch(1)
    order = draw_order("keyed", 103, 3, 1)[:103].tolist()
    order += order[:1] * pad
    assert [list(sampler) for sampler in samplers] == [order[rank::4] for rank in range(4)]


def test_a_sampler_continues_in_its_own_order_only() -> None:
    sampler = DistributedSampler(range(10**10), 2, 0, order="keyed")
    whole = list(islice(sampler, 5))
    resumed = DistributedSampler(range(10**10), 1, 0, order="keyed")
    resumed.load_state_dict(sampler.state_dict())
    assert next(iter(resumed)) not in whole
    with pytest.raises(UsageError, match=r"order.* 'keyed' in.* state, 'shuffled'"):
        DistributedSampler(range(10**10), 2, 0).load_state_dict(sampler.state_dict())
    with pytest.raises(UsageError, match=r"order.* 'random'"):
        DistributedSampler(range(9), 2, 0, order="random")  # type: ignore[arg-type]


def test_torchs_order_is_kept_up_to_a_few_million_samples() -> None:
    assert [choose_order(n) for n in (1, KEEPS_UP_TO, KEEPS_UP_TO + 1)] == [
        "torch",
        "torch",
        "keyed",
    ]
