"""The bucket plan: pure arithmetic, the same on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.ddp.layout import (
    ALIGNMENT_BYTES,
    MIB,
    default_capacities,
    plan_buckets,
)
from paceline.ddp.trailer import CONTROL_WORDS
from paceline.errors import UsageError
from paceline.transport.interface import Flat, round_up

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]

gradient = st.builds(Flat, st.integers(0, 5000), st.sampled_from(DTYPES), st.just(CPU))
capacities = st.lists(st.integers(1, 20_000), min_size=1, max_size=3)


def floats(*numels: int) -> list[Flat]:
    return [Flat(numel, torch.float32, CPU) for numel in numels]


@given(st.lists(gradient, max_size=30), capacities, st.randoms(), st.booleans())
def test_every_gradient_has_one_slot_and_slots_do_not_overlap(
    gradients: list[Flat], caps: list[int], random: object, apart: bool
) -> None:
    order = list(range(len(gradients)))
    random.shuffle(order)  # type: ignore[attr-defined]
    plans = plan_buckets(gradients, order, caps, trailer_apart=apart, is_aligned=not apart)
    placed = [slot.param for plan in plans for slot in plan.slots]
    assert sorted(placed) == sorted(order)
    for plan in plans:
        step = 1 if apart else ALIGNMENT_BYTES // plan.dtype.itemsize
        stops = [0, *(slot.stop for slot in plan.slots)]
        assert [slot.start for slot in plan.slots] == [round_up(s, step) for s in stops[:-1]]
        for slot in plan.slots:
            assert slot.stop - slot.start == gradients[slot.param].numel
            assert gradients[slot.param].dtype == plan.dtype


@given(st.lists(gradient, min_size=1, max_size=30), capacities)
def test_a_bucket_is_over_its_capacity_only_with_its_last_gradient(
    gradients: list[Flat], caps: list[int]
) -> None:
    for plan in plan_buckets(gradients, range(len(gradients)), caps):
        filled = [gradients[slot.param].nbytes for slot in plan.slots]
        assert sum(filled[:-1]) < max(caps)


@given(st.lists(gradient, max_size=30), capacities)
def test_one_trailer_stands_in_the_last_bucket_and_can_count(
    gradients: list[Flat], caps: list[int]
) -> None:
    plans = plan_buckets(gradients, range(len(gradients)), caps)
    assert [plan.trailer for plan in plans[:-1]] == [0] * (len(plans) - 1)
    assert plans[-1].trailer == len(gradients) + CONTROL_WORDS
    assert plans[-1].dtype in (torch.float32, torch.float64)


def test_the_first_bucket_is_small_so_that_it_leaves_early() -> None:
    plans = plan_buckets(floats(10, 10, 10, 10, 10, 10), range(6), [40, 120])
    assert [[slot.param for slot in plan.slots] for plan in plans] == [[0], [1, 2, 3], [4, 5]]


def test_buckets_are_listed_in_the_order_they_become_full() -> None:
    half = Flat(4, torch.bfloat16, CPU)
    full = Flat(4, torch.float32, CPU)
    plans = plan_buckets([half, full, full, half], range(4), [32])
    assert [plan.dtype for plan in plans[:2]] == [torch.float32, torch.bfloat16]
    assert plans[2].slots == ()  # half precision cannot count, so the trailer stands alone


def test_a_bucket_is_full_once_it_holds_its_capacity() -> None:
    plans = plan_buckets(floats(1, 1000, 1, 23, 1, 1), range(6), [100])
    assert [[slot.param for slot in plan.slots] for plan in plans] == [[0, 1], [2, 3, 4], [5]]


def test_nothing_waits_for_a_gradient_that_fills_a_bucket_alone() -> None:
    plans = plan_buckets(floats(5, 1000, 7, 1000), range(4), [100])
    assert [[slot.param for slot in plan.slots] for plan in plans] == [[0, 1], [2], [3]]


@pytest.mark.parametrize("caps", [[], [0], [-1], [10, 0]])
def test_impossible_capacities_are_refused(caps: list[int]) -> None:
    with pytest.raises(UsageError, match="positive"):
        plan_buckets(floats(1), [0], caps)


@pytest.mark.parametrize(
    ("mib", "cheap", "expected"),
    [
        (100, True, [4.0]),
        (8, True, [2.0]),  # at least four buckets
        (0.1, True, [0.25]),
        (8, False, [2.0]),
        (2, False, [1.0]),
    ],
)
def test_by_default_there_are_at_least_four_buckets_unless_their_messages_would_cost_more(
    mib: float, cheap: bool, expected: list[float]
) -> None:
    gradients = floats(int(mib * MIB / 4))
    got = default_capacities(gradients, messages_are_cheap=cheap)
    assert [capacity / MIB for capacity in got] == expected


def test_on_a_gpu_a_small_first_bucket_leaves_early() -> None:
    gradients = [Flat(10, torch.float32, torch.device("cuda"))]
    assert default_capacities(gradients) == [MIB, 25 * MIB]
