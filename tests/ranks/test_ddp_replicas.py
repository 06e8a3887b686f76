"""Gradients that were rebound, parameters that were replaced, replicas that differ: noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sentences import says
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.ddp.fingerprint import EVERY, PERIOD
from paceline.errors import DesyncError, HookError, ReplicaError, UsageError
from paceline.testing import run_ranks, seeded

TRANSPORTS = ["shared_memory", "c10d"]


def square(seed: int = 0) -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)), seed)


def wrap(world: World, net: nn.Module, transport: str = "auto", **arguments: Any) -> Any:
    options = DDPOptions(transport=transport)
    return DistributedDataParallel(
        net, process_group=world.group, options=options, bucket_cap_mb=1e-5, **arguments
    )


def rows(world: World) -> Tensor:
    return torch.full((2, 3), float(world.rank + 1))


def copies(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def plain(
    size: int, change: Callable[[nn.Module], None], clear: Callable[[nn.Module], None]
) -> Any:
    """What torch computes in one process: the mean of the ranks' gradients, changed alike."""
    net = square()
    for step in range(4):
        before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        for rank in range(size):
            (net(torch.full((2, 3), float(rank + 1))).square().mean() / size).backward()
        for param, old in zip(net.parameters(), before, strict=True):
            param.grad = param.grad if old is None or param.grad is None else param.grad + old
        if step < 3:
            change(net)
            clear(net)
    return copies(param.grad for param in net.parameters())


def halve(net: nn.Module) -> None:
    for param in net.parameters():
        param.grad.data = param.grad.data * 0.5  # type: ignore[union-attr]


def halve_and_hold(net: Any) -> None:
    net.held = [param.grad.data for param in net.parameters()]
    halve(net)


def set_storage(net: nn.Module) -> None:
    for param in net.parameters():
        param.grad.set_(param.grad.clone())  # type: ignore[union-attr,arg-type]


def transpose(net: nn.Module) -> None:
    for param in net.parameters():
        param.grad.data = param.grad.data.t()  # type: ignore[union-attr]


def exchange(net: nn.Module) -> None:
    first, second, *_ = (param for param in net.parameters() if param.dim() == 2)
    first.grad.data, second.grad.data = second.grad.data, first.grad.data  # type: ignore[union-attr]


def apply_clone(net: nn.Module) -> None:
    net._apply(lambda tensor: tensor.clone())


def to_none(net: nn.Module) -> None:
    net.zero_grad()


def to_zero(net: nn.Module) -> None:
    net.zero_grad(set_to_none=False)


def keep(net: nn.Module) -> None:
    """Accumulate onto what is there."""


@pytest.mark.parametrize(
    ("change", "clear", "transport"),
    [
        (change, clear, TRANSPORTS[(number + turn) % 2])
        for number, change in enumerate(
            [halve, halve_and_hold, set_storage, transpose, exchange, apply_clone]
        )
        for turn, clear in enumerate([to_none, to_zero, keep])
    ],
)
def test_a_gradient_whose_storage_was_rebound_is_averaged(
    change: Callable[[nn.Module], None], clear: Callable[[nn.Module], None], transport: str
) -> None:
    def body(world: World) -> list[Tensor]:
        model = wrap(world, square(), transport)
        for step in range(4):
            model(rows(world)).square().mean().backward()
            if step < 3:
                change(model.module)
                clear(model.module)
        return copies(param.grad for param in model.parameters())

    for size in (2, 3):
        for got in run_ranks(size, body):
            torch.testing.assert_close(got, plain(size, change, clear))


def scale_in_place(param: Tensor) -> None:
    param.grad.mul_(param.grad.abs())  # type: ignore[union-attr]


def scale_storage(param: Tensor) -> None:
    param.grad.data = param.grad.data * param.grad.abs()  # type: ignore[union-attr]


def scale_anew(param: Tensor) -> None:
    param.grad = param.grad * param.grad.abs()  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("is_bypassed", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("scale", [scale_in_place, scale_storage, scale_anew])
def test_what_a_hook_makes_of_a_gradient_is_averaged(
    scale: Callable[[Tensor], None], steps_before: int, is_bypassed: bool, transport: str
) -> None:
    def body(world: World) -> list[Tensor]:
        model = wrap(world, square(), transport)
        for step in range(5):
            if step == steps_before:
                for param in model.parameters():
                    param.register_post_accumulate_grad_hook(scale)
            model.zero_grad()
            forward = model.module if is_bypassed else model
            forward(rows(world)).square().mean().backward()
        return copies(param.grad for param in model.parameters())

    expected = [torch.zeros_like(param) for param in square().parameters()]
    for rank in range(2):
        net = square()
        net(torch.full((2, 3), float(rank + 1))).square().mean().backward()
        for mean, param in zip(expected, net.parameters(), strict=True):
            scale(param)
            mean += param.grad / 2  # type: ignore[operator]
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, expected)


