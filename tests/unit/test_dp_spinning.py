"""Idle threads of OpenMP are sent away before replicas on the CPU start."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
from torch import nn

from paceline import DataParallel
from paceline.dp.spinning import _find, send_helpers_away


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def _two_threads() -> object:
    if sys.platform != "linux" or not _find():
        pytest.skip("torch has no OpenMP of GNU's here")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    send_helpers_away()
    torch.set_num_threads(before)


def use_two_threads() -> None:
    torch.ones(1_000_000).add_(1)


@pytest.mark.usefixtures("_two_threads")
def test_helpers_go_and_come_back_when_they_are_wanted() -> None:
    use_two_threads()
    with_helper = threads()
    send_helpers_away()
    assert threads() == with_helper - 1
    assert torch.get_num_threads() == 2
    use_two_threads()
    assert threads() == with_helper


@pytest.mark.usefixtures("_two_threads")
def test_replicas_on_the_cpu_start_without_helpers_beside_them() -> None:
    seen = []

    class Counting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(threads())
            return super().forward(input)

    model = DataParallel(Counting(4, 2), device_ids=["cpu:0", "cpu:1"])
    model(torch.ones(4, 4))
    use_two_threads()
    with_helper = threads()
    seen.clear()
    model(torch.ones(4, 4))
    assert seen == [with_helper - 1] * 2
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_a_forked_process_does_not_wait_for_threads_it_does_not_have() -> None:
    use_two_threads()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        send_helpers_away()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_thread_without_helpers_has_none_to_send() -> None:
    send_helpers_away()
    send_helpers_away()
