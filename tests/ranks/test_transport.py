"""Sums and copies through shared memory, with ranks as threads."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.errors import DesyncError, PeerError, UsageError
from paceline.group import Membership
from paceline.testing import gradients, run_ranks
from paceline.transport import Transport, TransportChoice, place
from paceline.transport.interface import C10d, Flat, slices

CPU = torch.device("cpu")
SHARED = DDPOptions(transport="shared_memory")
OVER_C10D = DDPOptions(transport="c10d")
SIZES = [2, 3, 4]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def shared(world: World) -> Transport:
    return TransportChoice(Membership.of(world.group), [CPU], "shared_memory").get()


def plan(numel: int, dtype: torch.dtype = torch.float32, trailer: int = 0) -> Flat:
    return Flat(numel, dtype, CPU, trailer)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


def small() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_is_that_of_all_ranks_and_has_the_same_bits_everywhere(
    size: int, dtype: torch.dtype
) -> None:
    numels = [1, 5000, 200_000]
    expected = [sum(values(rank, n, dtype).double() for rank in range(size)) / size for n in numels]

    def body(world: World) -> list[Tensor]:
        transport = shared(world)
        buckets = place(transport, [plan(n, dtype) for n in numels], "Placing")
        homes = buckets.homes
        for _ in range(3):  # every turn uses the memory again
            sums = []
            for number, (home, n) in enumerate(zip(homes, numels, strict=True)):
                assert home is not None
                mine = values(world.rank, n, dtype)
                home.copy_(mine if buckets.divides(dtype) else mine / size)
                sums.append(buckets.start(number, home, 1.0, "A sum"))
            for each in sums:
                each.wait()
        return [home.clone() for home in homes if home is not None]

    results = run_ranks(size, body)
    for got in results:
        for one, first, wanted in zip(got, results[0], expected, strict=True):
            assert torch.equal(one, first)
            torch.testing.assert_close(one, wanted.to(dtype))


@pytest.mark.parametrize("size", SIZES)
def test_low_precision_is_summed_in_float32(size: int) -> None:
    """Added up in bfloat16, 256 + 1 would stay 256, and float16 would overflow at 65504."""

    def body(world: World) -> tuple[Tensor, Tensor]:
        transport = shared(world)
        plans = [plan(1, torch.bfloat16), plan(1, torch.float16)]
        buckets = place(transport, plans, "Placing")
        fine, large = buckets.homes
        assert fine is not None
        assert large is not None
        fine.fill_(256 if world.rank == 0 else 1)
        large.fill_(60_000)
        for number, home in enumerate((fine, large)):
            buckets.start(number, home, 1.0, "A sum").wait()
        return fine.clone(), large.clone()

    for fine, large in run_ranks(size, body):
        assert fine.item() == torch.tensor((256 + size - 1) / size).bfloat16().item()
        assert large.item() == torch.tensor(60_000.0).half().item()


@pytest.mark.parametrize("size", SIZES)
def test_weights_scale_the_gradients_and_not_the_trailer(size: int) -> None:
    def body(world: World) -> Tensor:
        transport = shared(world)
        buckets = place(transport, [plan(4, trailer=2)], "Placing")
        (home,) = buckets.homes
        assert home is not None
        assert buckets.applies_weights
        home[:4], home[4:] = (world.rank + 1) / size, 1.0
        buckets.start(0, home, float(world.rank + 1), "A sum").wait()
        return home.clone()

    items = sum(range(1, size + 1))
    for got in run_ranks(size, body):
        torch.testing.assert_close(got, torch.tensor([items / items] * 4 + [float(size)] * 2))


@pytest.mark.parametrize("size", SIZES)
def test_memory_of_ones_own_is_summed_too(size: int) -> None:
    def body(world: World) -> Tensor:
        transport = shared(world)
        buckets = place(transport, [plan(100)], "Placing")
        (home,) = buckets.homes
        assert home is not None
        buffer = home if world.rank else torch.empty(100)
        home.fill_(-1)
        buffer.fill_(world.rank)
        buckets.start(0, buffer, 1.0, "A sum").wait()
        if world.rank == 0:
            assert torch.equal(home, torch.full((100,), -1.0))  # somebody still looks at it
        return buffer.clone()

    for got in run_ranks(size, body):
        assert torch.equal(got, torch.full((100,), float(sum(range(size)))))


@pytest.mark.parametrize("size", [1, *SIZES])
def test_gradients_kept_from_an_earlier_step_are_not_overwritten(size: int) -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(small(), process_group=world.group)
        kept: list[list[Tensor]] = []
        copies: list[list[Tensor]] = []
        for step in range(4):
            model.zero_grad()
            x = torch.full((2, 7), float(step + world.rank + 1) / 9)
            model(x).square().mean().backward()
            kept.append([param.grad for param in model.parameters() if param.grad is not None])
            copies.append([grad.clone() for grad in kept[-1]])
        for held, copied in zip(kept, copies, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(held, copied, strict=True))

    run_ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_changing_gradients_in_place_stays_on_ones_own_rank(size: int) -> None:
    def body(world: World) -> list[Tensor]:
        model = DistributedDataParallel(small(), process_group=world.group)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 7)).square().mean().backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            before = [grad.clone() for grad in grads]
            world.barrier()
            for grad in grads:
                grad.mul_(world.rank + 2)
            world.barrier()
            torch.testing.assert_close(grads, [grad * (world.rank + 2) for grad in before])
            del grad, grads  # the next step may have its memory
        return before

    results = run_ranks(size, body)
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, results[0], strict=True))


def moved(transport: Transport, world: World, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """A buffer after each of the ways to move it, two of one size under way at a time."""
    twins = [values(world.rank + turn, numel, dtype) for turn in (0, 10)]
    sums = [twin.clone() for twin in twins]
    for waited in [transport.sum(each, "A sum") for each in sums]:
        waited.wait()
    start, stop = slices(numel, world.size)[world.rank]
    gathered = [torch.full_like(each, -1) for each in sums]
    for each, whole in zip(gathered, sums, strict=True):
        each[start:stop] = whole[start:stop]
    for waited in [transport.gather(each, "A gather") for each in gathered]:
        waited.wait()
    return [*sums, *gathered]


@pytest.mark.parametrize("kind", ["c10d", "shared_memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_slices_of_a_sum_that_are_gathered_are_the_sum(
    size: int, dtype: torch.dtype, kind: Any
) -> None:
    near = {"rtol": 0.02, "atol": 0.05} if dtype is torch.bfloat16 else {}  # Gloo rounds each sum
    numels = (1, 100, 200_000)

    def body(world: World) -> list[list[Tensor]]:
        transport = TransportChoice(Membership.of(world.group), [CPU], kind).get()
        return [moved(transport, world, numel, dtype) for numel in numels]

    for numel, results in zip(numels, zip(*run_ranks(size, body), strict=True), strict=True):
        for number, turn in enumerate((0, 10)):
            wide = sum(
                values(rank + turn, numel, dtype).to(torch.complex128) for rank in range(size)
            )
            assert isinstance(wide, Tensor)
            expected = (wide if dtype.is_complex else wide.real).to(dtype)
            for got in results:
                torch.testing.assert_close(got[number], expected, **near)
                assert torch.equal(got[number], results[0][number])
                assert torch.equal(got[number + 2], got[number])


class Counting:
    """A transport of one's own, with the three methods and nothing else."""

    def __init__(self, group: Any) -> None:
        self._inner = C10d(group, "it is what this one uses")
        self.calls: list[str] = []

    def sum(self, flat: Tensor, what: str) -> Any:
        self.calls.append("sum")
        return self._inner.sum(flat, what)

    def gather(self, flat: Tensor, what: str) -> Any:
        return self._inner.gather(flat, what)

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        self.calls.append("copy")
        self._inner.copy(flat, root, what)


