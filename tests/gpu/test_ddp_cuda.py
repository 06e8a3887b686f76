"""DistributedDataParallel on a GPU that two and four ranks share, with Gloo and with NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, Case, named, shard

from paceline import DistributedDataParallel, World, init_process_group
from paceline.ddp.fingerprint import PERIOD
from paceline.testing import assert_replicas_equal, gradients, run_processes, seeded

ROWS = 12
NCCL = "cpu:gloo,cuda:nccl"


def dense(model: nn.Module) -> dict[str, Tensor | None]:
    found = gradients(model)
    return {n: None if g is None else g.to_dense().cpu().clone() for n, g in found.items()}


def on_gpu(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part.cuda() for part in inputs)


def train(world: World, names: list[str]) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    found = {}
    for name in names:
        case = named(name)
        model = DistributedDataParallel(case.build().cuda(), bucket_cap_mb=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            inputs = on_gpu(shard(case.batch(ROWS), world.rank, world.size))
            case.loss(model, inputs).backward()
            seen.append(dense(model))
            optimizer.step()
        model.check_in_sync()
        found[name] = seen
    return found


# The zoo's own check of reentrant autograd and of hooks works with tensors on the CPU only.
GPU_CASES = [case for case in CASES if not case.traits & {"rough"}]


RANKS = [(2, "gloo"), (2, NCCL), (4, NCCL)]
across_ranks = pytest.mark.parametrize(("size", "backend"), RANKS)


@pytest.fixture(scope="module", params=RANKS, ids=str)
def trained(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    size, backend = request.param
    names = [case.name for case in GPU_CASES]
    return run_processes(size, train, names, timeout_s=110, backend=backend)


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_gradients_match_one_process_on_the_whole_batch(
    trained: list[dict[str, Any]], case: Case
) -> None:
    whole = case.build()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        case.loss(whole, case.batch(ROWS)).backward()
        for name, grad in dense(whole).items():
            for rank in trained:
                got = rank[case.name][step][name]
                assert (got is None) == (grad is None), name
                if grad is not None:
                    torch.testing.assert_close(got, grad, rtol=1e-3, atol=1e-4, msg=name)
        optimizer.step()
    assert_replicas_equal([rank[case.name][-1] for rank in trained])


def small() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), 0).cuda()


def weighted(world: World) -> Any:
    x = torch.randn(10, 64, generator=torch.Generator().manual_seed(0)).cuda()
    model = DistributedDataParallel(small())
    mine = x.split([3, *[1] * (world.size - 2), 9 - world.size])[world.rank]
    for _ in range(2):
        model.zero_grad()
        with model.weighted(len(mine)):
            model(mine).square().mean(dim=1).sum().backward()
    whole = small()
    whole(x).square().mean().backward()
    return dense(model), dense(whole)


@across_ranks
def test_weights_are_exact_for_uneven_shards(size: int, backend: str) -> None:
    for got, expected in run_processes(size, weighted, backend=backend):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


def scaled(world: World) -> Any:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.ones(4, 64, device="cuda") * (world.rank + 1)).square().mean()
        scaler.scale(loss * (float("inf") if step == 1 and world.rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return dict(model.state_dict()), scaler.get_scale()


@across_ranks
def test_autocast_and_a_grad_scaler_train_alike_on_all_ranks(size: int, backend: str) -> None:
    ranks = run_processes(size, scaled, backend=backend)
    assert_replicas_equal([state for state, _ in ranks])
    assert {scale for _, scale in ranks} == {512.0}


def differing(world: World) -> str:
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(PERIOD + 4):
        if step == 3 and world.rank == 1:
            model.module[2].weight.data[1, 2] *= -1
        optimizer.zero_grad()
        model(torch.ones(4, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    return "no error"


@across_ranks
def test_a_parameter_that_differs_on_one_rank_is_named(size: int, backend: str) -> None:
    for error in run_processes(size, differing, return_exceptions=True, backend=backend):
        assert "'2.weight' on rank 1" in str(error)


def test_a_forward_has_the_memory_of_gradients_that_were_freed() -> None:
    def peak_and_rest() -> tuple[int, int]:
        model = DistributedDataParallel(nn.Linear(2048, 2048, device="cuda"))
        model.register_comm_hook(None, _keep)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(1, 2048, device="cuda")).sum().backward()
        with_gradients = torch.cuda.memory_allocated()
        model.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, 2048, device="cuda"))
        return with_gradients, torch.cuda.memory_allocated()

    with init_process_group():
        with_gradients, rest = peak_and_rest()
    assert with_gradients - rest > 2048 * 2048 * 4 * 0.9


def _keep(_state: object, bucket: Any) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
