"""Ctrl-C, SIGTERM and SIGHUP: the step ends, the run saves, all workers stop after the same one."""

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
from runs import still_valid
from sentences import says

from paceline.files.run_folder import RunFolder, read_events, read_info

SCRIPT = """
import sys, time, torch
from paceline import Run, RunOptions
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
steps, pause_s, save_every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
net = torch.nn.Linear(2, 1)
data = TensorDataset(torch.randn(4 * steps, 2))
reads = {"dataset": data, "shards": 2, "loader_workers": int(sys.argv[4])}
if "own" in sys.argv:
    reads = {"loader": torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)}
run = Run(net, torch.optim.SGD(net.parameters(), lr=0.01), global_batch=4, epochs=1,
          folder="run", options=RunOptions(checkpoint_every=save_every or None), **reads)
for step in run:
    with step:
        for (x,) in step.batches():
            step.backward(run.model(x).square().sum(), reduction="sum")
        time.sleep(pause_s)
    if "prints" in sys.argv:
        print(step.number, flush=True)
print("finished", flush=True)
"""
MANY = 20_000


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


def count_starts(folder: Path) -> int:
    """How often the run has been started, by what rank 0 has recorded."""
    events = read_events(RunFolder(folder / "run"))
    return sum(event["kind"] == "start" and event["rank"] == 0 for event in events)


def wait_for_steps(folder: Path, last: int, ranks: int = 1, starts: int = 0) -> None:
    """Until every rank has applied step `last` in a start that comes after `starts` others."""
    deadline = time.monotonic() + 90
    seen = [0] * ranks
    while min(seen) < last:
        assert time.monotonic() < deadline, f"step {last} did not come"
        time.sleep(0.01)
        seen, begun = [0] * ranks, [0] * ranks
        for event in read_events(RunFolder(folder / "run")):
            rank = event["rank"]
            begun[rank] += event["kind"] == "start"
            if begun[rank] > starts and event["kind"] != "start":
                seen[rank] = max(seen[rank], event.get("step", 0))


def wait_for_events(folder: Path, kind: str) -> None:
    deadline = time.monotonic() + 90
    while kind not in {event["kind"] for event in read_events(RunFolder(folder / "run"))}:
        assert time.monotonic() < deadline, f"no event of the kind {kind} came"
        time.sleep(0.01)


def stopped_at(
    folder: Path, number: int, *command: object, after: int, ranks: int = 1, to_all: bool = False
) -> int:
    """Start, send a signal after a step, and return the exit code; the run has been saved."""
    starts = count_starts(folder)
    with started(folder, *command) as process:
        wait_for_steps(folder, after, ranks, starts)
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert "finished" not in output.splitlines()
    assert "Traceback" not in errors
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    assert says(output, f"{name}: finishing", "step")
    assert_all_stopped_together(folder, ranks)
    return process.returncode