@pytest.mark.parametrize("size", [2, 3])
def test_an_object_with_the_four_methods_carries_the_gradients(size: int) -> None:
    def body(world: World) -> tuple[list[Tensor], str]:
        mine = Counting(world.group)
        options = DDPOptions(transport=mine)
        model = DistributedDataParallel(nn.Linear(7, 3), process_group=world.group, options=options)
        for _ in range(2):
            model.zero_grad()
            with model.weighted(2):
                model(torch.full((2, 7), world.rank + 1.0)).sum().backward()
        assert mine.calls == ["copy", "sum", "sum"]
        assert model._ddp_options is options
        return list(gradients(model).values()), model.transport

    for (weight, bias), told in run_ranks(size, body):
        assert told == "Counting"
        torch.testing.assert_close(weight, torch.full((3, 7), (size + 1) / 2))
        torch.testing.assert_close(bias, torch.ones(3))


def test_ranks_with_and_without_an_object_are_told_apart() -> None:
    def body(world: World) -> None:
        options = DDPOptions(transport=Counting(world.group)) if world.rank else DDPOptions()
        DistributedDataParallel(small(), process_group=world.group, options=options)

    with pytest.raises(DesyncError, match="Counting"):
        run_ranks(2, body)


@pytest.mark.parametrize("size", SIZES)
def test_any_rank_can_copy_to_the_others_whatever_the_size(size: int) -> None:
    numels = [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**20 + 3]

    def body(world: World) -> None:
        transport = shared(world)
        for turn, numel in enumerate(numels):
            root = turn % size
            generator = torch.Generator().manual_seed(turn)
            sent = torch.randint(256, (numel,), generator=generator, dtype=torch.uint8)
            mine = sent.clone() if world.rank == root else torch.zeros_like(sent)
            transport.copy(mine, root, "Copying")
            assert torch.equal(mine, sent)

    run_ranks(size, body)


