"""Workers that stand still: which of them is stopped, silent or hangs, seen from the launcher.

A stall window is looked at `BEATS` times. Looks are counted, not timed: a launcher that was stopped
itself blames no worker. A worker says with each beat whether it trains, waits for the others in a
collective, or has stood still in its own code all the time that `--stall-end` allows: where one
waits, on whatever machine, those that hang are what it waits for.

    trains --(nothing for --stall-end, while another waits)--> its stack is dumped --> accused

Where all of them have waited for as long, no worker is at fault that a replacement would help: the
workers are not at the same collective, and the run ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from paceline.launcher.deaths import StopReason
from paceline.launcher.process import WorkerProcess
from paceline.launcher.worker import BEATS, DUMP_SIGNAL, HANGS, WAITS, stack_file
from paceline.launcher.workers import Workers

# One that was stopped, or silent, at so many looks is ended.
MOST_LOOKS = 6
# Under load a process may be silent for a while without being at fault.
LEAST_SILENCE_S = 5.0
STACK_BYTES = 2**16


class StallJudge:
    """Looks at workers, and accuses those that the others would wait for for good."""

    def __init__(self, stall_s: float, end_s: float) -> None:
        self.look_s = stall_s / BEATS
        self._end_s = end_s
        self._most_silent = max(MOST_LOOKS, LEAST_SILENCE_S / self.look_s)
        self._did_all_wait = False

    def look(self, workers: Sequence[WorkerProcess], everyone: Workers) -> None:
        """Look at all, of whom one may be what another waits for, here or on another machine."""
        is_awaited = everyone.is_awaited(any(worker.word == WAITS for worker in workers))
        for worker in workers:
            worker.look(self.look_s)
            hangs = is_awaited and worker.word == HANGS
            if worker.looks_stopped >= MOST_LOOKS:
                seconds = worker.looks_stopped * self.look_s
                worker.accused = f"was stopped by a signal for {seconds:.3g} s"
            elif not hangs and worker.looks_silent < self._most_silent - 1:
                worker.is_dumped = False
            elif not worker.is_dumped:
                worker.is_dumped = True  # and is ended at the next look
                _dump(worker)
            elif hangs:
                seconds = self._end_s
                worker.accused = f"was hanging in its own code for {seconds:.3g} s while others "
                worker.accused += "waited for it"
            elif worker.looks_silent >= self._most_silent:
                seconds = worker.looks_silent * self.look_s
                worker.accused = f"was silent for {seconds:.3g} s"
            if worker.accused:
                worker.accused += ", so the launcher ended it"
                worker.send(signal.SIGKILL)

    def find_deadlock(
        self, workers: Sequence[WorkerProcess], everyone: Workers
    ) -> StopReason | None:
        """What to end the run for if all workers wait for each other; asked at every look."""
        before, self._did_all_wait = self._did_all_wait, all(each.word == WAITS for each in workers)
        places = []
        for worker in workers if self._did_all_wait else ():
            if before:
                places.append(f"Worker {worker.rank} was at:\n{main_thread(read_stack(worker))}")
            else:
                _dump(worker)
        if len(places := everyone.gather_places(places)) < 2:
            return None
        text = f"all {len(places)} workers have waited for each other for {self._end_s:.3g} s"
        end = StopReason(text=text, traceback="\n\n".join(places))
        everyone.pass_on(end)
        return end


def _dump(worker: WorkerProcess) -> None:
    """Have a worker write down where its threads are."""
    if DUMP_SIGNAL and worker.beats:  # it runs code of ours, which listens to that
        os.kill(worker.pid, DUMP_SIGNAL)


def read_stack(worker: WorkerProcess) -> str:
    """Where the threads of a worker were before it was ended, if it could tell."""
    try:
        with open(stack_file(worker.error_file), "rb") as file:
            return file.read(STACK_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def main_thread(stack: str) -> str:
    """Of all threads the one that runs the script."""
    return stack.rpartition("\n\n")[2]
