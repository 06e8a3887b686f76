"""Shared memory between processes: equal to Gloo, on several hosts, under stress, no traces."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.errors import PeerError
from paceline.group import Membership
from paceline.testing import run_processes
from paceline.transport import TransportChoice, place, shared_buckets
from paceline.transport.interface import Flat

CPU = torch.device("cpu")
ROWS = torch.randn(24, 20, generator=torch.Generator().manual_seed(5))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Linear(50, 4))


def train(world: World, kind: Any, steps: int, hosts: str = "") -> Any:
    """Parameters after some steps; `hosts` names one host for each rank."""
    os.environ["PACELINE_HOST"] = hosts[world.rank] if hosts else ""
    torch.set_num_threads(1)
    model = DistributedDataParallel(
        build(), bucket_cap_mb=0.002, options=DDPOptions(transport=kind, check_every=steps)
    )
    for step in range(steps):
        model.zero_grad()
        rows = ROWS[world.rank + step % 3 :: world.size]
        with model.weighted(len(rows)):
            model(rows).square().mean(dim=1).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.05)
    return model.transport, [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory_and_gloo_train_alike_and_shared_memory_repeats_to_the_bit(size: int) -> None:
    one = run_processes(size, train, "shared_memory", 100)
    again = run_processes(size, train, "shared_memory", 100)
    other = run_processes(size, train, "c10d", 100)
    assert "shared memory" in one[0][0]
    assert "c10d" in other[0][0]
    for (_, params), (_, repeated) in zip(one, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(params, repeated, strict=True))
    torch.testing.assert_close(one[0][1], other[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hosts", ["aab", "abab", "aaab"])
def test_several_hosts_train_like_one(hosts: str) -> None:
    size = len(hosts)
    together = run_processes(size, train, "shared_memory", 20)
    apart = run_processes(size, train, "shared_memory", 20, hosts)
    assert f"{len(set(hosts))} hosts" in apart[0][0]
    for _, params in apart:
        torch.testing.assert_close(params, together[0][1], rtol=1e-4, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(params, apart[0][1], strict=True))


def copy_from_each(world: World, hosts: str) -> None:
    os.environ["PACELINE_HOST"] = hosts[world.rank]
    transport = TransportChoice(Membership.of(world.group), [CPU], "shared_memory").get()
    for root in range(world.size):
        for numel in (1, 3_000_000):
            wanted = torch.arange(numel).mul_(root + 1).to(torch.uint8)
            mine = wanted.clone() if world.rank == root else torch.zeros_like(wanted)
            transport.copy(mine, root, "Copying")
            assert torch.equal(mine, wanted)


def test_any_rank_of_any_host_can_copy_to_all() -> None:
    run_processes(4, copy_from_each, "abba")


def test_with_every_rank_on_a_host_of_its_own_there_is_only_c10d() -> None:
    told, _ = run_processes(2, train, "auto", 1, "ab")[0]
    assert told == "c10d: every rank is on a host of its own"


def train_in_little_memory(world: World, limit_bytes: int) -> Any:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.transport").addHandler(handler)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1000, 1500))
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, 1000) * (world.rank + 1)).square().mean().backward()
    return model.transport, model.module.weight.grad.sum().item(), said


@pytest.mark.parametrize("limit_mib", [1, 16])
def test_without_room_for_a_segment_gradients_go_through_c10d_and_it_is_said_once_why(
    limit_mib: int,
) -> None:
    expected = run_processes(2, train_in_little_memory, 2**40)
    results = run_processes(2, train_in_little_memory, limit_mib * 2**20)
    assert "shared memory" in expected[0][0]
    for (told, total, _), (_, wanted, _) in zip(results, expected, strict=True):
        assert told.startswith("c10d: rank 0 got no")
        assert total == pytest.approx(wanted, rel=1e-4)
    (line,) = results[0][2]
    assert "instead of shared memory: rank 0 got no" in line
    assert results[1][2] == expected[0][2] == []


def named_memory() -> set[str]:
    """What lies in /dev/shm, without what other programs on this machine put there meanwhile:
    semaphores of Python's multiprocessing, tensors that torch shares."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "torch_"))}


