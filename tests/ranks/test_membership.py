"""A training that continues on another process group, of the same ranks or of fewer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.comm import Membership
from paceline.errors import UsageError
from paceline.testing import gradients, run_ranks
from paceline.testing.ranks import gloo_group
from paceline.transport.c10d import C10d

ROWS = torch.randn(24, 5, generator=torch.Generator().manual_seed(2))
TIMEOUT_S = 20.0


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


def test_a_transport_object_does_not_outlive_its_group() -> None:
    def body(world: World) -> None:
        options = DDPOptions(transport=C10d(world.group, "of one's own"))
        model = DistributedDataParallel(build(), process_group=world.group, options=options)
        train(model, world.rank, 2)
        model.membership.move_on(next_group(world, 1, 2))
        with pytest.raises(UsageError, match="a process group that was left"):
            train(model, world.rank, 2)

    run_ranks(2, body)