def assert_all_stopped_together(folder: Path, ranks: int) -> None:
    record = RunFolder(folder / "run")
    info, events = read_info(record), read_events(record)
    assert info is not None
    assert info.status == "stopped"
    stops = [event["step"] for event in events if event["kind"] == "stop"][-ranks:]
    assert stops == [info.step] * ranks
    saved = [event["step"] for event in events if event["kind"] == "checkpoint"]
    assert saved[-1] == info.step > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_of_a_loader_of_ones_own_leave_a_signal_to_the_run(
    folder: Path, number: int
) -> None:
    """Workers take several steps more until they agree to stop, and batches for them."""
    script = ("-m", "paceline", "run", "--workers", 2, "train.py", MANY, 0.01, 5, 0, "own")
    with started(folder, *script) as process:
        wait_for_steps(folder, 12, 2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert_all_stopped_together(folder, 2)


def test_a_run_that_is_hung_up_and_interrupted_loses_nothing(folder: Path) -> None:
    script = ("train.py", MANY, 0.01, 5, 2)  # with two processes that load data
    assert stopped_at(folder, signal.SIGHUP, *script, after=12, to_all=True) == 129
    assert stopped_at(folder, signal.SIGINT, *script, after=18, to_all=True) == 130
    events = read_events(RunFolder(folder / "run"))
    begins = [event["step"] for event in events if event["kind"] == "start"]
    stops = [event["step"] for event in events if event["kind"] == "stop"]
    assert begins == [0, stops[0]]
    steps = [event["step"] for event in still_valid(events) if event["kind"] == "step"]
    assert steps == list(range(1, steps[-1] + 1))


def test_the_second_signal_ends_a_step_that_hangs(folder: Path) -> None:
    with started(folder, "train.py", 3, 600, 0, 0) as process:
        wait_for_events(folder, "start")
        process.send_signal(signal.SIGTERM)
        for line in process.stdout or []:
            if "once more" in line:
                break
        process.send_signal(signal.SIGINT)  # another one, so that it is not taken for an echo
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT


def pids_of(folder: Path) -> dict[int, int]:
    """By rank, of the last start."""
    starts = [e for e in read_events(RunFolder(folder / "run")) if e["kind"] == "start"]
    return {event["rank"]: event["pid"] for event in starts}


def test_without_survival_all_workers_stop_after_the_same_step_if_one_gets_the_signal(
    folder: Path,
) -> None:
    run = ("-m", "paceline", "run", "--nproc-per-node", 2, "--no-survive",
           "train.py", MANY, 0.02, 0, 1)  # fmt: skip
    with started(folder, *run) as process:
        wait_for_steps(folder, 5, ranks=2)
        os.kill(pids_of(folder)[1], signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143
    assert_all_stopped_together(folder, ranks=2)


@pytest.mark.parametrize("to_worker", [True, False])
def test_a_hangup_is_the_reason_everywhere(to_worker: bool, folder: Path) -> None:
    run = ("-m", "paceline", "run", "--workers", 2, "train.py", MANY, 0.02, 0, 0)
    with started(folder, *run) as process:
        wait_for_steps(folder, 5, ranks=2)
        os.kill(pids_of(folder)[1] if to_worker else process.pid, signal.SIGHUP)
        _, errors = process.communicate(timeout=60)
    assert_stopped_by("SIGHUP", folder, process.returncode, errors)


def test_a_reader_that_goes_stops_a_run_that_is_saved(folder: Path) -> None:
    run = ("-m", "paceline", "run", "--workers", 2, "train.py", MANY, 0.02, 0, 0, "prints")
    with started(folder, *run) as process:
        wait_for_steps(folder, 5, ranks=2)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
        process.stdout = None
    assert_stopped_by("SIGPIPE", folder, process.returncode, errors)


def test_a_signal_that_no_run_knows_stops_it_as_well(folder: Path) -> None:
    flags = ("--workers", 2, "--signals-to-handle", "SIGTERM,SIGUSR1")
    with started(folder, "-m", "paceline", "run", *flags, "train.py", MANY, 0.02, 0, 0) as process:
        wait_for_steps(folder, 5, ranks=2)
        process.send_signal(signal.SIGUSR1)
        _, errors = process.communicate(timeout=60)
    assert_stopped_by("SIGUSR1", folder, process.returncode, errors)


def assert_stopped_by(name: str, folder: Path, code: int, errors: str) -> None:
    """On the terminal, in `run.json`, in the last event and in the exit code."""
    assert code == 128 + signal.Signals[name], errors
    assert says(errors, f"stopped by {name}")
    assert_all_stopped_together(folder, ranks=2)
    info = read_info(record := RunFolder(folder / "run"))
    assert info is not None
    reasons = {event["reason"] for event in read_events(record) if event["kind"] == "stop"}
    assert reasons == {info.reason} == {f"stopped by {name}"}


def test_workers_that_are_all_asked_to_leave_stop_a_run_that_is_saved(folder: Path) -> None:
    run = ("-m", "paceline", "run", "--workers", 2, "train.py", MANY, 0.02, 0, 1)
    with started(folder, *run) as process:
        wait_for_steps(folder, 5, ranks=2)
        for pid in pids_of(folder).values():
            os.kill(pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "SIGTERM" in errors
    info = read_info(RunFolder(folder / "run"))
    assert info is not None
    assert info.status == "stopped"
    saved = [e["step"] for e in read_events(RunFolder(folder / "run")) if e["kind"] == "checkpoint"]
    assert saved[-1] == info.step > 0
