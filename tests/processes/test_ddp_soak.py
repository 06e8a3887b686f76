"""A long run leaves nothing behind: threads, descriptors, memory."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import DistributedDataParallel, World
from paceline.testing import run_processes


def numbers() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "threads": threading.active_count(),
        "native threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory": pages * resource.getpagesize(),
    }


def train(world: World) -> Any:
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)), bucket_cap_mb=0.005
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    # One step more than is looked at: its sum keeps a rank that is ahead from leaving, which would
    # close its connection to the other before that has counted.
    for step in range(602):
        optimizer.zero_grad()
        with model.no_sync(enabled=step % 3 == 0), model.weighted(4):
            model(torch.randn(4, 32)).square().sum().backward()
        if step % 3 != 0:
            optimizer.step()
        if step in (100, 600):
            seen.append(numbers())
    return seen


def test_five_hundred_steps_leave_nothing_behind() -> None:
    for before, after in run_processes(2, train, timeout_s=100):
        assert after["memory"] - before["memory"] < 2 * 2**20
        for name in ("threads", "native threads", "descriptors"):
            assert after[name] == before[name], name