def test_a_rank_that_leaves_is_named_at_once() -> None:
    def body(world: World) -> None:
        transport = shared(world)
        buckets = place(transport, [plan(10)], "Placing")
        (home,) = buckets.homes
        assert home is not None
        if world.rank != 1:
            buckets.start(0, home.zero_(), 1.0, "Step 5: the sum of bucket 0").wait()

    for rank, got in enumerate(run_ranks(3, body, return_exceptions=True)):
        if rank != 1:
            assert isinstance(got, PeerError)
            assert "Step 5" in str(got)
            assert "rank 1" in str(got).lower()


def test_a_rank_that_is_late_forever_is_named_at_the_groups_timeout() -> None:
    def body(world: World) -> str:
        transport = shared(world)
        buckets = place(transport, [plan(10)], "Placing")
        (home,) = buckets.homes
        assert home is not None
        if world.rank == 1:
            world.group.get_group_store().wait(["found"])
            return ""
        with pytest.raises(PeerError) as found:
            buckets.start(0, home.zero_(), 1.0, "A sum").wait()
        world.group.get_group_store().set("found", "yes")
        return str(found.value)

    message = run_ranks(2, body, timeout_s=3)[0]
    assert "waiting for rank 1: nothing arrived for 3 s" in message


def test_the_model_says_how_its_gradients_travel_and_why() -> None:
    def body(world: World) -> list[str]:
        kinds: list[Any] = [DDPOptions(), SHARED, OVER_C10D]
        return [
            DistributedDataParallel(small(), process_group=world.group, options=options).transport
            for options in kinds
        ]

    for told in run_ranks(2, body):
        assert told[0] == told[1] == "shared memory between the 2 ranks of this host"
        assert "asked for" in told[2]


def test_one_rank_that_wants_c10d_decides_for_all_but_not_over_one_that_insists() -> None:
    def mixed(world: World) -> str:
        options = OVER_C10D if world.rank else DDPOptions()
        return DistributedDataParallel(
            small(), process_group=world.group, options=options
        ).transport

    assert all("c10d" in told for told in run_ranks(2, mixed))

    def insisting(world: World) -> None:
        options = OVER_C10D if world.rank else SHARED
        DistributedDataParallel(small(), process_group=world.group, options=options)

    with pytest.raises(UsageError, match="asked for shared memory"):
        run_ranks(2, insisting)


@pytest.mark.parametrize("size", SIZES)
def test_a_copied_model_trains_over_shared_memory_as_well(size: int) -> None:
    import copy

    def body(world: World) -> str:
        model = DistributedDataParallel(small(), process_group=world.group)
        if world.rank == 0:
            copy.deepcopy(model)  # alone: nobody else takes part
        clone = copy.deepcopy(model)
        clone(torch.ones(2, 7)).sum().backward()
        return clone.transport

    assert all("shared memory" in told for told in run_ranks(size, body))


def test_training_many_models_one_after_the_other_leaves_no_descriptor_behind() -> None:
    def body(world: World) -> None:
        for _ in range(5):
            model = DistributedDataParallel(small(), process_group=world.group)
            for _ in range(2):
                model(torch.ones(2, 7)).sum().backward()

    run_ranks(2, body)
    before = len(os.listdir("/proc/self/fd"))
    run_ranks(2, body)
    assert len(os.listdir("/proc/self/fd")) <= before
