"""Loops around an update that is shared out: what people do to gradients, parameters and state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from paceline import DistributedDataParallel, World, shard_update
from paceline.errors import DesyncError, PacelineError, PeerError, UsageError
from paceline.testing import assert_replicas_equal, run_ranks, seeded

ROWS = 12
X = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """A model of which a part can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(6, 90), nn.Linear(90, 90), nn.Linear(90, 3)
        self.uses_spare = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.uses_spare:
            x = x + self.spare(x)
        out: Tensor = self.last(x)
        return out


class Loop:
    """One rank's training, whole or shared out, so that both can be compared step by step."""

    def __init__(
        self,
        world: World,
        shards: bool,
        make: Callable[[Any], optim.Optimizer] | None = None,
        prepare: Callable[[Branches], None] = lambda _: None,
        elementwise: bool | None = None,
    ) -> None:
        self.world = world
        module = seeded(Branches())
        prepare(module)
        self.model = DistributedDataParallel(module, process_group=world.group, bucket_cap_mb=0.02)
        self.optimizer = make(self.model) if make else optim.AdamW(self.model.parameters(), lr=0.01)
        if shards:
            shard_update(self.model, self.optimizer, elementwise=elementwise)

    def backward(self) -> None:
        self.model(X[self.world.rank :: self.world.size]).square().mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def params(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


def clipped(loop: Loop) -> None:
    for limit in (0.01, 1e-4, 10.0):
        loop.optimizer.zero_grad()
        loop.backward()
        clip_grad_norm_(loop.model.parameters(), limit)
        clip_grad_value_(loop.model.parameters(), limit / 3)
        loop.optimizer.step()


def replaced_gradients(loop: Loop) -> None:
    for _ in range(3):
        loop.optimizer.zero_grad()
        loop.backward()
        for param in loop.model.parameters():
            assert param.grad is not None
            param.grad = param.grad.sign() * 0.5
        loop.optimizer.step()


def accumulated(loop: Loop) -> None:
    for _ in range(3):
        loop.optimizer.zero_grad()
        with loop.model.no_sync():
            loop.backward()
        loop.backward()
        loop.optimizer.step()


def branches(loop: Loop) -> None:
    for step in range(6):
        loop.model.module.uses_spare = step % 3 > 0
        loop.step()


def unfrozen_later(loop: Loop) -> None:
    loop.model.module.spare.requires_grad_(False)
    loop.step()
    loop.model.module.spare.requires_grad_(True)
    loop.step()
    loop.step()


def scheduled(loop: Loop) -> None:
    scheduler = optim.lr_scheduler.OneCycleLR(loop.optimizer, 0.1, total_steps=5)
    for _ in range(4):
        loop.step()
        scheduler.step()


def closure(loop: Loop) -> None:
    def evaluate() -> float:
        loop.optimizer.zero_grad()
        loop.backward()
        return 0.5

    for _ in range(3):
        assert loop.optimizer.step(evaluate) == 0.5


def scaled(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(4):
        loop.optimizer.zero_grad()
        loss = loop.model(X[loop.world.rank :: loop.world.size]).square().mean()
        if step == 1:
            loss = loss * float("inf")  # skipped, on every rank
        scaler.scale(loss).backward()
        if step == 2:
            scaler.unscale_(loop.optimizer)
            clip_grad_norm_(loop.model.parameters(), 0.01)
        scaler.step(loop.optimizer)
        scaler.update()


def parameters_changed_by_hand(loop: Loop) -> None:
    first = loop.model.module.first.weight
    loop.step()
    with torch.no_grad():
        first.mul_(0.5)
    loop.step()
    first.data = first.data * 2  # lives elsewhere from now on
    loop.step()
    loop.model.load_state_dict({n: t * 0.9 for n, t in copy.deepcopy(loop.params()).items()})
    loop.step()
    average = optim.swa_utils.AveragedModel(loop.model.module)
    average.update_parameters(loop.model.module)
    assert_replicas_equal([dict(average.module.state_dict()), loop.params()])


def added_group(loop: Loop) -> None:
    loop.step()
    group = loop.optimizer.param_groups.pop()
    loop.step()
    loop.optimizer.add_param_group(group)
    loop.step()


def state_cleared_and_loaded(loop: Loop) -> None:
    loop.step()
    saved = copy.deepcopy(loop.optimizer.state_dict())
    loop.step()
    loop.optimizer.load_state_dict(saved)
    loop.step()


def groups(model: nn.Module) -> optim.Optimizer:
    named = dict(model.named_parameters())
    return optim.AdamW(
        [
            {"params": [p for n, p in named.items() if "bias" in n], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if "bias" not in n], "lr": 0.02},
        ],
        lr=0.01,
        foreach=True,
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("train", "make"),
    [
        *((train, None) for train in (clipped, replaced_gradients, accumulated, branches)),
        *((train, None) for train in (closure, scaled, parameters_changed_by_hand)),
        *((train, groups) for train in (scheduled, unfrozen_later, added_group)),
        (state_cleared_and_loaded, groups),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_loop_gives_the_parameters_of_the_whole_update(
    train: Callable[[Loop], None], make: Any, size: int
) -> None:
    def body(world: World) -> list[dict[str, Tensor]]:
        ends = []
        for shards in (False, True):
            loop = Loop(world, shards, make)
            train(loop)
            ends.append(loop.params())
        return ends

    ranks = run_ranks(size, body)
    assert_replicas_equal([end for ends in ranks for end in ends])


@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 2), (1, 3), (2, 4)])
def test_a_state_saved_at_one_size_is_loaded_at_another_shared_out_or_not(
    before: int, after: int
) -> None:
    def save(world: World) -> tuple[Any, Any]:
        loop = Loop(world, shards=True, make=groups)
        loop.step()
        loop.step()
        return loop.params(), copy.deepcopy(loop.optimizer.state_dict())

    params, state = run_ranks(before, save)[-1]

    def go_on(world: World, shards: bool) -> dict[str, Tensor]:
        loop = Loop(world, shards, make=groups)
        loop.model.load_state_dict(params)
        loop.optimizer.load_state_dict(copy.deepcopy(state))
        loop.step()
        loop.step()
        return loop.params()

    assert_replicas_equal([*run_ranks(after, go_on, True), *run_ranks(after, go_on, False)])


