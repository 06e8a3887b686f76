"""Freed memory stays in a process that trains through shared memory."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from torch import nn

from paceline import DistributedDataParallel, World
from paceline.testing import run_processes
from paceline.transport.select import keep_freed_memory

PAGES = 40 * 2**20 // resource.getpagesize()


def faults_of_a_step(_world: World) -> float:
    """Page faults of one step with 40 MiB of gradients, after a few to warm up."""
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(1448, 1448) for _ in range(5))))
    rows = torch.randn(4, 1448)
    counts = []
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model.zero_grad()
        model(rows).sum().backward()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return sorted(counts[20:])[5]


def test_a_step_does_not_page_its_gradients_in_again() -> None:
    assert max(run_processes(2, faults_of_a_step)) < PAGES / 10


def is_kept(_world: World, variable: str) -> bool:
    if variable:
        os.environ[variable] = "65536"
    return keep_freed_memory()


@pytest.mark.parametrize("variable", ["", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_says_of_malloc_is_left_alone(variable: str) -> None:
    assert run_processes(1, is_kept, variable) == [not variable]
