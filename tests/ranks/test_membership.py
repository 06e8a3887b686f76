"""A training that continues on another process group, of the same ranks or of fewer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.ddp import NaiveEngine
from paceline.errors import NotFiniteError, UsageError
from paceline.group import Membership, NoGroup, broadcast
from paceline.testing import gradients, run_ranks, seeded
from paceline.testing.ranks import gloo_group
from paceline.transport.interface import C10d
from paceline.update import FiniteCheck, Loss

ROWS = torch.randn(24, 5, generator=torch.Generator().manual_seed(2))
TIMEOUT_S = 60.0


def build() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 3)
    return model.eval()  # so that rows do not depend on each other


def next_group(world: World, generation: int, size: int) -> Any:
    store = PrefixStore(f"generation {generation}", world.group.get_group_store())
    return gloo_group(store, world.rank, size, TIMEOUT_S)


def update(model: nn.Module) -> list[Tensor]:
    found = [grad.clone() for grad in gradients(model).values()]
    with torch.no_grad():
        for param, grad in zip(model.parameters(), found, strict=True):
            param.sub_(grad, alpha=0.01)
    return found


def train(model: DistributedDataParallel, rank: int, size: int) -> list[Tensor]:
    """One step on this rank's rows of the whole batch, and its gradients."""
    model.zero_grad()
    rows = ROWS[rank::size]
    with model.weighted(len(rows)):
        model(rows).square().sum().backward()
    return update(model)


def train_alone(steps: int) -> list[Tensor]:
    """The gradients of the last step in one process on the whole batch."""
    model = build()
    for _ in range(steps):
        model.zero_grad()
        (model(ROWS).square().sum() / len(ROWS)).backward()
        found = update(model)
    return found


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@pytest.mark.parametrize(
    "sizes", [[2, 2], [3, 3, 3], [3, 2], [3, 2, 1]], ids=lambda sizes: "-".join(map(str, sizes))
)
def test_the_same_model_trains_on_in_another_group(sizes: list[int], transport: str) -> None:
    def body(world: World) -> list[Tensor] | None:
        membership = Membership(world.group)
        options = DDPOptions(transport=transport, check_every=2)
        model = DistributedDataParallel(
            build(), process_group=membership, bucket_cap_mb=0.0005, options=options
        )
        for generation, size in enumerate(sizes):
            if world.rank >= size:
                return None
            if generation:
                membership.move_on(next_group(world, generation, size))
            assert (membership.size, membership.generation) == (size, generation)
            for _ in range(4):
                found = train(model, world.rank, size)
            expected = transport.replace("_", " ") if size > 1 else "a world of one"
            assert expected in model.transport
        return found

    whole = train_alone(4 * len(sizes))
    results = run_ranks(sizes[0], body, timeout_s=TIMEOUT_S)
    assert sum(got is not None for got in results) == sizes[-1]
    for got in results:
        if got is not None:
            torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)


class Crossed(nn.Module):
    """Layers that are called in another order than they are defined in."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in order)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x).tanh()
        return x


@pytest.mark.parametrize("order", [[1, 0, 3, 2, 5, 4], [2, 0, 1, 5, 3, 4]])
@pytest.mark.parametrize("capacity_mb", [0.0002, 0.0004])
def test_a_rank_that_has_learned_an_order_agrees_with_one_that_is_new(
    order: list[int], capacity_mb: float
) -> None:
    """In a bucket both expect the same gradients, and each would put them where it likes."""
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def wrap(membership: Membership) -> DistributedDataParallel:
        net = seeded(Crossed(order))
        return DistributedDataParallel(net, process_group=membership, bucket_cap_mb=capacity_mb)

    def body(world: World) -> dict[str, Tensor | None]:
        membership = Membership(world.group)
        model = wrap(membership)
        for generation in range(2):
            if generation:
                if world.rank == 1:  # replaced
                    membership = Membership(NoGroup())
                    model = wrap(membership)
                membership.move_on(next_group(world, 1, world.size))
                model.identity = 7
            for step in range(3):
                model.zero_grad()
                model.begin_step(step)
                model(rows[world.rank :: 2]).square().mean().backward()
        return gradients(model)

    whole = seeded(Crossed(order))
    whole(rows).square().mean().backward()
    for got in run_ranks(2, body):
        torch.testing.assert_close(got, gradients(whole))


def test_all_models_of_a_group_have_one_membership_and_move_on_together() -> None:
    def body(world: World) -> None:
        models = [DistributedDataParallel(build(), process_group=world.group) for _ in range(2)]
        membership = models[0].membership
        assert models[1].membership is membership
        membership.move_on(next_group(world, 1, world.size))
        for model in models:
            assert model.process_group is membership.group
            train(model, world.rank, world.size)

    run_ranks(2, body)


def test_an_engine_made_of_a_world_that_was_left_is_in_the_next_group() -> None:
    """As the one of a replacement is: before it is let in, its world is itself."""

    def body(world: World) -> None:
        membership = Membership.of(world.group)
        membership.leave()
        engine = NaiveEngine(build(), world)
        assert engine.membership is membership
        membership.move_on(next_group(world, 1, world.size))
        engine(ROWS[world.rank :: world.size]).sum().backward()
        mine = torch.cat([grad.flatten() for grad in gradients(engine).values()])
        other = mine.clone()
        broadcast(membership.group, other, 0, "test")
        assert torch.equal(mine, other)

    run_ranks(2, body)


def test_a_transport_object_does_not_outlive_its_group() -> None:
    def body(world: World) -> None:
        options = DDPOptions(transport=C10d(world.group, "of one's own"))
        model = DistributedDataParallel(build(), process_group=world.group, options=options)
        train(model, world.rank, 2)
        model.membership.move_on(next_group(world, 1, 2))
        # Nobody leaves while another one still connects.
        broadcast(model.membership.group, torch.zeros(1), 0, "test")
        with pytest.raises(UsageError, match="a process group that was left"):
            train(model, world.rank, 2)

    run_ranks(2, body)


def test_a_nan_found_late_is_an_error_where_a_newcomer_cannot_be_asked() -> None:
    """On a GPU a step is looked at one step later; by then another generation may have begun."""

    def body(world: World) -> bool:
        members = Membership.of(world.group)
        members.word_device = torch.device("cpu")
        weight = nn.Parameter(torch.ones(2))
        check = FiniteCheck([("weight", weight)], members, is_complete=False, is_saved=False)
        check.is_late = True  # as where the parameters are on a device
        weight.grad = torch.full((2,), float("nan"))
        check.check(1, [Loss(torch.tensor(float("nan")), world.rank, [3])], None)
        assert not weight.grad.any()  # what the optimizer sees
        members.move_on(next_group(world, 1, 3))
        # Nobody leaves while another one still connects.
        broadcast(members.group, torch.zeros(1), 0, "test")
        if world.rank == 2:  # has come only now
            check = FiniteCheck([("weight", weight)], members, is_complete=False, is_saved=False)
        check.forget(2)  # the step in which the other worker was lost
        try:
            check.check(2, [], None)
        except NotFiniteError as error:
            return says(str(error), f"rank {world.rank}")
        return False

    assert run_ranks(3, body) == [True, True, False]