class Opaque:
    """An output that nobody can look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return Opaque(super().forward(input))


def assign_all(net: nn.Module) -> None:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)


def replace_weight(net: Any) -> None:
    net.weight = nn.Parameter(net.weight.detach().clone())


def replace_behind_the_back(net: Any) -> None:
    """Without a word to torch, while somebody holds the old one and its gradient."""
    net.held = [net.weight]
    net._parameters["weight"] = nn.Parameter(net.weight.detach().clone())


@pytest.mark.parametrize("layer", [nn.Linear, Hiding])
@pytest.mark.parametrize("replace", [assign_all, replace_weight, replace_behind_the_back])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_replaced_after_wrapping_are_refused_in_the_next_step(
    replace: Callable[[Any], None], layer: type[nn.Linear], transport: str
) -> None:
    def body(world: World) -> None:
        model = wrap(world, seeded(layer(3, 3, bias=False), 0), transport)
        loss = lambda out: getattr(out, "value", out).sum()  # noqa: E731
        loss(model(rows(world))).backward()
        replace(model.module)
        loss(model(rows(world))).backward()
        loss(model(rows(world)))

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert "'weight' was added or replaced" in str(error)


def flip_sign(weight: Tensor) -> None:
    weight[1, 2] *= -1


def flip_two_signs(weight: Tensor) -> None:
    weight[1, 1:] *= -1


def last_bit(weight: Tensor) -> None:
    weight.view(torch.int32)[2, 0] += 1


def swap_rows(weight: Tensor) -> None:
    weight.copy_(weight.flip(0))


def train(model: Any, world: World, steps: int, damage: Callable[[], None] | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        if step == 3 and damage is not None:
            damage()
        optimizer.zero_grad()
        model(rows(world)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("damage", [flip_sign, flip_two_signs, last_bit, swap_rows])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_parameter_that_differs_on_one_rank_is_named_with_it_on_all(
    damage: Callable[[Tensor], None], transport: str, size: int
) -> None:
    def body(world: World) -> None:
        model = wrap(world, square(), transport)
        is_odd = world.rank == world.size - 1
        damaged = model.module[1].weight.data
        train(model, world, PERIOD, (lambda: damage(damaged)) if is_odd else None)

    for error in run_ranks(size, body, return_exceptions=True):
        assert isinstance(error, ReplicaError)
        assert says(str(error), f"'1.weight' on rank {size - 1}", "not what it", "on rank 0")
        assert f"on rank {size - 1} and " in str(error)


def test_a_layer_that_was_dropped_after_wrapping_is_no_difference() -> None:
    def body(world: World) -> None:
        model = wrap(world, square())
        model.module[1] = nn.Identity()
        train(model, world, PERIOD)

    run_ranks(2, body)


def test_a_parameter_that_differs_is_named_with_torchs_own_hooks_too() -> None:
    def body(world: World) -> None:
        model = wrap(world, square())
        model.register_comm_hook(world.group, default_hooks.allreduce_hook)
        weight = model.module[1].weight.data
        train(model, world, PERIOD, (lambda: flip_sign(weight)) if world.rank else None)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, ReplicaError)


def test_a_parameter_may_differ_where_it_is_nobodys_business() -> None:
    def ignored(world: World) -> Any:
        net = square()
        wrapper: Any = DistributedDataParallel
        wrapper._set_params_and_buffers_to_ignore_for_model(net, ["2.weight"])
        return wrap(world, net), net[2].weight

    def with_a_hook(world: World) -> Any:
        model = wrap(world, square())
        model.register_comm_hook(world.group, lambda g, b: default_hooks.allreduce_hook(g, b))
        return model, model.module[1].weight

    def by_option(world: World) -> Any:
        options = DDPOptions(compare_parameters=False)
        model = DistributedDataParallel(square(), process_group=world.group, options=options)
        return model, model.module[1].weight

    def body(world: World, make: Callable[[World], Any]) -> None:
        model, weight = make(world)
        train(model, world, PERIOD, lambda: weight.data.add_(float(world.rank)))

    for make in (ignored, with_a_hook, by_option):
        run_ranks(2, lambda world, make=make: body(world, make))


@pytest.mark.parametrize("size", [2, 3])
def test_moving_away_from_the_parameters_for_one_average_as_sam_does_is_no_difference(
    size: int,
) -> None:
    def body(world: World) -> list[Tensor]:
        model = wrap(world, square())
        for _ in range(2 * EVERY):
            with model.no_sync():
                model(rows(world)).square().mean().backward()
            before = copies(model.parameters())
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(param.grad, alpha=0.01)  # another way on every rank
            model.zero_grad()
            model(rows(world)).square().mean().backward()
            with torch.no_grad():
                for param, old in zip(model.parameters(), before, strict=True):
                    param.copy_(old).sub_(param.grad, alpha=0.01)
            model.zero_grad()
        return copies(model.parameters())

    first, *others = run_ranks(size, body)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_local_steps_between_averages_of_the_parameters_are_no_difference() -> None:
    def body(world: World) -> None:
        model = wrap(world, square())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(PERIOD // 4):
            for _ in range(3):
                with model.no_sync():
                    model(rows(world)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            for param in model.parameters():
                world.group.allreduce([param.data]).wait()
                param.data /= world.size
            model(rows(world)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(2, body)


@pytest.mark.parametrize("is_visible", [True, False])
def test_an_optimizer_stepped_by_a_hook_inside_backward_is_refused(is_visible: bool) -> None:
    """One that changes parameters behind autograd's back is found by the fingerprint."""

    def body(world: World) -> None:
        model = wrap(world, square())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def update(param: Tensor) -> None:
            if is_visible:
                optimizer.step()
            else:
                param.data.add_(param.grad, alpha=-0.1)  # type: ignore[arg-type]
            param.grad = None

        hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
        try:
            for _ in range(PERIOD):
                model(rows(world)).square().mean().backward()
        finally:
            for hook in hooks:
                hook.remove()

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, UsageError if is_visible else ReplicaError)
        if is_visible:
            assert "updated inside backward" in str(error)


