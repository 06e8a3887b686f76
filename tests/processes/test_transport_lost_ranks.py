"""Who is gone and who is not: forked children, ranks of subgroups, leaders of hosts."""

from __future__ import annotations

import atexit
import os
import signal

import pytest
import torch
import torch.distributed as dist
from sentences import says
from torch import nn

from paceline import DistributedDataParallel, World
from paceline.errors import PeerError
from paceline.testing import run_processes
from paceline.transport import shared_buckets


def step(model: nn.Module, width: int, value: float = 1.0) -> None:
    model.zero_grad()
    model(torch.full((1, width), value)).sum().backward()


def fork_in_the_middle(world: World) -> float:
    model = DistributedDataParallel(nn.Linear(10, 10))
    step(model, 10)
    store = world.group.get_group_store()
    if world.rank == 0:
        child = os.fork()
        if not child:
            try:
                atexit._run_exitfuncs()  # what any Python program does at its end
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        store.set("the child has ended", "yes")
    store.wait(["the child has ended"])
    if world.rank == 0:  # so late that the other looks whether this rank is still there
        torch.randn(1500, 1500) @ torch.randn(1500, 1500)
    step(model, 10, world.rank + 1.0)
    grad = model.module.weight.grad
    return float(grad.mean())


def test_a_forked_child_that_ends_does_not_speak_for_its_parent() -> None:
    assert run_processes(2, fork_in_the_middle) == [1.5, 1.5]


def lose_a_rank_of_a_subgroup(world: World) -> str:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    inner = DistributedDataParallel(nn.Linear(9, 9), process_group=groups[world.rank % 2])
    outer = DistributedDataParallel(nn.Linear(5, 5))
    for _ in range(3):
        step(inner, 9, float(world.rank))
        step(outer, 5, float(world.rank))
        assert inner.module.weight.grad.mean() == (1.0 if world.rank % 2 == 0 else 2.0)
        assert outer.module.weight.grad.mean() == 1.5
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1:
        try:
            step(inner, 9)
        except PeerError as error:
            return str(error)
    return ""


def test_a_lost_rank_of_a_subgroup_is_named_as_the_world_counts_it() -> None:
    message = run_processes(4, lose_a_rank_of_a_subgroup, return_exceptions=True)[1]
    assert "failed on rank 1" in message
    assert "waiting for rank 3: process" in message


def lose_a_leader(world: World, hosts: str, victim: int, signal_number: int) -> str:
    os.environ["PACELINE_HOST"] = hosts[world.rank]
    shared_buckets.STOPPED_PATIENCE_S = 0.5
    torch.set_num_threads(1)
    store = world.group.get_group_store()
    store.set(f"pid {world.rank}", str(os.getpid()))
    layers = nn.Sequential(*(nn.Linear(60, 60) for _ in range(6)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    for _ in range(3):
        step(model, 60)
    if world.rank == victim:  # half of its buckets are on their way
        layers[2].weight.register_hook(lambda _grad: os.kill(os.getpid(), signal_number))
    try:
        step(model, 60)
    except PeerError as error:
        if world.rank == 0 and signal_number == signal.SIGSTOP:  # this one notices last
            os.kill(int(store.get(f"pid {victim}")), signal.SIGKILL)
        return str(error)
    return "nobody noticed"


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_leader_of_a_host_is_lost_all_ranks_of_all_hosts_say_so(
    signal_number: int,
) -> None:
    results = run_processes(
        5, lose_a_leader, "abbba", 1, int(signal_number), return_exceptions=True
    )
    for rank in (0, 2, 3, 4):
        assert says(results[rank], "Step 3:", "sum of bucket")
        assert "rank 1" in results[rank].lower() or "ranks 1" in results[rank].lower()