def meet_a_fault(world: World, signal_number: int, at_step: int) -> Any:
    """Rank 1 is killed or stopped in a step; what the others say."""
    shared_buckets.STOPPED_PATIENCE_S = 0.5
    torch.set_num_threads(1)
    model = DistributedDataParallel(build(), bucket_cap_mb=0.002)
    store = world.group.get_group_store()
    store.set(f"pid {world.rank}", str(os.getpid()))
    for step in range(6):
        if step == at_step and world.rank == 1:
            os.kill(os.getpid(), signal_number)
        try:
            model(ROWS).square().mean().backward()
        except PeerError as error:
            if world.rank == 0 and signal_number == signal.SIGSTOP:
                os.kill(int(store.get("pid 1")), signal.SIGKILL)
            return str(error)
    return "nobody noticed"


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("at_step", [0, 3])
def test_a_killed_or_stopped_rank_is_named_before_any_timeout(
    signal_number: int, at_step: int
) -> None:
    before = named_memory()
    results = run_processes(
        *(3, meet_a_fault, int(signal_number), at_step), timeout_s=3600, return_exceptions=True
    )
    for rank in (0, 2):
        message = results[rank]
        assert "rank 1" in message.lower()
        assert f"Step {at_step}" in message or "Copying buffers" in message
    assert named_memory() <= before


def sum_in_a_storm(world: World, rounds: int) -> Any:
    """Sums of random sizes after random pauses; then rank 2 dies in the middle of one."""
    torch.set_num_threads(1)
    mine, ours = random.Random(world.rank), random.Random(99)
    transport = TransportChoice(Membership.of(world.group), [CPU], "shared_memory").get()
    homes: list[Any] = []
    descriptors = 0
    for turn in range(rounds):
        if turn % 20 == 0:
            numels = [
                ours.choice([1, 63, 4096, 30_000, 150_000]) for _ in range(ours.randint(1, 6))
            ]
            plans = [Flat(n, torch.float32, CPU) for n in numels]
            buckets = place(transport, plans, f"Round {turn}")
            homes = list(buckets.homes)
        sums = []
        for number, home in enumerate(homes):
            if mine.random() < 0.2:
                time.sleep(mine.random() / 500)
            home.fill_(world.rank + number + turn)
            sums.append(buckets.start(number, home, 1.0, f"Round {turn}"))
            if turn == rounds - 1 and world.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            for each in sums:
                each.wait()
        except PeerError as error:
            return turn, str(error), descriptors, len(os.listdir("/proc/self/fd"))
        for number, home in enumerate(homes):
            expected = 3 * (number + turn) + 3
            assert home.min().item() == home.max().item() == expected
        if turn == 10:
            descriptors = len(os.listdir("/proc/self/fd"))
    return rounds, "", 0, 0


def test_two_hundred_rounds_of_stress_and_a_killed_peer_leave_nothing() -> None:
    before = named_memory()
    results = run_processes(3, sum_in_a_storm, 200, return_exceptions=True)
    for rank in (0, 1):
        turn, message, early, late = results[rank]
        assert turn == 199, message
        assert "rank 2" in message.lower()
        assert late <= early
    assert named_memory() <= before


def look_at_the_mapping(world: World) -> list[str]:
    model = DistributedDataParallel(build())
    model(ROWS).sum().backward()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if Path(line.split(maxsplit=5)[-1]).name.startswith("memfd:")]


def test_the_segment_has_no_name_that_anybody_could_open() -> None:
    for lines in run_processes(2, look_at_the_mapping):
        assert lines
        assert all("/memfd:paceline (deleted)" in line for line in lines)


def train_crowded(world: World) -> Tensor:
    return train(world, "shared_memory", 30)[1][0]


def test_more_ranks_than_cores_make_progress() -> None:
    results = run_processes(7, train_crowded)
    assert all(torch.equal(got, results[0]) for got in results)
