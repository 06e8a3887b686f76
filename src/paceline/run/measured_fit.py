"""What `paceline fit` has a run find out: memory and speed of each size of a piece.

The run trains as ever, a few steps with each size: whole shards, then half of that, and so on.
Every worker writes what it has measured; the command ends the run when all of them are done.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paceline.errors import FitError, UsageError
from paceline.files import replace_file
from paceline.run.fit import Fit

STEPS = 4
"""With each size; the first is not counted, in which memory is found."""
MOST_SIZES = 5
"""Of sizes that fit, so many are measured: smaller ones are slower."""


class MeasuredFit(Fit):
    """Takes another size every few steps, the same on all workers.

    Invariant: the size is a function of the step's number and of those that did not fit.
    """

    def __init__(self, folder: Path, *args: Any) -> None:
        super().__init__(*args)
        self._folder, self._rows = folder, 0
        self._found: list[dict[str, Any]] = []
        self._is_done = False
        self._steps: list[tuple[int, float]] = []
        """Of this size: the number of each step, and when it began."""

    def _grow(self, step: int) -> None:
        """A step begins: once enough are measured, take the next size, or end."""
        if not self._rows:
            self._rows = self.size = self.usual_rows()
            self._reset_peak()
        if self._is_done or (self._steps and self._steps[-1][0] == step):
            return  # or another turn of it
        self._wait()
        self._steps.append((step, time.perf_counter()))
        if len(self._steps) <= STEPS:
            return
        seconds = self._steps[-1][1] - self._steps[1][1]
        self._note(memory=self._peak(), samples_per_s=(STEPS - 1) * self._global_batch / seconds)
        size = self.size or self._rows
        if size == 1 or len([each for each in self._found if each["fits"]]) == MOST_SIZES:
            self._write(is_done=True)
            return
        self.size, self._steps = -(-size // 2), []
        try:
            self.refuse_statistics()
        except UsageError as error:
            self.size = size
            self._write(error.where, is_done=True)
        self._grow(step)
        self._reset_peak()

    def shrink(self, step: int, samples: int, busy: int) -> None:
        self._note(memory=None, samples_per_s=None)
        self._steps = []
        try:
            super().shrink(step, samples, busy)
        except (FitError, UsageError) as error:
            self._write(error.where, is_done=True)
            raise
        self._reset_peak()

    def _note(self, **measured: Any) -> None:
        fits = measured["samples_per_s"] is not None
        self._found.append({"piece": self.size, "fits": fits, **measured})
        self._write()

    def _write(self, why: str = "", *, is_done: bool = False) -> None:
        self._is_done = is_done
        facts = {"rows": self._rows, "device": self._device.type, "is_done": is_done, "why": why}
        text = json.dumps({**facts, "sizes": self._found})
        replace_file(self._folder / f"rank{self._members.rank}.json", [text])

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()

    def _reset_peak(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).reset_peak_memory_stats()
            return
        with suppress(OSError):  # elsewhere than on Linux
            # 5 sets the peak that /proc/self/status gives as VmHWM to what is used now.
            Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int | None:
        """The most bytes that were allocated on the device; of the process, on a CPU."""
        if self._device.type != "cpu":
            return int(torch.get_device_module(self._device).max_memory_allocated())
        with suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        return None
