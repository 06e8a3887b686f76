"""Loader processes that are forked until they live.

A forked process needs the lock on Python's list of threads before it runs any code. torch's own
threads take that lock without holding Python's global one, as when Gloo lets go of a tensor: if one
has it at the moment of a fork, nobody ever returns it in the new process (seen with Python 3.11,
once in some hundred epochs on a busy machine). So each new process says that it lives, and one that
neither says so nor computes is ended and forked again.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

from torch.utils.data import DataLoader

from paceline import env

LOOK_S, MOST_IDLE, MOST_TRIES = 1.0, 3, 5
"""A process that has said nothing is looked at so often; and is ended if it has not computed at so
many looks in a row. After so many of them it is not the fork that keeps them from speaking."""


def living_context() -> BaseContext | None:
    """For a `DataLoader` whose processes are forked; None where they are started otherwise."""
    is_forking = multiprocessing.get_start_method() == "fork"
    return _LivingContext() if is_forking else None


def let_live(loader: Any) -> None:
    """Have a script's own loader start its processes so, unless it says how they are started."""
    if isinstance(loader, DataLoader) and loader.num_workers and not loader.multiprocessing_context:
        loader.multiprocessing_context = living_context()


class _LivingPopen(Popen):
    def _launch(self, process_obj: Any) -> None:
        for _ in range(MOST_TRIES):
            if self._is_launched(process_obj):
                return
            self.close()
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        super()._launch(process_obj)  # type: ignore[misc]

    def _is_launched(self, process_obj: Any) -> bool:
        """Fork; False for a process that does not come to life."""
        reader, writer = os.pipe()
        try:
            super()._launch(_Speaking(process_obj, reader, writer))  # type: ignore[misc]
        finally:
            os.close(writer)
        try:
            return self._says_it_lives(reader)
        finally:
            os.close(reader)

    def _says_it_lives(self, reader: int) -> bool:
        idle, computed_s = 0, 0.0
        while not select.select([reader], [], [], LOOK_S)[0]:
            state, now_s = env.read_process(self.pid)
            is_idle = state in (b"S", b"Z") and now_s == computed_s
            idle, computed_s = idle + 1 if is_idle else 0, now_s
            if idle == MOST_IDLE:
                return False
        return True  # or dead, which the loader finds out


class _Speaking:
    """What multiprocessing runs in the new process."""

    def __init__(self, process: Any, reader: int, writer: int) -> None:
        self._process, self._pipe = process, (reader, writer)

    def _bootstrap(self, parent_sentinel: int) -> Any:
        reader, writer = self._pipe
        os.close(reader)
        os.write(writer, b"1")
        os.close(writer)
        return self._process._bootstrap(parent_sentinel=parent_sentinel)


class _LivingProcess(ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        return _LivingPopen(process_obj)


class _LivingContext(ForkContext):
    Process = _LivingProcess