@pytest.mark.parametrize("make", [optim.NAdam, optim.ASGD, optim.AdamW])
def test_parameters_without_dimensions_load_the_state_that_they_saved(make: Any) -> None:
    def body(world: World, shards: bool) -> dict[str, Tensor]:
        def add_numbers(module: Branches) -> None:
            module.numbers = nn.ParameterList([nn.Parameter(torch.tensor(n)) for n in (0.5, 2.0)])
            module.forward = lambda x: module.numbers[0] * module.first(x) + module.numbers[1]  # type: ignore[method-assign]

        loop = Loop(world, shards, lambda m: make(m.parameters()), add_numbers)
        state_cleared_and_loaded(loop)
        return loop.params()

    assert_replicas_equal([*run_ranks(2, body, True), *run_ranks(2, body, False)])


@pytest.mark.parametrize("size", [2, 3])
def test_the_optimizer_keeps_state_for_its_share_alone(size: int) -> None:
    def body(world: World) -> tuple[int, int]:
        loop = Loop(world, shards=True)
        loop.step()
        states = loop.optimizer.state.values()
        kept = sum(t.numel() for state in states for t in state.values() if isinstance(t, Tensor))
        return kept, 2 * sum(param.numel() for param in loop.model.parameters())

    for kept, whole in run_ranks(size, body):
        assert kept <= whole / size * 1.05 + 512


def test_parameters_are_saved_and_copied_without_the_buffer_that_they_live_in() -> None:
    def body(world: World) -> None:
        loop = Loop(world, shards=True)
        loop.step()
        for param in loop.model.parameters():
            assert param.untyped_storage().nbytes() == param.numel() * 4
            assert param.data_ptr() % 64 == 0

    run_ranks(2, body)


def test_a_state_that_one_rank_asks_for_alone_is_an_error_and_no_wait() -> None:
    def body(world: World) -> None:
        loop = Loop(world, shards=True)
        loop.step()
        if world.rank == 0:
            loop.optimizer.state_dict()
        loop.step()

    errors = run_ranks(3, body, return_exceptions=True)
    assert isinstance(errors[0], DesyncError)
    assert "needs all ranks, but rank" in str(errors[0])
    assert all(isinstance(error, PeerError) for error in errors[1:])


