"""Ctrl-C and SIGTERM: the step ends, the run saves, all workers stop after the same one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.run_folder import EventReader, RunFolder, read_events, read_info, still_valid

SCRIPT = """
import sys, time, torch
from paceline import Run, RunOptions
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
steps, pause_s, save_every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
net = torch.nn.Linear(2, 1)
data = TensorDataset(torch.randn(4 * steps, 2))
run = Run(net, torch.optim.SGD(net.parameters(), lr=0.01), data, global_batch=4, epochs=1,
          folder="run", shards=2, options=RunOptions(checkpoint_every=save_every or None))
for step in run:
    with step:
        for (x,) in step.batches():
            step.backward(run.model(x).square().sum())
        time.sleep(pause_s)
print("finished", flush=True)
"""
MANY = 100_000


@contextmanager
def started(folder: Path, *command: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


def wait_for_steps(folder: Path, count: int, ranks: int = 1) -> None:
    readers = [EventReader(RunFolder(folder / "run"), rank) for rank in range(ranks)]
    seen = [0] * ranks
    deadline = time.monotonic() + 90
    while min(seen) < count:
        assert time.monotonic() < deadline, f"{count} steps did not come"
        for rank, reader in enumerate(readers):
            seen[rank] += sum(event["kind"] == "step" for event in reader.read())
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_finishes_the_step_and_saves(folder: Path, number: int, code: int) -> None:
    with started(folder, "train.py", MANY, 0.01, 0) as process:
        wait_for_steps(folder, 3)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "finished" not in output.splitlines()
    assert "Traceback" not in errors
    assert f"{signal.Signals(number).name}: finishing the step" in output
    info = read_info(RunFolder(folder / "run"))
    assert info is not None
    assert info.status == "stopped"
    saved = [e for e in read_events(RunFolder(folder / "run")) if e["kind"] == "checkpoint"]
    assert saved[-1]["step"] == info.step > 0


def test_the_second_signal_ends_a_step_that_hangs(folder: Path) -> None:
    with started(folder, "train.py", 3, 600, 0) as process:
        events = EventReader(RunFolder(folder / "run"), 0)
        deadline = time.monotonic() + 90
        while not events.read():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for line in process.stdout or []:
            if "once more" in line:
                break
        process.send_signal(signal.SIGINT)  # another one, so that it is not taken for an echo
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


def test_workers_stop_after_the_same_step_and_go_on_from_there(folder: Path) -> None:
    run = ("-m", "paceline", "run", "--nproc-per-node")
    with started(folder, *run, 2, "train.py", MANY, 0.0, 0) as process:
        wait_for_steps(folder, 5, ranks=2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    record = RunFolder(folder / "run")
    stops = [event["step"] for event in read_events(record) if event["kind"] == "stop"]
    assert len(stops) == 2
    assert stops[0] == stops[1]
    begin = stops[0] + 1
    with started(folder, "train.py", MANY, 0.01, 0) as process:  # on one worker now
        deadline = time.monotonic() + 90
        while True:
            starts = [e for e in read_events(record) if e["kind"] == "start"]
            later = [e for e in read_events(record) if e["kind"] == "step" and e["step"] >= begin]
            if len(starts) == 3 and later:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert starts[-1]["step"] == stops[0]
    steps = [e["step"] for e in still_valid(read_events(record)) if e["kind"] == "step"]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1))


def test_a_signal_to_one_worker_stops_all(folder: Path) -> None:
    run = ("-m", "paceline", "run", "--nproc-per-node")
    with started(folder, *run, 2, "train.py", MANY, 0.0, 0) as process:
        wait_for_steps(folder, 5, ranks=2)
        record = RunFolder(folder / "run")
        starts = [event for event in read_events(record) if event["kind"] == "start"]
        os.kill(next(event["pid"] for event in starts if event["rank"] == 1), signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode != 0
    stops = [event["step"] for event in read_events(record) if event["kind"] == "stop"]
    assert len(stops) == 2
    assert stops[0] == stops[1]


def test_after_a_kill_the_run_goes_on_from_its_last_checkpoint(folder: Path) -> None:
    with started(folder, "train.py", 40, 0.02, 5) as process:
        wait_for_steps(folder, 12)
        process.kill()
        process.communicate()
    with started(folder, "train.py", 40, 0.0, 5) as process:
        output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert "finished" in output
    record = RunFolder(folder / "run")
    events = read_events(record)
    begun = [event["step"] for event in events if event["kind"] == "start"]
    assert begun[1] in (5, 10, 15, 20, 25, 30, 35)
    steps = [event["step"] for event in still_valid(events) if event["kind"] == "step"]
    assert steps == list(range(1, 41))
