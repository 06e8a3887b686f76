"""A worker process seen from the launcher: its signals, its orphans, and how it ended.

When one worker fails the others soon fail too, with errors that only say a peer is gone. The
traceback worth reading is that of the first real failure, so it is printed alone and once.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.env import step_file
from paceline.launcher.output import Pipes

MAX_ERROR_BYTES = 4 * 2**20
_FOLDER_PREFIX = "paceline-run-"
_TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """A worker that runs: its process, its process group, its pipes."""

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
    beats: bool = False
    """Whether it has ever said that it is alive, so that silence means something."""
    looks_stopped: int = 0
    looks_silent: int = 0
    """At how many looks in a row it was stopped, or had not spoken."""
    cpu_s: float = 0.0
    """How long it had computed at the last look."""
    accused: str = ""
    """Why the launcher killed it, alone of all."""

    def look(self, since_s: float) -> None:
        """Note whether it is stopped or silent, `since_s` after the last look.

        One that a debugger traces is neither. Nor is one that computes: it may be in a library
        that lets no other thread of Python speak.
        """
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                state, *fields = file.read().rpartition(b")")[2].split()
        except OSError:  # not Linux, or just gone
            return
        cpu_s = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
        is_idle, self.cpu_s = cpu_s - self.cpu_s < since_s / 8, cpu_s
        self.looks_stopped = self.looks_stopped + 1 if state == b"T" else 0
        if self.beats and is_idle and state != b"t":
            self.looks_silent += 1

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
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return self.leads_group


@contextmanager
def private_folder() -> Iterator[str]:
    """A folder for this launcher alone, locked while it lives; what killed ones left is removed."""
    while True:
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        with contextlib.suppress(OSError):  # somebody took it for left before it was locked
            lock = _lock(folder)
            if os.path.exists(folder):
                break
            os.close(lock)
    for left in glob.glob(os.path.join(os.path.dirname(folder), f"{_FOLDER_PREFIX}*")):
        with contextlib.suppress(OSError):  # another user's, or of a launcher that lives
            dead = _lock(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(dead)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: str) -> int:
    """A descriptor that locks a folder of this user's until it is closed, or its process ends."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(folder)
    except OSError:
        os.close(fd)
        raise
    return fd


def end_now(workers: Iterable[WorkerProcess]) -> None:
    """Kill workers without asking, and wait until they are gone."""
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        while worker.poll() is None:
            time.sleep(0.005)


class OrphanGuard:
    """A process that outlives a killed launcher just long enough to clean up.

    The kernel kills workers whose launcher dies, but not what those workers have started. The guard
    waits for the end of a pipe that only the launcher holds open, and kills their process groups.
    It is not a fork: handlers that run around one would swallow an interrupt.
    """

    def __init__(self, groups: list[int]) -> None:
        script = """trap '' INT QUIT HUP TERM; read -r _; kill -s KILL -- "$@" """
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", script, "paceline-guard", *(f"-{group}" for group in groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # a signal to the launcher's group is not for it
        )

    def close(self) -> None:
        """Dismiss it: the workers have ended."""
        self.process.kill()
        self.process.communicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How one worker ended. A negative exit code is a signal, as in `subprocess`."""

    rank: int
    exit_code: int
    time_ns: int = 0
    """When it failed, by its own word or else when that was noticed; on the monotonic clock."""
    ended_by_launcher: bool = False
    summary: str = ""
    """What it wrote about the exception that ended it; empty where it wrote nothing."""
    traceback: str = ""
    is_secondary: bool = False
    ends_run: bool = False
    """Whether it said that nobody should continue."""
    step: int = 0
    """The last step of a `Run` that it began; 0 if none is known."""

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.ended_by_launcher

    @property
    def signal(self) -> int:
        """The signal that killed it, or that it stopped for as its exit code 128+n says; else 0."""
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
        return number if number in set(signal.Signals) and not self.summary else 0

    def __str__(self) -> str:
        """In a few words, without the traceback."""
        if self.ended_by_launcher:
            return "ended by the launcher"
        if self.summary:
            return self.summary.partition("\n")[0]
        if self.signal and self.exit_code > 0:
            return f"stopped by {signal_name(self.signal)} (exit code {self.exit_code})"
        if self.exit_code < 0:
            where = f" in step {self.step}" if self.step else ""
            return f"killed by signal {-self.exit_code} ({signal_name(-self.exit_code)}){where}"
        return f"exit code {self.exit_code}" if self.exit_code else "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How all workers of one attempt on this machine ended, and why."""

    workers: tuple[WorkerEnd, ...]
    signal: int | None = None
    """The signal to the launcher that ended the run, if one did."""
    elsewhere: str = ""
    """What another machine said before this one ended its workers."""
    lost_in: int = 0
    """The step in which the last worker of a run died; the checkpoint carries on."""

    @property
    def first_failure(self) -> WorkerEnd | None:
        failed = [end for end in self.workers if end.failed]
        return min(failed, key=lambda end: (end.is_secondary, end.time_ns), default=None)

    @property
    def succeeded(self) -> bool:
        return self.signal is None and not self.elsewhere and self.first_failure is None

    @property
    def exit_code(self) -> int:
        """0, 1 for a failure, 128+n for the signal n that ended the launcher or a worker."""
        if self.signal is not None:
            return 128 + self.signal
        first = self.first_failure
        if first is not None and first.signal:
            return 128 + first.signal
        return 0 if self.succeeded else 1

    def __str__(self) -> str:
        """What the launcher prints: the first real traceback, then a line per rank."""
        first = self.first_failure
        if self.signal is not None:
            return f"paceline: ended by {signal_name(self.signal)}.\n"
        if first is not None and first.traceback:
            lines = [f"paceline: rank {first.rank} failed:", first.traceback.rstrip()]
        elif first is not None:
            lines = [f"paceline: rank {first.rank} failed: {first}."]
        elif self.elsewhere:
            lines = [f"paceline: {self.elsewhere}"]
        else:
            return ""
        lines += [f"  rank {end.rank}: {end}" for end in self.workers if end is not first]
        return "\n".join(lines) + "\n"


def read_error(path: str) -> dict[str, Any]:
    """What a worker, or torch's `@record` in it, wrote about its error; nothing if it did not."""
    try:
        if os.path.getsize(path) > MAX_ERROR_BYTES:
            return {}
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        message = data["message"]
        if isinstance(message, str):
            message = {"message": message}
        found = {
            "summary": str(message.get("message", "")),
            "traceback": str(message.get("extraInfo", {}).get("py_callstack", "")),
            "is_secondary": bool(data.get("is_secondary", False)),
            "ends_run": bool(data.get("ends_run", False)),
        }
        return found | ({"time_ns": int(data["time_ns"])} if "time_ns" in data else {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def read_step(error_file: str) -> int:
    """The last step that a worker began, if it runs a `Run`; else 0."""
    try:
        with open(step_file(error_file), "rb") as file:
            return int.from_bytes(file.read(8), sys.byteorder)
    except OSError:
        return 0


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
