"""torch's own communication hooks and its `Join` context, which need a default process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.join import Join

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.testing import assert_replicas_equal, gradients, run_processes, seeded

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


def small() -> nn.Sequential:
    return seeded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), 0)


def step(model: nn.Module, world: World) -> None:
    model.zero_grad()
    model(X[world.rank :: world.size]).square().mean().backward()


def whole_gradients() -> dict[str, Tensor | None]:
    model = small()
    model(X).square().mean().backward()
    return gradients(model)


HOOKS = [
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "fp16 around all-reduce",
    "by type",
    "power sgd",
]


def with_every_hook(world: World) -> dict[str, Any]:
    return {name: with_hook(world, name) for name in HOOKS}


def with_hook(world: World, name: str) -> Any:
    model = DistributedDataParallel(small(), bucket_cap_mb=1e-4)
    if name == "power sgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "fp16 around all-reduce":
        model.register_comm_hook(
            None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
        )
    elif name == "by type":
        register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, model)
    else:
        model.register_comm_hook(None, getattr(default_hooks, name))
    for _ in range(6 if name == "power sgd" else 2):
        step(model, world)
    return gradients(model)


@pytest.fixture(scope="module", params=[1, 2])
def hooked(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_processes(request.param, with_every_hook)


@pytest.mark.parametrize("name", HOOKS)
def test_torchs_own_communication_hooks_run(hooked: list[dict[str, Any]], name: str) -> None:
    results = [rank[name] for rank in hooked]
    assert_replicas_equal(results)
    if name == "power sgd":  # an approximation: the direction must be right
        got, expected = (
            torch.cat([g.view(-1) for g in grads.values()])
            for grads in (results[0], whole_gradients())
        )
        assert torch.cosine_similarity(got, expected, dim=0) > 0.9
    else:
        tolerance = {} if name == "allreduce_hook" else {"rtol": 0.02, "atol": 2e-3}
        torch.testing.assert_close(results[0], whole_gradients(), **tolerance)


def joined(world: World, divide: bool) -> Any:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    with model.join(divide_by_initial_world_size=divide):
        for number in range(2 + 2 * world.rank):
            optimizer.zero_grad()
            model(X[number : number + 2]).square().mean().backward()
            optimizer.step()
            steps += 1
    model.check_in_sync()
    return [param.detach() for param in model.parameters()], steps


@pytest.mark.parametrize("divide", [True, False])
def test_join_lets_ranks_have_different_numbers_of_batches(divide: bool) -> None:
    expected = small()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number in range(6):  # ranks see the same rows, so averages are easy to predict
        optimizer.zero_grad()
        active = sum(number < 2 + 2 * rank for rank in range(3))
        value = expected(X[number : number + 2]).square().mean()
        (value * active / (3 if divide else active)).backward()
        optimizer.step()
    results = run_processes(3, joined, divide)
    assert [steps for _, steps in results] == [2, 4, 6]
    for params, _ in results:
        torch.testing.assert_close(params, [p.detach() for p in expected.parameters()])


def joined_weighted(world: World) -> Any:
    model = DistributedDataParallel(small())
    with model.join():
        for number in range(2 + world.rank):
            model.zero_grad()
            with model.weighted(2 + number):
                model(X[: 2 + number]).square().mean(dim=1).sum().backward()
    return gradients(model)


def test_in_a_weighted_step_a_rank_without_inputs_weighs_nothing() -> None:
    whole = small()
    whole(X[:4]).square().mean().backward()
    assert_close = torch.testing.assert_close
    assert_close(run_processes(2, joined_weighted)[1], gradients(whole))


def joined_normed(world: World) -> Any:
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = DistributedDataParallel(seeded(net, 0))
    with model.join():
        for number in range(2 + world.rank):
            with model.no_sync(enabled=number % 2 == 0):
                model(X[number : number + 4]).square().mean().backward()
    return dict(model.state_dict())


def test_join_works_with_batch_norm_and_no_sync() -> None:
    assert_replicas_equal(run_processes(2, joined_normed))


def joined_or_raise(world: World) -> None:
    model = DistributedDataParallel(small())

    def train() -> None:
        with model.join(throw_on_early_termination=True):
            for _ in range(1 + world.rank):
                model(X[:2]).square().mean().backward()

    with pytest.raises(RuntimeError):
        train()


def test_join_can_raise_on_early_termination() -> None:
    run_processes(2, joined_or_raise)


def joined_with_zero(world: World) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # half a second, for this one only

    model = DistributedDataParallel(small())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for number in range(2 + world.rank):
            optimizer.zero_grad()
            model(X[number : number + 2]).square().mean().backward()
            optimizer.step()
    return dict(model.state_dict())


def test_join_works_together_with_a_sharded_optimizer() -> None:
    assert_replicas_equal(run_processes(2, joined_with_zero))


def joined_and_checked(world: World) -> int:
    model = DistributedDataParallel(small(), options=DDPOptions(check_every=1))
    steps = 0
    with model.join():
        for number in range(2 + world.rank):
            model.zero_grad()
            model(X[number : number + 2]).square().mean().backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad)
            steps += 1
    return steps


def test_replicas_are_not_compared_while_a_rank_has_run_out_of_inputs() -> None:
    assert run_processes(2, joined_and_checked) == [2, 3]
