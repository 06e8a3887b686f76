"""Workers, launchers and cables of two hosts fail, and the training ends as if nothing had."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts import Host, two_hosts

SCRIPT = """
import os, pathlib, signal, sys, time
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)).double()
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02),
                   TensorDataset(x, (x.sum(1) * 2).long() % 3), global_batch=12, epochs=6, shards=4,
                   folder="run", options=paceline.RunOptions(progress="plain", checkpoint_every=4))
rank, here, fast = os.environ.get("RANK", "0"), pathlib.Path(), sys.argv[1:] == ["fast"]
for step in run:
    with step:
        for inputs, targets in step.batches():
            kill = here / f"kill{rank}.{step.number}"
            if kill.exists():
                kill.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(nn.functional.cross_entropy(run.model(inputs), targets))
        time.sleep(0 if fast else 0.02)
    if rank == "1" and step.number == 10 and (here / "alone").exists():
        run.save()
    (here / f"step{rank}").write_text(str(step.number))
torch.save([net.state_dict(), run.step, run.model.transport], f"end{rank}.pt")
"""
STEPS = 48


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The parameters after the same training in one process."""
    folder = tmp_path_factory.mktemp("alone")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, script, "fast"], cwd=folder, check=True, timeout=60)
    return torch.load(folder / "end0.pt")[0]


def check(folder: Path, ranks: list[int], expected: Any, transport: str = "") -> None:
    for rank in ranks:
        state, steps, how = torch.load(folder / f"end{rank}.pt")
        assert steps == STEPS
        assert how.startswith(transport)
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-11)


def prepare(folder: Path) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return script


def wait_for_step(folder: Path, rank: int, number: int) -> None:
    deadline_s = time.monotonic() + 60
    path = folder / f"step{rank}"
    while not path.exists() or int(path.read_text() or 0) < number:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def start(hosts: list[Host], script: Path, *workers: int, flags: Sequence[str] = ()) -> None:
    for host, count in zip(hosts, workers, strict=True):
        host.run(script, count, flags=flags)


def test_without_another_host_the_training_continues_and_starts_again_if_it_must(
    tmp_path: Path, expected: Any
) -> None:
    (tmp_path / "kill0.30").touch()
    with two_hosts(tmp_path) as hosts:
        start(hosts, prepare(tmp_path), 1, 2)
        wait_for_step(tmp_path, 0, 8)
        hosts[1].kill_launcher()
        assert hosts[0].finish() == 0, hosts[0].output
        said = hosts[0].output
        assert "machine 1 is gone, with 2 workers: its launcher has ended; 1 continues" in said
        assert "all start again" in said
        assert hosts[1].finish() == 137
    check(tmp_path, [0], expected)


def test_workers_of_two_hosts_that_wait_for_each_other_are_ended_with_where_they_are(
    tmp_path: Path,
) -> None:
    (tmp_path / "alone").touch()
    with two_hosts(tmp_path) as hosts:
        start(hosts, prepare(tmp_path), 1, 1, flags=["--stall-after", "1", "--stall-end", "2"])
        assert [host.finish() for host in hosts] == [1, 1], hosts[0].output
        info = json.loads((tmp_path / "run" / "run.json").read_text())
        reason = "all 2 workers have waited for each other for 2 s"
        assert (info["status"], info["reason"]) == ("failed", reason)
        for host in hosts:
            for text in (reason, "Worker 0 was at:", "Worker 1 was at:"):
                assert text in host.output


def test_who_is_cut_off_from_the_lead_ends_and_the_others_continue(
    tmp_path: Path, expected: Any
) -> None:
    with two_hosts(tmp_path) as hosts:
        start(hosts, prepare(tmp_path), 2, 2, flags=["--machine-timeout", "1"])
        wait_for_step(tmp_path, 0, 8)
        hosts[0].do("ip link set cable down")  # which takes the lead's address away, too
        assert hosts[1].finish(within_s=15) == 1, hosts[1].output
        assert "where all meet, is gone: it has said nothing for 4 s" in hosts[1].output
        assert hosts[0].finish() == 0, hosts[0].output
        assert "machine 1 is gone, with 2 workers: it has said nothing for 6 s" in hosts[0].output
    check(tmp_path, [0, 1], expected, "shared memory between the 2 ranks")


def test_a_machine_that_is_out_of_reach_for_a_while_comes_back(
    tmp_path: Path, expected: Any
) -> None:
    """First its cable is out for 3 s, and then its launcher is stopped for 5 s."""
    with two_hosts(tmp_path) as hosts:
        start(hosts, prepare(tmp_path), 1, 2)
        wait_for_step(tmp_path, 0, 8)
        hosts[0].do("ip link set cable down; sleep 3; ip link set cable up")
        wait_for_step(tmp_path, 0, 20)
        hosts[1].do("kill -STOP $launcher; sleep 5; kill -CONT $launcher")
        assert [host.finish() for host in hosts] == [0, 0], [host.output for host in hosts]
        assert "gone" not in hosts[0].output + hosts[1].output
    check(tmp_path, [0, 1, 2], expected)


def test_the_end_of_the_lead_ends_all_and_the_checkpoint_carries_on_also_if_workers_die(
    tmp_path: Path, expected: Any
) -> None:
    script = prepare(tmp_path)
    with two_hosts(tmp_path) as hosts:
        start(hosts, script, 2, 2)
        wait_for_step(tmp_path, 0, 7)  # the checkpoint of step 4 is complete
        hosts[0].kill_launcher()
        assert hosts[1].finish(within_s=10) == 1, hosts[1].output
        assert hosts[0].finish() == 137
        for name in ("kill2.12", "kill0.24"):  # a worker of either host
            (tmp_path / name).touch()
        start(hosts, script, 2, 2)
        assert [host.finish() for host in hosts] == [0, 0], [host.output for host in hosts]
        assert "continues after step" in hosts[0].output
        assert hosts[0].output.count("was killed by signal 9") == 2
    check(tmp_path, [0, 1, 2, 3], expected)
