"""Shared memory where it is easily got wrong: odd parameters, errors, memory that others use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.errors import DesyncError, UsageError
from paceline.group import Membership
from paceline.testing import run_ranks
from paceline.transport import TransportChoice, place
from paceline.transport.interface import Flat
from paceline.transport.select import why_memory_cannot_be_shared

SHARED = DDPOptions(transport="shared_memory")
WIDTH = 100


def layers(count: int = 6) -> nn.Module:
    """Linear all the way: gradients are proportional to the input."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 10)
    return model


def step(model: nn.Module, scale: float) -> None:
    model(torch.full((2, WIDTH), scale)).sum().backward()


def expect_average(net: nn.Module, scale: float) -> None:
    """All gradients are those of an input of this scale."""
    alone = copy.deepcopy(net)
    alone.zero_grad()
    step(alone, scale)
    got = [param.grad for param in net.parameters()]
    torch.testing.assert_close(got, [param.grad for param in alone.parameters()])


class Odd(nn.Module):
    """Parameters without any element, which have buckets of their own by their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.none = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, 5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() + self.none.sum().float() + self.nothing.sum().float()


def test_parameters_without_elements_may_fill_a_bucket() -> None:
    def body(world: World) -> None:
        model = DistributedDataParallel(Odd(), process_group=world.group, options=SHARED)
        for turn in range(3):
            model.zero_grad()
            model(torch.full((1, 3), float(world.rank + turn))).backward()
            expected = torch.full((2, 3), 0.5 + turn)
            torch.testing.assert_close(model.module.linear.weight.grad, expected)

    run_ranks(2, body)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_right_again_after_a_mixture_of_weights_was_refused(size: int) -> None:
    """Sums that were under way when it was refused must not reach into the next step."""

    def body(world: World) -> None:
        net = layers()
        model = DistributedDataParallel(net, process_group=world.group, bucket_cap_mb=0.01)
        for turn in range(9):
            model.zero_grad()
            if turn % 3 == 2:
                with model.no_sync(), model.weighted(2):
                    step(model, 1.0)
                with pytest.raises(UsageError, match="some had none"):
                    step(model, 1.0)
                continue
            step(model, world.rank + 1.0)
            expect_average(net, (size + 1) / 2)

    run_ranks(size, body)


def test_misuse_of_weights_on_one_rank_is_told_to_the_others_at_once() -> None:
    def body(world: World) -> str:
        model = DistributedDataParallel(
            layers(), process_group=world.group, bucket_cap_mb=0.01, options=SHARED
        )
        for _ in range(3):
            model.zero_grad()
            step(model, 1.0)
        model.zero_grad()
        with model.no_sync(), model.weighted(2):
            step(model, 1.0)
        if world.rank == 0:
            with pytest.raises(UsageError, match="some had none"):
                step(model, 1.0)
        else:
            with model.weighted(2), pytest.raises(DesyncError, match="1 of 2 ranks"):
                step(model, 1.0)
        model.zero_grad()
        step(model, world.rank + 1.0)
        expect_average(model.module, 1.5)
        return ""

    run_ranks(2, body)


def test_a_weighted_gradient_that_was_zeroed_in_place_need_not_be_used_again() -> None:
    def body(world: World) -> None:
        net = layers(2)
        model = DistributedDataParallel(net, process_group=world.group, options=SHARED)
        for _ in range(3):
            with model.weighted(2):
                step(model, world.rank + 1.0)
            expect_average(net, 1.5 / 2)
            model.zero_grad(set_to_none=False)
            with model.weighted(2):
                model.module[0](torch.ones(2, WIDTH)).sum().backward()
            model.zero_grad(set_to_none=False)

    run_ranks(2, body)


def test_a_bucket_does_not_start_while_others_may_still_write_its_last_sum() -> None:

    def body(world: World) -> None:
        cpu = torch.device("cpu")
        transport = TransportChoice(Membership.of(world.group), [cpu], "shared_memory").get()
        buckets = place(transport, [Flat(9, torch.float32, cpu)], "Placing")
        (home,) = buckets.homes
        assert home is not None
        if world.rank == 0:
            buckets.start(0, home.zero_(), 1.0, "A sum")
            with pytest.raises(DesyncError, match="given up"):
                buckets.start(0, home.zero_(), 1.0, "Another sum")
        world.barrier()

    run_ranks(2, body)


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_a_bucket_comes_home_when_its_gradients_are_let_go(sets_to_none: bool) -> None:
    def body(world: World) -> list[bool]:
        model = DistributedDataParallel(layers(2), process_group=world.group, options=SHARED)
        step(model, 1.0)
        held = [param.grad for param in model.parameters()]
        model.zero_grad()
        step(model, 1.0)
        away = [bucket.buffer is bucket.home for bucket in model.reducer.buckets]
        assert not any(away)
        del held
        model.zero_grad(set_to_none=sets_to_none)
        step(model, world.rank + 1.0)
        expect_average(model.module, 1.5)
        return [bucket.buffer is bucket.home for bucket in model.reducer.buckets]

    assert all(all(homes) for homes in run_ranks(2, body))


def test_a_gradient_given_to_another_process_takes_its_memory_along_and_sums_stay_right() -> None:
    """Sharing a tensor moves its storage, which is the bucket's, out of the segment."""

    def body(world: World) -> None:
        net = layers(2)
        model = DistributedDataParallel(net, process_group=world.group, options=SHARED)
        for turn in range(4):
            model.zero_grad()
            step(model, world.rank + 1.0)
            expect_average(net, 1.5)
            if turn == 1 and world.rank == 0:
                grad = net[0].weight.grad
                assert grad is not None
                grad.share_memory_()
                del grad

    run_ranks(2, body)


def test_a_model_first_used_in_inference_mode_can_be_trained() -> None:
    def body(world: World) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        # A copy: it finds its transport in its first forward pass, not when it is wrapped.
        model = copy.deepcopy(
            DistributedDataParallel(net, process_group=world.group, options=SHARED)
        )
        with torch.inference_mode():
            model(torch.ones(2, 3))
        for turn in range(4):
            model(torch.arange(12.0).view(4, 3) + turn).sum().backward()

    run_ranks(2, body)


def test_a_rank_that_had_to_learn_again_stays_in_step_with_the_others() -> None:
    """A gradient that came too often makes one rank forget how gradients come."""

    def body(world: World) -> None:
        net = layers()
        model = DistributedDataParallel(net, process_group=world.group, bucket_cap_mb=0.01)
        for turn in range(5):
            if turn == 2 and world.rank == 0:
                model.reducer._layout.unlearn()
            model.zero_grad()
            step(model, world.rank + 1.0)
            expect_average(net, 1.5)

    run_ranks(2, body)


def test_where_processes_cannot_be_watched_memory_is_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbid(_pid: int) -> Any:
        raise PermissionError(1, "Operation not permitted")

    assert why_memory_cannot_be_shared() is None
    monkeypatch.setattr("os.pidfd_open", forbid)
    assert "cannot be watched" in (why_memory_cannot_be_shared() or "")


@pytest.mark.parametrize("capacity", [0, -1, float("nan"), float("inf")])
def test_a_capacity_that_no_bucket_can_have_is_refused(capacity: float) -> None:
    def body(world: World) -> None:
        DistributedDataParallel(nn.Linear(2, 2), process_group=world.group, bucket_cap_mb=capacity)

    with pytest.raises(UsageError, match="positive and finite"):
        run_ranks(2, body)
