"""The first backward, with all gradients alive before any is averaged, leaves none behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel, World
from paceline.testing import run_processes

MIB = 2**20
LAYERS, WIDTH = 8, 1024


def private_bytes() -> int:
    """Memory of this process that is not shared with others and in no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say RssAnon")


def measure(world: World) -> Any:
    torch.set_num_threads(1)
    row = torch.ones(1, WIDTH)
    warm = nn.Linear(WIDTH, WIDTH)
    warm(row).sum().backward()  # what a first backward loads, is loaded
    del warm
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = DistributedDataParallel(net, process_group=world.group)
    before = private_bytes()
    model(row).sum().backward()
    return [model.transport, private_bytes() - before]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_gradients_that_moved_into_shared_memory_are_given_back_to_the_system() -> None:
    gradients = LAYERS * WIDTH * WIDTH * 4
    for transport, grown in run_processes(2, measure):
        if not transport.startswith("shared memory"):
            pytest.skip(f"no shared memory here: {transport}")
        assert grown < gradients / 2, f"{grown / MIB:.0f} MiB stay behind"
