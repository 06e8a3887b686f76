"""`init_process_group()` finds its world under every launcher, and listens on loopback only.

Processes are forks with variables of their own, as another launcher would have set them.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import PacelineError

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

LOOPBACK = "0100007F"


class Seen(NamedTuple):
    """What a process saw of its world."""

    rank: int
    size: int
    local_rank: int
    source: str
    total: float


def join() -> tuple[tuple[object, ...], list[str]]:
    """Join, sum, and tell the addresses that this process listens on."""
    with paceline.init_process_group() as world:
        total = torch.ones(1) * (world.rank + 1)
        dist.all_reduce(total)
        seen = Seen(world.rank, world.size, world.local_rank, world.source, total.item())
        addresses = listening()
        world.barrier()
    return tuple(seen), addresses


def listening() -> list[str]:
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(path) for path in descriptors if os.path.exists(path)}
    tables = [Path("/proc/net", name) for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
    mine = {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}
    return sorted({address.split(":")[0] for address in mine})


def joined(*variables_by_rank: dict[str, str]) -> tuple[list[Seen], set[str]]:
    """What processes with these variables see of their world, and where they listen."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "RANK", "WORLD", "MASTER", "LOCAL"))
    }

    def body() -> tuple[tuple[object, ...], list[str]]:
        mine = variables_by_rank[int(os.environ["RANK"])]
        os.environ.clear()
        os.environ.update(clean | mine)
        return join()

    found = paceline.launch(body, workers=len(variables_by_rank), threads=1)
    return [Seen(*seen) for seen, _ in found], {address for _, each in found for address in each}


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def test_without_a_launcher_and_in_a_slurm_batch_script_the_world_is_one_process() -> None:
    for variables in ({}, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}):
        seen, addresses = joined(variables)
        assert seen == [Seen(0, 1, 0, "alone", 1.0)]
        assert addresses <= {LOOPBACK}


def test_torchruns_variables_are_read() -> None:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    seen, addresses = joined(*({"RANK": r, "LOCAL_RANK": r, **shared} for r in "01"))
    assert seen == [Seen(rank, 2, rank, "environment", 3.0) for rank in (0, 1)]
    assert addresses == {LOOPBACK}


def test_a_slurm_step_is_read() -> None:
    shared = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    shared |= {"MASTER_PORT": free_port()}
    seen, addresses = joined(*({"SLURM_PROCID": r, "SLURM_LOCALID": r, **shared} for r in "01"))
    assert seen == [Seen(rank, 2, rank, "slurm", 3.0) for rank in (0, 1)]
    assert addresses == {LOOPBACK}


def test_a_missing_rank_0_and_a_taken_port_are_said_in_our_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [str(taken.getsockname()[1]), free_port()]

        def body() -> str:
            os.environ["MASTER_PORT"] = ports[int(os.environ["RANK"])]
            for name in ("PACELINE_RUN_ID", "PACELINE_STORE_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
                os.environ.pop(name)
            try:
                paceline.init_process_group(timeout=timedelta(seconds=1))
            except PacelineError as error:
                return f"{type(error).__name__}: {error}"
            return "joined"

        said_by_blocked, said_by_alone = paceline.launch(body, workers=2)
    assert f"Cannot listen on 127.0.0.1, port {ports[0]}" in said_by_blocked
    assert "PeerError: Rank 1 of 2 found no store" in said_by_alone
