"""`paceline demo --kill`: a worker is killed before your eyes, and the training ends as if not.

The training is an ordinary one under `paceline run`, in `survival_training`. This file starts it,
follows it by its run folder, kills one of its workers, and compares how both trainings end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.comm.codec import decode
from paceline.demo import BATCH_ROWS, ROUNDING, STEPS_PER_EPOCH, DemoOptions
from paceline.errors import PacelineError
from paceline.observe.run_folder import RunFolder, read_events
from paceline.observe.units import count_text

KILLED_WORKER = 1
TOLD_STEPS = 25
"""Between two lines of progress."""
LOOK_S = 0.02
STEP_S = 0.03
"""So long a step takes, so that it can be watched."""
MESSAGES = "paceline: "
LONGEST_S = 120.0

Tell = Callable[[list[str]], None]


@dataclass
class KillOutcome:
    """What came of it, as plain data."""

    workers: int
    steps: int
    killed_in: int
    """The step in which the worker died."""
    messages: list[str]
    """What the launcher said."""
    is_bit_equal: bool
    """Whether all workers ended with the same parameters."""
    difference: float
    """The largest between their parameters and those of the undisturbed training."""
    folder: str

    def promises(self) -> list[tuple[str, bool]]:
        """What was checked, in a sentence each, and whether it is as promised."""
        verdict = "equal to the last bit" if self.is_bit_equal else "NOT EQUAL"
        is_same = self.difference < ROUNDING
        same = "the same" if is_same else "OTHER"
        return [
            (
                f"All {self.workers} workers end with parameters that are {verdict}.",
                self.is_bit_equal,
            ),
            (
                f"The same training that nobody disturbed gives {same} parameters: difference "
                f"{self.difference:.1e}, which is rounding.",
                is_same,
            ),
        ]


@dataclass
class Following:
    """What the run folder and the launcher have said so far."""

    folder: RunFolder
    process: subprocess.Popen[str]
    messages: list[str] = field(default_factory=list)
    told: int = 0
    """Of the messages."""

    def read_messages(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.messages.append(line.rstrip())

    def new_messages(self) -> list[str]:
        new, self.told = self.messages[self.told :], len(self.messages)
        return [line.removeprefix(MESSAGES) for line in new if line.startswith(MESSAGES)]

    def steps(self) -> dict[int, list[dict[str, Any]]]:
        """The events of every step, one for each worker that has finished it."""
        found: dict[int, list[dict[str, Any]]] = {}
        for event in read_events(self.folder):
            if event["kind"] == "step":
                found.setdefault(event["step"], []).append(event)
        return found

    def process_of(self, worker: int) -> int:
        starts = [e for e in read_events(self.folder) if e["kind"] == "start"]
        return int([event["pid"] for event in starts if event["rank"] == worker][-1])


def show(options: DemoOptions, folder: Path, tell: Tell) -> KillOutcome:
    """Train, kill, train on, compare."""
    steps = options.epochs * STEPS_PER_EPOCH
    tell(introduction(options, steps))
    run = RunFolder(folder / "killed")
    facts = [str(options.epochs), str(options.seed), str(options.shards), str(STEP_S)]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "run", "--workers", str(options.workers)]
        + ["-m", "paceline.demo.survival_training", str(run.path), *facts],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    following = Following(run, process)
    reader = threading.Thread(target=following.read_messages, daemon=True)
    reader.start()
    try:
        killed_in = follow(following, options, steps, tell)
        code = process.wait(LONGEST_S)
        reader.join(1.0)
    finally:
        process.kill()
        process.wait()
    if code:
        raise PacelineError(
            f"The training of the demo ended with {code}.",
            "\n".join(following.messages[-20:]),
            "`paceline doctor` says what this machine has.",
        )
    tell([f"  {line}" for line in following.new_messages()])
    return compare(options, steps, killed_in, following.messages, run)


def follow(following: Following, options: DemoOptions, steps: int, tell: Tell) -> int:
    """Tell of the training while it runs, and kill a worker in it; the step of the kill."""
    kill_at, told, killed_in = steps // 3, 0, 0
    for finished in progress(following):
        tell([f"  {line}" for line in following.new_messages()])
        last = max(finished, default=0)
        if last >= told + TOLD_STEPS:
            told = last // TOLD_STEPS * TOLD_STEPS
            tell([step_line(told, finished.get(told, finished[last]))])
        if last >= kill_at and not killed_in:
            killed_in, pid = last + 1, following.process_of(KILLED_WORKER)
            tell(["", f"  >>> kill -9 {pid}: that was worker {KILLED_WORKER}, in mid-step", ""])
            os.kill(pid, signal.SIGKILL)
    return killed_in


def progress(following: Following) -> Iterator[dict[int, list[dict[str, Any]]]]:
    """The steps that are finished, again and again until the training has ended."""
    deadline_s = time.monotonic() + LONGEST_S
    while following.process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
        if following.folder.events.is_dir():
            yield following.steps()


def step_line(step: int, events: list[dict[str, Any]]) -> str:
    total = sum(event["metrics"]["loss"][0] for event in events)
    rows = sum(event["metrics"]["loss"][1] for event in events)
    workers = count_text(len(events), "worker")
    return f"  step {step:>4}   {workers}   loss {total / max(1, rows):.4f}"


def introduction(options: DemoOptions, steps: int) -> list[str]:
    return [
        f"{options.workers} processes train one model together: in each of {steps} steps they share "
        f"{BATCH_ROWS} rows, and add their gradients up.",
        "One of them will be killed on the way, as a machine out of memory would do it: at once, and "
        "without a word.",
        "",
    ]


def compare(
    options: DemoOptions, steps: int, killed_in: int, messages: list[str], run: RunFolder
) -> KillOutcome:
    """Train once more, undisturbed, and compare the parameters."""
    import torch

    from paceline.demo.survival_training import train

    ends = [
        decode((run.path / f"parameters{worker}").read_bytes()) for worker in range(options.workers)
    ]
    alone = train(None, options.epochs, options.seed, options.shards, 0.0)
    return KillOutcome(
        workers=options.workers,
        steps=steps,
        killed_in=killed_in,
        messages=[line for line in messages if line.startswith(MESSAGES)],
        is_bit_equal=all(torch.equal(end[name], ends[0][name]) for end in ends for name in end),
        difference=max((ends[0][name] - alone[name]).abs().max().item() for name in alone),
        folder=str(run.path),
    )


def conclusion(outcome: KillOutcome) -> list[str]:
    return [
        "",
        *(sentence for sentence, _ in outcome.promises()),
        "",
        "Nobody went back to a checkpoint: the rows of the killed worker were shared out among the "
        "others, and its replacement got the parameters from them.",
        "Your own training does the same with: paceline run --workers 3 train.py",
        f"See when it happened: paceline report {outcome.folder}",
    ]
