"""Threads and memory: steps leave nothing behind, a dropped model is gone, cores are not wasted."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.dp import DataParallel, DPOptions
from paceline.dp.parallel_apply import (
    ThreadPool,
    _openmp_pause_functions,
    stop_idle_openmp_threads,
)

TWO = ["cpu:0", "cpu:1"]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def replica_threads() -> int:
    return sum(thread.name.startswith("paceline replica") for thread in threading.enumerate())


def wait_until(claim: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.001)
    return claim()


@pytest.fixture
def _one_thread_each() -> Iterator[None]:
    """Threads that spin while they wait for each other take forever on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread_each")
@pytest.mark.parametrize("share", [True, False], ids=["shared", "copied"])
def test_hundreds_of_steps_leak_no_thread_and_no_memory(share: bool) -> None:
    model = DataParallel(network(), device_ids=TWO, options=DPOptions(share_parameters=share))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.rand(6, 8), torch.arange(6) % 4

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.backward(F.cross_entropy, x, y)

    for _ in range(30):
        step()
    gc.collect()
    threads, tensors, memory = threading.active_count(), count_tensors(), resident_bytes()
    for _ in range(300):
        step()
    gc.collect()
    assert threading.active_count() == threads
    assert count_tensors() == tensors
    assert resident_bytes() - memory < 8 * 2**20


def count_tensors() -> int:
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def test_a_dropped_model_is_freed_at_once_and_its_threads_end() -> None:
    before = replica_threads()
    model = DataParallel(network(), device_ids=TWO)
    model(torch.rand(6, 8)).sum().backward()
    model.backward(lambda output: output.mean(), torch.rand(6, 8))
    assert replica_threads() == before + 2
    weight = weakref.ref(model.module[0].weight)
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()
    assert wait_until(lambda: replica_threads() == before)


def test_outputs_live_no_longer_than_the_caller_wants() -> None:
    model = DataParallel(network(), device_ids=TWO)
    alive: list[weakref.ref[Tensor]] = []
    model.module.register_forward_hook(
        lambda module, inputs, output: alive.append(weakref.ref(output))
    )
    output = model(torch.rand(6, 8))
    del output
    assert wait_until(lambda: all(ref() is None for ref in alive))


def test_threads_end_after_an_error_too() -> None:
    before = replica_threads()
    model = DataParallel(network(), device_ids=TWO)
    with pytest.raises(RuntimeError):
        model(torch.rand(6, 7))
    del model
    gc.collect()
    assert wait_until(lambda: replica_threads() == before)


def test_a_call_interrupted_by_ctrl_c_does_not_confuse_the_next() -> None:
    pool = ThreadPool(["paceline replica a", "paceline replica b"], cpu_threads=1)
    may_end = threading.Event()
    done = []

    def slow() -> None:
        may_end.wait(60)
        done.append("first")

    class Interrupted(list[Callable[[], None]]):
        def __iter__(self) -> Iterator[Callable[[], None]]:
            yield self[0]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(Interrupted([slow]))
    may_end.set()
    pool.run([lambda: done.append("second"), None])
    assert done == ["first", "second"]


def test_a_forked_process_knows_that_the_threads_did_not_come_along() -> None:
    pool = ThreadPool(["paceline replica a"], cpu_threads=1)
    pid = os.fork()
    if pid == 0:
        os._exit(7 if pool.is_alive else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.is_alive


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def _two_threads() -> object:
    if not _openmp_pause_functions():
        pytest.skip("torch has no OpenMP of GNU's here")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    stop_idle_openmp_threads()
    torch.set_num_threads(before)


def use_two_threads() -> None:
    torch.ones(1_000_000).add_(1)


@pytest.mark.usefixtures("_two_threads")
def test_openmp_threads_go_and_come_back_when_they_are_wanted() -> None:
    use_two_threads()
    with_helper = threads()
    stop_idle_openmp_threads()
    stop_idle_openmp_threads()  # there are none now
    assert threads() == with_helper - 1
    assert torch.get_num_threads() == 2
    use_two_threads()
    assert threads() == with_helper


@pytest.mark.usefixtures("_two_threads")
def test_replicas_on_the_cpu_start_without_openmp_threads_beside_them() -> None:
    seen = []

    class Counting(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(threads())
            return super().forward(input)

    model = DataParallel(Counting(4, 2), device_ids=TWO)
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
        stop_idle_openmp_threads()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
