"""What ranks do over NCCL that Gloo cannot show: torch's engine beside ours, and ranks that differ.

A rank that raises, leaves or has another shape is an error on every rank, in seconds and not when
NCCL's timeout of minutes ends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import Rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from zoo import named

from paceline import DDPOptions, DistributedDataParallel, RunOptions, World, shard_update
from paceline.run import Run
from paceline.testing import assert_replicas_equal, run_processes, seeded

NCCL = "cpu:gloo,cuda:nccl"
STEPS = 5


def fit(
    model: nn.Module, world: World, name: str, optimizer: torch.optim.Optimizer
) -> list[Tensor]:
    case = named(name)
    for _ in range(STEPS):
        optimizer.zero_grad()
        rows = case.batch(12)
        inputs = tuple(part.chunk(world.size)[world.rank].cuda() for part in rows)
        case.loss(model, inputs).backward()
        optimizer.step()
    return [param.detach().cpu() for param in model.parameters()]


def both_engines(world: World, name: str) -> tuple[list[Tensor], list[Tensor]]:
    ends = []
    for wrap in (DistributedDataParallel, TorchDDP):
        model = wrap(named(name).build().cuda())
        ends.append(fit(model, world, name, torch.optim.SGD(model.parameters(), lr=0.05)))
    return ends[0], ends[1]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "tiny GPT", "convolutions"])
def test_both_engines_train_alike(size: int, name: str) -> None:
    for ours, torchs in run_processes(size, both_engines, name, backend=NCCL):
        # At two ranks there is one way to add; at more, buckets of other sizes may differ in it.
        exactly = {"rtol": 0, "atol": 0} if size == 2 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(ours, torchs, **exactly)


def with_everything(world: World) -> dict[str, Any]:
    """A wrapped model under each option, and what it has become."""
    ends: dict[str, Any] = {}
    for compression in (None, "bf16", "fp16"):
        model = DistributedDataParallel(
            named("mlp").build().cuda(), options=DDPOptions(compression=compression)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ends[f"compression {compression}"] = fit(model, world, "mlp", optimizer)
    model = DistributedDataParallel(named("mlp").build().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shard_update(model, optimizer)
    ends["shared out"] = fit(model, world, "mlp", optimizer)
    return ends


@pytest.mark.parametrize("size", [2, 4])
def test_compression_and_sharing_the_update_out_keep_the_ranks_equal(size: int) -> None:
    ranks = run_processes(size, with_everything, backend=NCCL)
    plain = ranks[0]["compression None"]
    for name, end in ranks[0].items():
        assert_replicas_equal([dict(zip("abcdef", rank[name], strict=False)) for rank in ranks])
        near = 2e-2 if name.endswith("16") else 0
        torch.testing.assert_close(end, plain, rtol=0, atol=near, msg=name)


def train_run(world: World | None, update: Any) -> tuple[list[Tensor], float]:
    net = seeded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    options = RunOptions(progress="quiet", update=update, ema=0.9, clip_norm=1.0)
    rows = Rows(40)
    run = Run(
        net, optimizer, rows, global_batch=8, epochs=2, shards=4, world=world, options=options
    )
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))

    def score(batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (run.model(batch[0]).argmax(1) == batch[1]).float().mean()}

    accuracy = run.evaluate(score, rows)["accuracy"]
    return [param.detach().cpu() for param in net.parameters()], accuracy


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("update", ["whole", "sharded"])
def test_a_run_with_options_is_the_same_at_every_size(size: int, update: str) -> None:
    expected, accuracy = train_run(None, "whole")
    for found, measured in run_processes(size, train_run, update, backend=NCCL):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert measured == pytest.approx(accuracy)


def part_ways(world: World, how: str) -> str:
    net = seeded(nn.Linear(8, 8 if how != "shape" or world.rank == 0 else 9)).cuda()
    model = DistributedDataParallel(net)
    for step in range(6):
        if step == 3 and world.rank == 1:
            if how == "raises":
                raise ValueError("rank 1 has had enough")
            if how == "leaves":
                return "left"
            if how == "skips":
                continue
        model(torch.ones(2, 8, device="cuda")).sum().backward()
    return "ended"


@pytest.mark.parametrize("how", ["raises", "leaves", "skips", "shape"])
def test_ranks_that_part_ways_are_told(how: str) -> None:
    first, second = run_processes(
        2, part_ways, how, backend=NCCL, return_exceptions=True, timeout_s=50
    )
    assert isinstance(first, Exception), first
    assert "still running" not in str(first)
    named_rank = "rank 1" in str(first).lower()
    assert named_rank, first
    if how in ("raises", "shape"):
        assert isinstance(second, Exception)
