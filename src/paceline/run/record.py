"""What a run says while it runs: events to its folder, pictures to the terminal.

Every worker writes its own event file. Rank 0 also keeps `run.json` and draws. Without a folder
only the terminal is left.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import paceline
from paceline.checkpoint import Written
from paceline.observe.run_folder import EventWriter, RunFolder, RunInfo, write_info
from paceline.observe.stragglers import Blame
from paceline.policy import NoiseEstimate
from paceline.progress import Progress
from paceline.run.metrics import Sums

INFO_PERIOD_S = 2.0
"""How old the step in `run.json` may be."""


class Record:
    """One worker's part of a run's record.

    Invariant: nothing here fails the training; a disk that is full or gone is said once.
    """

    def __init__(self, folder: RunFolder | None, rank: int, progress: str, info: RunInfo) -> None:
        self.info = info
        self._folder, self._rank = folder, rank
        self._progress_mode = progress
        self._progress: Progress | None = None
        self._events = None if folder is None else EventWriter(folder, rank)
        self._info_due_s = 0.0
        self._has_failed = False
        self._step = 0
        self._advice = ""

    def start(self, step: int, lines: list[str]) -> None:
        """The loop begins, after `step` steps."""
        info = self.info
        self._step = step
        if self._rank == 0:
            self._progress = Progress(self._progress_mode)
            self._progress.start(
                name=info.name,
                workers=info.workers,
                epochs=info.epochs,
                steps=info.steps,
                steps_per_epoch=info.steps_per_epoch,
                global_batch=info.global_batch,
                step=step,
                lines=[*info.policy, *lines],
            )
        facts = {"pid": os.getpid(), "host": info.host, "device": info.device}
        self.write("start", size=info.workers, step=step, **facts)
        self.update(status="running", step=step)

    def step(
        self, step: int, epoch: int, samples: int, metrics: Callable[[], Mapping[str, float]]
    ) -> None:
        """`step` steps are applied. What the step was like is written later; see `step_event`."""
        self._step = step
        if self._progress is not None:
            self._progress.step(step, epoch=epoch, samples=samples, metrics=metrics)
        if self._rank == 0 and time.monotonic() >= self._info_due_s:
            self.update(step=step)

    def step_event(self, facts: Mapping[str, Any], sums: Sums) -> None:
        self.write("step", **facts, metrics=sums)

    def epoch(
        self, epoch: int, step: int, metrics: Mapping[str, float], seconds: float, samples: int
    ) -> None:
        facts = {"metrics": metrics, "seconds": seconds, "samples": samples}
        self.write_first("epoch", epoch=epoch, step=step, **facts)
        if self._progress is not None:
            self._progress.epoch(epoch, metrics, seconds=seconds, samples=samples)
        self.update(step=step)

    def evaluation(
        self, epoch: int, step: int, metrics: Mapping[str, float], seconds: float, samples: int
    ) -> None:
        facts = {"metrics": metrics, "seconds": seconds, "samples": samples}
        self.write_first("evaluation", epoch=epoch, step=step, **facts)
        if self._progress is not None:
            self._progress.evaluation(epoch, metrics)

    def checkpoint(self, written: Written) -> None:
        self.write_first(
            "checkpoint",
            step=written.step,
            name=written.name,
            bytes=written.bytes,
            seconds=written.seconds,
            metric=written.metric,
        )

    def blame(self, blame: Blame) -> None:
        """A worker holds the others up, as is known since the step under way."""
        step = self._step + 1
        self.write_first(
            "blame",
            step=step,
            slow_rank=blame.rank,
            phase=blame.phase,
            slower_by_s=blame.slower_by_s,
            steps=blame.steps,
        )
        self.say(f"Step {step}: {blame}", "warning")

    def noise(self, step: int, estimate: NoiseEstimate) -> None:
        """Keep every estimate; the last one is said when the run is over."""
        facts = {"noise_scale": estimate.noise_scale, "advice": estimate.advice}
        self.write_first("noise", step=step, **facts)
        self._advice = estimate.advice

    def message(self, text: str, level: str = "info") -> None:
        """Say something on rank 0's terminal, and keep it."""
        self.write_first("message", text=text, level=level)
        self.say(text, level)

    def say(self, text: str, level: str = "info") -> None:
        """Say something on rank 0's terminal; may be called by a signal handler."""
        if self._progress is not None:
            self._progress.message(text, level)

    def stop(self, step: int, status: str, reason: str) -> None:
        """The loop is over."""
        self.write("stop", step=step, reason=reason)
        self.update(status=status, step=step)
        if self._progress is not None:
            lines = ["" if status == "finished" else reason, self._advice]
            self._progress.finish(status, lines=[line for line in lines if line])
            self._progress = None
        if self._events is not None:
            self._events.close()  # another event opens it again

    def write(self, kind: str, **facts: Any) -> None:
        if self._events is not None:
            self._events.write(kind, **facts)

    def write_first(self, kind: str, **facts: Any) -> None:
        if self._rank == 0:
            self.write(kind, **facts)

    def update(self, **changes: Any) -> None:
        """Change `run.json`; only rank 0 has one."""
        self._info_due_s = time.monotonic() + INFO_PERIOD_S
        self.info = dataclasses.replace(self.info, updated=time.time(), **changes)
        if self._rank != 0 or self._folder is None:
            return
        try:
            write_info(self._folder, self.info)
        except OSError as error:
            if not self._has_failed:
                self.say(f"{self._folder.info} cannot be written: {error}.", "warning")
            self._has_failed = True


def versions() -> dict[str, str]:
    return {
        "paceline": paceline.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def host() -> str:
    return socket.gethostname()
