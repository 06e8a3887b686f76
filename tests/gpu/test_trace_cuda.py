"""Recorded steps on a GPU: the same stages, with its device in them, and the check holds there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline import DataParallel, DistributedDataParallel
from paceline.group.world import World
from paceline.record import from_json, record_step, to_json
from paceline.record.stages import Trace
from paceline.testing import run_processes, run_ranks, seeded

ROWS = 100


def net(*layers: nn.Module) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(10, 32), *layers, nn.ReLU(), nn.Linear(32, 1))).cuda()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 10, generator=generator)
    return x.cuda(), (x.sum(1, keepdim=True) > 0).float().cuda()


def record(model: Any, x: torch.Tensor, y: torch.Tensor) -> Trace:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with record_step(model, optimizer, values=True, sample=3) as recording:
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        recording.note_loss(loss)
        loss.backward()
        optimizer.step()
    assert recording.trace is not None
    return recording.trace


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_on_one_gpu_are_recorded_in_order_and_are_right(replicas: int) -> None:
    trace = record(DataParallel(net(), [0] * replicas), *batch())
    assert trace.devices == ["cuda:0"] * replicas
    assert trace.check is not None
    assert (trace.check.how, trace.check.is_same) == ("whole batch", True)
    split = next(stage for stage in trace.stages if stage.name == "split")
    x, _ = batch()
    starts = [0, *torch.tensor([p.tensors[0].shape[0] for p in split.parts]).cumsum(0).tolist()]
    for part, start in zip(split.parts, starts, strict=False):
        assert part.tensors[0].device == "cuda:0"
        assert part.tensors[0].first == x[start, :6].tolist()


def record_on_rank(world: World) -> dict[str, Any]:
    x, y = batch()
    model = DistributedDataParallel(net(), process_group=world.group)
    return to_json(record(model, x[world.rank :: 2], y[world.rank :: 2]))


def test_two_workers_on_one_gpu_are_recorded_and_are_right() -> None:
    # Processes, because all threads of one share autograd's thread for a GPU.
    trace = from_json(run_processes(2, record_on_rank)[0])
    assert trace.devices == ["cuda:0", "cuda:0"]
    assert trace.check is not None
    assert (trace.check.how, trace.check.is_same) == ("whole batch", True)
    assert trace.check.is_equal_on_all


def test_random_numbers_of_the_gpu_are_drawn_again() -> None:
    def body(world: World) -> Trace:
        x, y = batch()
        model = DistributedDataParallel(net(nn.Dropout(0.5)), process_group=world.group)
        return record(model, x, y)

    check = run_ranks(1, body)[0].check
    assert check is not None
    assert check.is_same


@pytest.mark.parametrize("engine", ["dp", "ddp"])
def test_the_command_records_workers_and_replicas_on_gpus(engine: str) -> None:
    # A process of its own: workers are forks of it, so it must not have used CUDA before them.
    flags = ["--device", "cuda", "--engine", engine, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "trace", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trace = from_json(json.loads(done.stdout))
    assert {device.partition(":")[0] for device in trace.devices} == {"cuda"}
    assert trace.check is not None
    assert trace.check.is_same
