"""A worker process seen from the launcher: its signals, its orphans, and how it ended.

When one worker fails the others soon fail too, with errors that only say a peer is gone. The
traceback worth reading is that of the first real failure, so it is printed alone and once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.launcher.output import Pipes
from paceline.launcher.plan import WorkerSpec

MAX_ERROR_BYTES = 4 * 2**20
_TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}


@dataclass(slots=True)
class WorkerProcess:
    """A worker seen from the launcher: its process, its process group, its pipes."""

    rank: int
    pid: int
    poll: Callable[[], int | None]
    """Returns the exit code, or None while it runs."""
    error_file: str
    pipes: Pipes
    leads_group: bool = True
    """False for a worker that shares the launcher's terminal, and so its process group."""
    failed_ns: int = 0
    """When it said that it had failed, though it may take long to end; 0 while it has not."""
    pidfd: int = -1

    def send(self, number: int) -> None:
        """Signal the worker and everything it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.leads_group:
                os.killpg(self.pid, number)
            elif number not in _TERMINAL_SIGNALS:  # the terminal has sent those itself
                os.kill(self.pid, number)

    def close(self) -> None:
        """Let go of everything of its that is still open. It has ended."""
        self.pipes.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def has_leftovers(self) -> bool:
        """Whether processes the worker started are still there, after it has ended itself."""
        if not self.leads_group:
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def start_all(
    specs: Iterable[WorkerSpec], start: Callable[[WorkerSpec], WorkerProcess]
) -> list[WorkerProcess]:
    """Start workers one by one; if one cannot be started, end those that were."""
    workers: list[WorkerProcess] = []
    try:
        for spec in specs:
            os.makedirs(os.path.dirname(spec.error_file), mode=0o700, exist_ok=True)
            workers.append(start(spec))
    except BaseException:
        abandon(workers)
        raise
    return workers


def abandon(workers: Iterable[WorkerProcess]) -> None:
    """End workers that nobody supervises yet."""
    end_now(workers)
    for worker in workers:
        worker.close()


def end_now(workers: Iterable[WorkerProcess]) -> None:
    """Kill workers without asking, and wait until they are gone."""
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        while worker.poll() is None:
            time.sleep(0.005)


class OrphanGuard:
    """A forked process that outlives a killed launcher just long enough to clean up.

    The kernel kills workers whose launcher dies, but not what those workers have started. The guard
    reads the workers' process groups from a pipe that only the launcher holds open; when the pipe
    ends, it kills the groups that are left.
    """

    def __init__(self) -> None:
        reader, self.writer = os.pipe()
        with warnings.catch_warnings():
            # Python warns of threads at a fork; this child touches no lock of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                _wait_and_kill(reader)
            finally:
                os._exit(0)
        os.close(reader)

    def add(self, worker: WorkerProcess) -> None:
        self._say("+", worker)

    def remove(self, worker: WorkerProcess) -> None:
        self._say("-", worker)

    def close(self) -> None:
        """Dismiss it. Groups that were not removed are killed."""
        os.close(self.writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _say(self, change: str, worker: WorkerProcess) -> None:
        if worker.leads_group:
            with contextlib.suppress(OSError):  # somebody killed it: the kernel still does its part
                os.write(self.writer, f"{change}{worker.pid}\n".encode())


def _wait_and_kill(reader: int) -> None:
    for number in (*_TERMINAL_SIGNALS, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)  # a signal to the launcher's group is not for us
    for name in os.listdir("/dev/fd"):  # no pipe must stay open because of us
        if int(name) != reader:
            with contextlib.suppress(OSError):
                os.close(int(name))
    groups: set[int] = set()
    with open(reader) as lines:
        for line in lines:
            change = groups.add if line.startswith("+") else groups.discard
            change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """What a worker wrote about the exception that ended it."""

    summary: str
    traceback: str
    time_ns: int
    """On the machine's monotonic clock; 0 where torch's `@record` wrote it."""
    is_secondary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How one worker ended. A negative exit code is a signal, as in `subprocess`."""

    rank: int
    exit_code: int
    noticed_ns: int
    error: ErrorRecord | None = None
    ended_by_launcher: bool = False

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.ended_by_launcher

    @property
    def is_secondary(self) -> bool:
        return self.error is not None and self.error.is_secondary


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How all workers of one attempt on this machine ended, and why."""

    workers: tuple[WorkerEnd, ...]
    signal: int | None = None
    """The signal to the launcher that ended the run, if one did."""
    elsewhere: str = ""
    """What another machine said before this one ended its workers."""

    @property
    def first_failure(self) -> WorkerEnd | None:
        def key(end: WorkerEnd) -> tuple[bool, int]:
            return end.is_secondary, (end.error and end.error.time_ns) or end.noticed_ns

        return min((end for end in self.workers if end.failed), key=key, default=None)

    @property
    def succeeded(self) -> bool:
        return self.signal is None and not self.elsewhere and self.first_failure is None

    @property
    def exit_code(self) -> int:
        """0, 1 for a failure, 128+n for the signal n that ended the launcher or a worker."""
        if self.signal is not None:
            return 128 + self.signal
        first = self.first_failure
        if first is not None and first.error is None and first.exit_code < 0:
            return 128 - first.exit_code
        return 0 if self.succeeded else 1


def read_error(path: str) -> ErrorRecord | None:
    """The record a worker left, in our format or in that of torch's `@record`; else None."""
    try:
        if os.path.getsize(path) > MAX_ERROR_BYTES:
            return None
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        message = data["message"]
        if isinstance(message, str):
            message = {"message": message}
        traceback = message.get("extraInfo", {}).get("py_callstack", "")
        return ErrorRecord(
            summary=str(message.get("message", "")),
            traceback=str(traceback),
            time_ns=int(data.get("time_ns", 0)),
            is_secondary=bool(data.get("is_secondary", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def describe_exit(end: WorkerEnd) -> str:
    """In a few words, without the traceback."""
    if end.ended_by_launcher:
        return "ended by the launcher"
    if end.error is not None:
        return end.error.summary.partition("\n")[0]
    if end.exit_code < 0:
        return f"killed by signal {-end.exit_code} ({signal_name(-end.exit_code)})"
    return f"exit code {end.exit_code}" if end.exit_code else "finished"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def report(ending: Ending) -> str:
    """What the launcher prints after a failure: the first real traceback, then a line per rank."""
    if ending.succeeded:
        return ""
    first = ending.first_failure
    lines: list[str] = []
    if ending.signal is not None:
        lines.append(f"paceline: ended by {signal_name(ending.signal)}.")
    elif first is not None and first.error is not None and first.error.traceback:
        lines += [f"paceline: rank {first.rank} failed:", first.error.traceback.rstrip()]
    elif first is not None:
        lines.append(f"paceline: rank {first.rank} failed: {describe_exit(first)}.")
    elif ending.elsewhere:
        lines.append(f"paceline: {ending.elsewhere}")
    others = [end for end in ending.workers if end is not first and ending.signal is None]
    lines += [f"  rank {end.rank}: {describe_exit(end)}" for end in others]
    return "\n".join(lines) + "\n"
