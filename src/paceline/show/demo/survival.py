"""`paceline demo --kill`: kills a worker during training, and checks that nothing is lost.

The training is an ordinary one under `paceline run`, that of `training`. This file starts it,
follows it through its run folder, kills one of its workers, and compares the result with that of an
undisturbed training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError, UsageError
from paceline.files import RunFolder, decode
from paceline.show.demo import (
    BATCH_ROWS,
    STEPS_PER_EPOCH,
    DemoOptions,
    PrintLines,
    check_equal,
    check_same,
)
from paceline.show.report.collect import RunReader
from paceline.telemetry import count_text

KILLED_WORKER = 1
SHOWN_STEPS = 10
"""How many steps there are between two lines of progress."""
POLL_S = 0.05
STEP_S = 0.03
"""How long a step takes, slow enough to be watched."""
MESSAGES = "paceline: "
LONGEST_S = 300.0


@dataclass
class KillOutcome:
    """The results, as plain data."""

    workers: int
    steps: int
    killed_in: int
    """The step in which the worker died."""
    messages: list[str]
    """What the launcher printed."""
    is_bit_equal: bool
    """Whether all workers ended with the same parameters."""
    difference: float
    """The largest difference from the parameters of the undisturbed training."""
    folder: str

    def checks(self) -> list[tuple[str, bool]]:
        """Each check as a sentence, and whether it has passed."""
        return [
            check_equal(f"The parameters of all {self.workers} workers", self.is_bit_equal),
            check_same("The same training without a kill gives", self.difference),
        ]

    def conclusion(self) -> list[str]:
        return [
            "",
            *(sentence for sentence, _ in self.checks()),
            "",
            "No worker went back to a checkpoint: the rows of the killed worker were divided among "
            "the others, and its replacement got the parameters from them.",
            "Your own training does the same with: paceline run --workers 3 train.py",
            f"To see when it happened: paceline report {self.folder}",
        ]


def show(options: DemoOptions, folder: Path, print_lines: PrintLines) -> KillOutcome:
    """Train, kill a worker, continue, compare."""
    steps = options.epochs * STEPS_PER_EPOCH
    print_lines(introduction(options, steps))
    run = RunFolder(folder / "killed")
    numbers = map(str, (STEP_S, options.workers, options.epochs, options.seed))
    launcher = [sys.executable, "-m", "paceline", "run", "--workers", str(options.workers)]
    process = subprocess.Popen(
        [*launcher, "-m", "paceline.show.demo.training", str(run.path), *numbers],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    from paceline.show.demo.training import are_bit_equal, largest_difference, train_alone
    from paceline.show.trace.task import built_in

    said: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=said.extend, args=[process.stderr], daemon=True)
    reader.start()
    try:
        with ThreadPoolExecutor(1) as beside:
            undisturbed = beside.submit(train_alone, built_in(options.seed), options)
            killed_in = follow(process, run, said, steps, print_lines)
            code = process.wait(LONGEST_S)
        reader.join(1.0)
    finally:
        process.kill()
        process.wait()
    if code:
        raise PacelineError(
            f"The training of the demo ended with {code}.",
            "".join(said[-20:]),
            "Run `paceline doctor` to check this machine.",
        )
    ends = [decode((run.path / f"parameters{n}").read_bytes()) for n in range(options.workers)]
    return KillOutcome(
        workers=options.workers,
        steps=steps,
        killed_in=killed_in,
        messages=[line.rstrip() for line in said if line.startswith(MESSAGES)],
        is_bit_equal=are_bit_equal(ends),
        difference=largest_difference(ends[0], undisturbed.result()),
        folder=str(run.path),
    )


def follow(
    process: subprocess.Popen[str],
    run: RunFolder,
    said: list[str],
    steps: int,
    print_lines: PrintLines,
) -> int:
    """Print the progress of the training, and kill a worker; returns the step of the kill.

    `said` has the launcher's lines; another thread appends to it.
    """
    reader, shown, read, killed_in = None, 0, 0, 0
    deadline_s = time.monotonic() + LONGEST_S
    is_running = True
    while is_running and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        is_running = process.poll() is None  # before the last look
        new, read = said[read:], len(said)
        lines = [line for line in new if line.startswith(MESSAGES)]
        print_lines([f"  {line.removeprefix(MESSAGES).rstrip()}" for line in lines])
        with suppress(UsageError):  # the run folder is still empty
            reader = reader or RunReader(run.path)
            reader.read(has_timeline=False)
        if reader is None:
            continue
        data = reader.data
        if data.steps > shown + SHOWN_STEPS:  # all workers have written the step before
            shown += SHOWN_STEPS
            loss = data.metrics["loss"].mean_at(shown)
            changes = [event["workers"] for event in data.events["generation"]]
            workers = count_text([data.workers, *changes][-1], "worker")
            print_lines([f"  step {shown:>4}   {workers}   loss {loss:.4f}"])
        # At a third: early enough for the replacement to train, late enough to have something to
        # lose.
        if data.steps >= steps // 3 and not killed_in:
            killed_in, pid = data.steps + 1, data.ranks[KILLED_WORKER].pid
            print_lines(
                ["", f"  >>> kill -9 {pid}: that was worker {KILLED_WORKER}, in mid-step", ""]
            )
            os.kill(pid, signal.SIGKILL)
    print_lines([f"  step {steps:>4}   the last"])
    return killed_in


def introduction(options: DemoOptions, steps: int) -> list[str]:
    return [
        f"{options.workers} processes train one model together: in each of {steps} steps they "
        f"share {BATCH_ROWS} rows, and add up their gradients.",
        "One of them will be killed during training, as the kernel does when memory runs out: at "
        "once, and without a message.",
        "",
    ]
