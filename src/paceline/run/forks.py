"""Loader processes that are forked until they live, and again where one is killed.

A forked process needs the lock on Python's list of threads before it runs any code. torch's own
threads take that lock without holding Python's global one, as when Gloo lets go of a tensor: if one
has it at the moment of a fork, it is never released in the new process (seen with Python 3.11,
once in some hundred epochs on a busy machine). So each new process says that it lives, and one that
neither says so nor computes is ended and forked again.

One that is killed later, as for want of memory, has no batch lost: all processes are forked again,
and begin with the first batch that was not given. torch's own answer is an error, which its signal
handler raises wherever the training is; and one that is killed while a batch is fetched from it
looks like a broken connection.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import tee
from multiprocessing import connection
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from threading import current_thread, main_thread
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader

from paceline import env
from paceline.torch_private import end_processes, find_processes, find_queue, raise_at_death

LOOK_S, MOST_IDLE, MOST_TRIES = 1.0, 3, 5
"""A process that has said nothing is looked at so often; and is ended if it has not computed at so
many looks in a row. After so many of them it is not the fork that keeps them from speaking."""
MOST_DEATHS = 3
"""So often in a row at one batch it is not chance that kills a loader's process."""
_MEANT = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_END = object()
_NOTICED_S = 1.0
"""So long after its connection breaks may it take until a process is found dead."""


class LoaderKilled(RuntimeError):
    """A process that loads batches was killed by a signal. Begins with torch's words."""

    number = 0
    """Of the signal, where it is known."""

    @classmethod
    def of(cls, process: Any) -> LoaderKilled:
        number = -process.exitcode
        name = signal.Signals(number).name
        error = cls(f"DataLoader worker (pid {process.pid}) was killed by signal {name}")
        error.number = number
        return error


@contextmanager
def _deaths_named(batches: Any) -> Iterator[None]:
    """Inside, the death of a process that loads these batches is an error that names it."""
    if not (processes := find_processes(batches)):
        yield
        return
    watch_processes(batches)
    try:
        yield
    except Exception as error:
        if (dead := _find_killed(processes, error)) is None:
            raise
        raise LoaderKilled.of(dead) from error


def watch_processes(batches: Any) -> None:
    """Have nothing raise outside of a wait for one of these batches, if processes load them."""
    processes = find_processes(batches)
    if processes and not isinstance(batches._data_queue, _Watched):
        batches._data_queue = _Watched(batches, processes)


class _Watched:
    """The queue of a loader's batches: torch's handler raises in a wait for one, and nowhere else.

    An error must be raised there. One that is killed while it writes a long batch leaves a part
    of it, and the rest would be waited for as long as another process could write it.
    """

    def __init__(self, batches: Any, processes: list[Any]) -> None:
        self._batches, self._queue, self._processes = ref(batches), batches._data_queue, processes
        raise_at_death(batches, False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, timeout: float | None = None) -> Any:
        batches = self._batches()
        try:
            try:
                raise_at_death(batches, current_thread() is main_thread())  # that it raises in
                if (dead := _find_killed(self._processes)) is not None:
                    raise LoaderKilled.of(dead)
                return self._queue.get(timeout=timeout)
            finally:
                raise_at_death(batches, False)
        except Exception as error:
            raise_at_death(batches, False)  # where the handler has interrupted just that
            _find_killed(self._processes, error)  # so that torch finds it dead, and no other fault
            raise


def take(batches: Iterator[Any], default: Any = None) -> Any:
    """The next batch, or `default` where there is none."""
    with _deaths_named(batches):
        return next(batches, default)


def _find_killed(processes: list[Any], error: Exception | None = None) -> Any:
    """One that a signal has ended; None where there is none, soon after this error either."""
    is_broken = isinstance(error, OSError | EOFError)
    if is_broken and all(process.exitcode is None for process in processes):
        ended = connection.wait([process.sentinel for process in processes], _NOTICED_S)
        for process in processes:
            if process.sentinel in ended:  # its files are closed before it can be seen to be dead
                process.join(_NOTICED_S)
    return next((each for each in processes if (each.exitcode or 0) < 0), None)


class LivingBatches:
    """The batches of items, in their order, whatever becomes of the processes that load them."""

    def __init__(
        self, make: Callable[[Iterator[Any]], Iterable[Any]], items: Iterable[Any]
    ) -> None:
        """`make` gives a loader of the items, of which batches give one after the other."""
        self._make, self._left, self._deaths = make, iter(items), 0
        self._batches = self._begin()

    def qsize(self) -> int | None:
        """How many batches wait here; None where they cannot be counted."""
        queue = find_queue(self._batches)
        return None if queue is None else int(queue.qsize())

    def end(self) -> None:
        """Kill the processes: an error that is kept may keep what they belong to."""
        if find_processes(self._batches):
            end_processes(self._batches)

    def _begin(self) -> Iterator[Any]:
        """Load from the first batch on that was not given."""
        while True:
            # What processes read ahead is still in `_left`, should they have to begin again.
            ahead, self._left = tee(self._left)
            try:
                batches = iter(self._make(ahead))
                watch_processes(batches)
            except RuntimeError as error:  # of torch's handler, before it could be lost
                if "DataLoader worker (pid" not in str(error):
                    raise
                self._survive(LoaderKilled(str(error).strip(". ")))
            else:
                return batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                batch = take(self._batches, _END)
            except LoaderKilled as error:
                end_processes(self._batches)
                self._survive(error)
                self._batches = self._begin()
            else:
                if batch is _END:
                    raise StopIteration
                self._deaths = 0
                next(self._left, None)
                return batch

    def _survive(self, error: LoaderKilled) -> None:
        self._deaths += 1
        if self._deaths == MOST_DEATHS or error.number in _MEANT:
            raise error
        _say(f"{error}; it is forked again, and nothing is lost.")


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"paceline: {text}", file=sys.stderr, flush=True)


def living_context() -> BaseContext | None:
    """For a `DataLoader` whose processes are forked; None where they are started otherwise."""
    is_forking = multiprocessing.get_start_method() == "fork"
    return _LivingContext() if is_forking else None


def let_live(loader: Any, on_start: Callable[[int], None]) -> None:
    """Have a script's own loader start its processes so, unless it says how they are started; each
    calls `on_start` after what the script wants it to do first."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    if not loader.multiprocessing_context:
        loader.multiprocessing_context = living_context()
    loader.worker_init_fn = partial(_start, loader.worker_init_fn, on_start)


def _start(first: Callable[[int], object] | None, then: Callable[[int], None], number: int) -> None:
    if first is not None:
        first(number)
    then(number)


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
            # Or this copy keeps the pipe open, and a process that dies silently would be waited
            # for.
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
