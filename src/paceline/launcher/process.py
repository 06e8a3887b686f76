"""A worker process seen from the launcher: its signals, its pipes, its orphans, its folder."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from paceline import env
from paceline.env import find_announced
from paceline.files import RunFolder, keep_traceback, record_end
from paceline.launcher.deaths import StopReason, WorkerExit
from paceline.launcher.output import Console, Pipes

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
    unsaid: dict[str, Any] = field(default_factory=dict)
    """What is known of its exception where it had no room to write it down."""
    is_judged: bool = False
    """Whether the others continue without it, which it has yet to hear of."""
    pidfd: int = -1
    beats: bool = False
    """Whether it has ever said that it is alive, so that silence means something."""
    looks_stopped: int = 0
    looks_silent: int = 0
    """At how many looks in a row it was stopped, or had not spoken."""
    word: bytes = b""
    """What it said last: that it is alive, waits for others or hangs."""
    is_dumped: bool = False
    """Whether it was asked where it is, before it is ended."""
    cpu_s: float = 0.0
    """How long it had computed at the last look."""
    accused: str = ""
    """Why the launcher killed it, alone of all: what it did, as a sentence about it continues."""

    def look(self, since_s: float) -> None:
        """Note whether it is stopped or silent, `since_s` after the last look.

        One that a debugger traces is neither. Nor is one that computes: it may be in a library
        that lets no other thread of Python speak.
        """
        state, cpu_s = env.read_process(self.pid)
        if not state:
            return
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
    """A folder for this process alone, locked while it lives; what killed ones left is removed."""
    while True:
        folder = tempfile.mkdtemp(prefix=_FOLDER_PREFIX)
        try:
            lock = _lock(folder)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process took it for left before it was locked
        except OSError:  # a file system without locks: nothing is taken for left there
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if os.path.exists(folder):
            break
        os.close(lock)
    for left in glob.glob(os.path.join(os.path.dirname(folder), f"{_FOLDER_PREFIX}*")):
        with contextlib.suppress(OSError):  # another user's, or of a process that lives
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
    """A process that outlives a killed launcher just long enough to clean up."""

    # The kernel kills workers whose launcher dies, but not what those workers have started. The
    # guard waits for the end of a pipe that only the launcher holds open, and kills their process
    # groups. It is not a fork: handlers that run around one would swallow an interrupt.

    def __init__(self) -> None:
        script = """trap '' INT QUIT HUP TERM; groups=; while read -r line; do groups=$line; done
            [ -z "$groups" ] || kill -s KILL -- $groups"""
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", script, "paceline-guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # a signal to the launcher's group is not for it
        )
        assert self.process.stdin is not None
        self._pipe = self.process.stdin.fileno()
        os.set_blocking(self._pipe, False)

    @classmethod
    def of(cls, groups: Sequence[int], before: OrphanGuard | None) -> OrphanGuard | None:
        """The guard of these: the one before, or another where that is gone; None where no process
        can be started, which is tried again with the next worker."""
        if before is not None and before.guard(groups):
            return before
        if before is not None:
            before.close()
        try:
            guard = cls()
        except OSError:
            return None
        guard.guard(groups)
        return guard

    def guard(self, groups: Iterable[int]) -> bool:
        """From now on these; False if it is gone."""
        try:
            os.write(self._pipe, f"{' '.join(f'-{group}' for group in groups)}\n".encode())
        except BlockingIOError:  # it is stopped, and knows most of them
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Dismiss it: the workers have ended."""
        self.process.kill()
        self.process.communicate()


class SignalInbox:
    """Turns signals to the launcher into something its loop can wait for."""

    def __init__(self, numbers: Iterable[int], *others: int) -> None:
        """`numbers` end a run, `others` do not."""
        self._ending = frozenset(numbers)
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.seen: list[int] = []
        """All that ever came and end a run: after one of them nothing is started any more."""
        self.wakeup_before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        # What nohup or a shell has switched off stays off.
        self.before: dict[int, Any] = {
            number: signal.signal(number, self._on_signal)
            for number in {*self._ending, *others}
            if signal.getsignal(number) is not signal.SIG_IGN
        }

    def close(self) -> None:
        for number, handler in self.before.items():  # what is not to end a run ends nothing now
            signal.signal(number, handler if number in self._ending else signal.SIG_IGN)
        signal.set_wakeup_fd(self.wakeup_before)
        self.reader.close()
        self.writer.close()

    def fileno(self) -> int:
        return self.reader.fileno()

    def read(self) -> list[int]:
        try:
            numbers = [number for number in self.reader.recv(64) if number in self.before]
        except BlockingIOError:
            return []
        self.seen += [number for number in numbers if number in self._ending]
        return numbers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The number arrives through the wakeup descriptor."""


class EndRecord:
    """What the launcher itself writes into the run folder: exceptions, and why the run ended."""

    def __init__(self, announced: str, console: Console) -> None:
        """`announced` is the file in which the worker that writes in the folder has named it."""
        self._announced, self._console = announced, console
        self._has_shown = False

    def record(self, reason: StopReason) -> None:
        """Write why all workers have ended; none of them can any more."""
        if (folder := self._find()) is None:
            return
        facts = {name: getattr(reason, name) for name in ("worker", "step", "traceback")}
        try:
            record_end(folder, reason.status, reason.text, **facts)
        except OSError as error:
            self._console.tell(f"{folder.path} does not say all about the end of the run: {error}.")

    def show_first(self, end: WorkerExit) -> None:
        """Print the first exception that is survived, and keep it."""
        if self._has_shown or not end.summary or end.is_secondary:
            return
        self._has_shown = True
        self._console.say(f"paceline: worker {end.rank} failed{end.where}:\n{end.traceback}")
        if (folder := self._find()) is not None:
            with contextlib.suppress(OSError):
                keep_traceback(folder, end.reason, end.traceback)

    def _find(self) -> RunFolder | None:
        path = find_announced(self._announced)
        return RunFolder(path) if path else None