def test_a_second_communication_hook_is_refused() -> None:
    def body(world: World) -> None:
        model = wrap(world, square())
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        model.register_comm_hook(None, default_hooks.allreduce_hook)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, HookError)


@pytest.mark.parametrize("layer", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_without_shapes_is_refused(layer: nn.Module, size: int) -> None:
    def body(world: World) -> None:
        wrap(world, nn.Sequential(nn.Linear(2, 2), layer))

    for error in run_ranks(size, body, return_exceptions=True):
        assert isinstance(error, UsageError)
        assert "uninitialized parameters" in str(error)  # as torch says it


def test_other_strides_on_one_rank_are_refused() -> None:
    def body(world: World) -> None:
        net = nn.Conv2d(4, 4, 2)
        wrap(world, net.to(memory_format=torch.channels_last) if world.rank else net)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert "strides" in str(error)


class Filling(nn.Linear):
    """Has a buffer only when it has run."""

    def __init__(self, *, is_declared: bool) -> None:
        super().__init__(3, 3)
        if is_declared:
            self.register_buffer("seen", None)

    def forward(self, input: Tensor) -> Tensor:
        if getattr(self, "seen", None) is None:
            self.register_buffer("seen", input.mean().detach())
        return super().forward(input)


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_buffer_that_appears_in_forward_is_broadcast(is_declared: bool, transport: str) -> None:
    def body(world: World) -> float:
        model = wrap(world, Filling(is_declared=is_declared), transport)
        for _ in range(2):
            model(rows(world)).sum().backward()
        return float(model.module.seen)

    assert run_ranks(2, body) == [1.0, 1.0]


def test_a_forward_pass_that_one_rank_alone_made_does_not_give_others_stale_buffers() -> None:
    def body(world: World) -> None:
        model = wrap(world, seeded(nn.BatchNorm1d(3), 0), "shared_memory")
        if world.rank == 0:
            model(rows(world))
        for _ in range(2):
            model(rows(world)).sum().backward()

    error = run_ranks(2, body, return_exceptions=True)[1]
    assert isinstance(error, DesyncError)
    assert "rank 0 sent 3 with 7 elements at step 0" in str(error)


def test_the_mesh_that_was_passed_is_an_attribute() -> None:
    def body(world: World) -> None:
        assert wrap(world, square()).device_mesh is None

    run_ranks(2, body)
    assert not dist.is_initialized()


def test_a_model_that_evaluates_on_one_rank_alone_is_named_with_it_on_all() -> None:
    def body(world: World) -> None:
        model = wrap(world, square())
        for step in range(PERIOD):
            if step == 2 and world.rank == 1:
                model.eval()
            model(rows(world)).mean().backward()

    for error in run_ranks(3, body, return_exceptions=True):
        assert isinstance(error, DesyncError), error
        assert says(str(error), "evaluation mode on rank 1", "model.train()")
