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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.comm.codec import decode
from paceline.demo import BATCH_ROWS, ROUNDING, STEPS_PER_EPOCH, DemoOptions
from paceline.errors import PacelineError
from paceline.observe.run_folder import Event, RunFolder, open_plain, parse_event
from paceline.observe.units import count_text

if TYPE_CHECKING:
    from torch import Tensor

KILLED_WORKER = 1
TOLD_STEPS = 10
"""Between two lines of progress."""
LOOK_S = 0.05
STEP_S = 0.03
"""So long a step takes, so that it can be watched."""
MESSAGES = "paceline: "
LONGEST_S = 300.0

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
    workers: int
    """How many train now."""
    messages: list[str] = field(default_factory=list)
    told: int = 0
    """Of the messages."""
    step: int = 0
    """The newest that somebody has finished."""
    sums: dict[int, list[float]] = field(default_factory=dict)
    """By step: the losses of its rows so far, added up, and how many rows these are."""
    pids: dict[int, int] = field(default_factory=dict)
    """The process of each worker."""
    read: dict[int, int] = field(default_factory=dict)
    """How many bytes of each worker's events."""

    def read_messages(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.messages.append(line.rstrip())

    def new_messages(self) -> list[str]:
        new, self.told = self.messages[self.told :], len(self.messages)
        return [line.removeprefix(MESSAGES) for line in new if line.startswith(MESSAGES)]

    def look(self) -> None:
        """Read what was written since."""
        for worker in self.folder.event_ranks():
            with open_plain(self.folder.events_of(worker)) as file:
                file.seek(self.read.get(worker, 0))
                lines = [line for line in file.readlines() if line.endswith(b"\n")]
            self.read[worker] = self.read.get(worker, 0) + sum(map(len, lines))
            for event in filter(None, map(parse_event, lines)):
                self._take(worker, event)

    def _take(self, worker: int, event: Event) -> None:
        match event:
            case {"kind": "start", "pid": int(pid)}:
                self.pids[worker] = pid
            case {"kind": "generation", "workers": int(workers)}:
                self.workers = workers
            case {"kind": "step", "step": int(step), "metrics": {"loss": [loss, rows]}}:
                self.step = max(step, self.step)
                total = self.sums.setdefault(step, [0.0, 0.0])
                total[0] += loss
                total[1] += rows


def show(options: DemoOptions, folder: Path, tell: Tell) -> KillOutcome:
    """Train, kill, train on, compare."""
    steps = options.epochs * STEPS_PER_EPOCH
    tell(introduction(options, steps))
    run = RunFolder(folder / "killed")
    facts = [str(options.epochs), str(options.seed), str(options.shards), str(STEP_S)]
    launcher = [sys.executable, "-m", "paceline", "run", "--workers", str(options.workers)]
    process = subprocess.Popen(
        [*launcher, "-m", "paceline.demo.survival_training", str(run.path), *facts],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    following = Following(run, process, options.workers)
    reader = threading.Thread(target=following.read_messages, daemon=True)
    reader.start()
    try:
        with ThreadPoolExecutor(1) as beside:
            undisturbed = beside.submit(train_undisturbed, options)
            killed_in = follow(following, steps, tell)
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
    tell([*(f"  {line}" for line in following.new_messages()), f"  step {steps:>4}   the last"])
    return compare(options, steps, killed_in, following.messages, run, undisturbed)


def train_undisturbed(options: DemoOptions) -> dict[str, Tensor]:
    """The parameters that the same training ends with in one process."""
    import torch

    from paceline.demo.survival_training import train

    torch.set_num_threads(1)  # for a model of this size others would only wait
    return train(None, options.epochs, options.seed, options.shards, 0.0)


def follow(following: Following, steps: int, tell: Tell) -> int:
    """Tell of the training while it runs, and kill a worker in it; the step of the kill."""
    told, killed_in = 0, 0
    deadline_s = time.monotonic() + LONGEST_S
    while following.process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)
        following.look()
        tell([f"  {line}" for line in following.new_messages()])
        if following.step > told + TOLD_STEPS:  # all have written of the step before
            told += TOLD_STEPS
            total, rows = following.sums.get(told, [0.0, 0.0])
            workers = count_text(following.workers, "worker")
            tell([f"  step {told:>4}   {workers}   loss {total / max(1.0, rows):.4f}"])
        if following.step >= steps // 3 and not killed_in:
            killed_in, pid = following.step + 1, following.pids[KILLED_WORKER]
            tell(["", f"  >>> kill -9 {pid}: that was worker {KILLED_WORKER}, in mid-step", ""])
            os.kill(pid, signal.SIGKILL)
    return killed_in


def introduction(options: DemoOptions, steps: int) -> list[str]:
    return [
        f"{options.workers} processes train one model together: in each of {steps} steps they "
        f"share {BATCH_ROWS} rows, and add their gradients up.",
        "One of them will be killed on the way, as a machine out of memory would do it: at once, "
        "and without a word.",
        "",
    ]


def compare(
    options: DemoOptions,
    steps: int,
    killed_in: int,
    messages: list[str],
    run: RunFolder,
    undisturbed: Future[dict[str, Tensor]],
) -> KillOutcome:
    """Compare the parameters that both trainings end with."""
    import torch

    ends = [
        decode((run.path / f"parameters{worker}").read_bytes()) for worker in range(options.workers)
    ]
    alone = undisturbed.result()
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