def test_a_hook_that_would_see_shares_is_refused_and_one_from_before_sees_all() -> None:
    def body(world: World) -> None:
        seen: list[int] = []
        loop = Loop(world, shards=False)
        loop.optimizer.register_step_pre_hook(
            lambda each, *_: seen.append(sum(p.numel() for p in each.param_groups[0]["params"]))
        )
        shard_update(loop.model, loop.optimizer)
        loop.step()
        assert seen == [sum(param.numel() for param in loop.model.parameters())]
        loop.optimizer.register_step_pre_hook(lambda *_: None)
        with pytest.raises(UsageError):
            loop.step()

    run_ranks(2, body)


def test_backward_through_parameters_that_were_stepped_since_is_refused_as_in_torch() -> None:
    def body(world: World) -> None:
        loop = Loop(world, shards=True)
        loop.step()
        loss = loop.model(X).square().mean()
        loop.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_ranks(2, body)


class Trust(optim.SGD):
    """As LARS: the step's length depends on the whole tensor's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data -= group["lr"] * param.grad / (param.grad.norm() + 1)


class Lion(optim.Optimizer):
    """Elementwise, and nobody has heard of it."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    param -= group["lr"] * (average * 0.9 + param.grad * 0.1).sign()
                    average.mul_(0.99).add_(param.grad, alpha=0.01)


class Tuned(optim.AdamW):
    """A subclass of what is known may do anything."""


@pytest.mark.parametrize(
    ("make", "elementwise"),
    [(Lion, True), (lambda p: Trust(p, lr=0.1), False)],
    ids=["elements", "tensors"],
)
def test_an_optimizer_that_is_not_known_is_shared_out_by_the_users_word(
    make: Any, elementwise: bool
) -> None:
    def body(world: World) -> list[dict[str, Tensor]]:
        loops = [
            Loop(world, shards, lambda m: make(m.parameters()), elementwise=elementwise)
            for shards in (False, True)
        ]
        for loop in loops:
            for _ in range(3):
                loop.step()
        return [loop.params() for loop in loops]

    for ends in run_ranks(3, body):
        assert_replicas_equal(ends)


def bad_lbfgs(loop: Loop) -> None:
    shard_update(loop.model, optim.LBFGS(loop.model.parameters()))


def bad_subclass(loop: Loop) -> None:
    shard_update(loop.model, Tuned(loop.model.parameters()))


def bad_order(loop: Loop) -> None:
    shard_update(loop.model.module, loop.optimizer)


def bad_late(loop: Loop) -> None:
    loop.step()
    shard_update(loop.model, loop.optimizer)


def bad_twice(loop: Loop) -> None:
    shard_update(loop.model, loop.optimizer)
    shard_update(loop.model, optim.SGD(loop.model.parameters(), lr=0.1))


def bad_stranger(loop: Loop) -> None:
    strange = [*loop.model.parameters(), nn.Parameter(torch.ones(3))]
    shard_update(loop.model, optim.SGD(strange, lr=0.1))


def bad_some(loop: Loop) -> None:
    shard_update(loop.model, optim.SGD(loop.model.module.first.parameters(), lr=0.1))


def bad_kind(loop: Loop) -> None:
    kind = optim.SGD if loop.world.rank == 1 else optim.AdamW
    shard_update(loop.model, kind(loop.model.parameters(), lr=0.1))


def bad_rates(loop: Loop) -> None:
    rate = 0.1 + loop.world.rank
    shard_update(loop.model, optim.SGD(loop.model.parameters(), lr=rate))


def bad_on_one(loop: Loop) -> None:
    params = loop.model.module.first.parameters() if loop.world.rank else loop.model.parameters()
    shard_update(loop.model, optim.SGD(params, lr=0.1))


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (bad_lbfgs, "LBFGS calls"),
        (bad_subclass, "Tuned"),
        (bad_order, "given a Branches"),
        (bad_late, "has been trained before"),
        (bad_twice, "shared out already"),
        (bad_stranger, r"1 parameters .* \(3,\)"),
        (bad_some, "lacks 4 .*'spare.weight'"),
        (bad_kind, "different optimizers"),
        (bad_rates, "different optimizers"),
        (bad_on_one, "lacks 4 "),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_mistake_is_an_error_on_every_rank_and_changes_nothing(
    misuse: Callable[[Loop], None], words: str
) -> None:
    def body(world: World) -> None:
        loop = Loop(world, shards=False)
        before = loop.params()
        with pytest.raises(PacelineError, match=words) as caught:
            misuse(loop)
        assert isinstance(caught.value, DesyncError | ValueError)
        if misuse is not bad_late:
            assert_replicas_equal([before, loop.params()])
        loop.step()

    run_ranks(2, body)
