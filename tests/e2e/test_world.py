"""`init_process_group()` finds its world under every launcher, and listens on loopback only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = """
import os, torch, paceline, torch.distributed as dist
world = paceline.init_process_group()
total = torch.ones(1) * (world.rank + 1)
dist.all_reduce(total)
inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
          if os.path.exists(f"/proc/self/fd/{fd}")}
tables = [name for name in ("/proc/net/tcp", "/proc/net/tcp6") if os.path.exists(name)]
rows = [line.split() for name in tables for line in open(name).readlines()[1:]]
mine = [row[1].split(":")[0] for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
print(world.rank, world.size, world.local_rank, world.source.replace(" ", "-"), total.item(),
      ",".join(sorted(set(mine))) or "none", flush=True)
world.barrier()
world.close()
"""

LOOPBACK = "0100007F"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(script: Path, **variables: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK", "WORLD"))}
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={**clean, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    found = []
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        found.append(output.split())
    return sorted(found)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "report.py"
    path.write_text(REPORT)
    return path


def test_without_a_launcher_the_world_is_one_process(script: Path) -> None:
    [[rank, size, _, source, total, listening]] = lines([start(script)])
    assert (rank, size, source, total) == ("0", "1", "alone", "1.0")
    assert listening in {LOOPBACK, "none"}


def test_torchruns_variables_are_read(script: Path) -> None:
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    found = lines([start(script, RANK=str(r), LOCAL_RANK=str(r), **shared) for r in range(2)])
    assert [line[:5] for line in found] == [
        ["0", "2", "0", "environment", "3.0"],
        ["1", "2", "1", "environment", "3.0"],
    ]
    assert {line[5] for line in found} == {LOOPBACK}


def test_a_slurm_step_is_read(script: Path) -> None:
    port = str(free_port())
    shared = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    processes = [
        start(script, SLURM_PROCID=str(r), SLURM_LOCALID=str(r), MASTER_PORT=port, **shared)
        for r in range(2)
    ]
    found = lines(processes)
    assert [line[:4] for line in found] == [["0", "2", "0", "slurm"], ["1", "2", "1", "slurm"]]
    assert {line[5] for line in found} == {LOOPBACK}


def test_a_slurm_batch_script_is_one_process(script: Path) -> None:
    found = lines([start(script, SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_PROCID="0")])
    assert found[0][1] == "1"


def test_a_missing_rank_0_and_a_taken_port_are_said_in_our_words(tmp_path: Path) -> None:
    impatient = tmp_path / "impatient.py"
    impatient.write_text(
        "import datetime, paceline\n"
        "paceline.init_process_group(timeout=datetime.timedelta(seconds=1))\n"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        blocked = start(impatient, RANK="0", MASTER_PORT=port, **shared)
        alone = start(impatient, RANK="1", MASTER_PORT=str(free_port()), **shared)
        _, said_by_blocked = blocked.communicate(timeout=60)
        _, said_by_alone = alone.communicate(timeout=60)
    assert f"Cannot listen on 127.0.0.1, port {port}" in said_by_blocked
    assert "PeerError: Rank 1 of 2 found no store" in said_by_alone
    assert (blocked.returncode, alone.returncode) == (1, 1)
