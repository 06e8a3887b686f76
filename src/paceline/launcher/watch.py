"""Watching the workers of one attempt until the last has ended.

One loop, one thread, no polling: output, exits, signals and the store's door are all file
descriptors. The life of an attempt:

    running --(a worker fails, a signal, another machine fails)--> ending --(0.5 s)--> killed

Invariant: when `watch` returns or raises, no worker is left, and nothing a worker has started.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from paceline.launcher.ending import Ending, WorkerEnd, read_record
from paceline.launcher.output import Source
from paceline.launcher.process import Running
from paceline.launcher.sentinel import Sentinel
from paceline.launcher.store import StoreDoor
from paceline.launcher.worker import FAILED, SERVING
from paceline.progress.screen import Screen

# How long a failure that only blames a peer waits for the peer's own.
BLAME_PATIENCE_S = 0.2
# How long output may still come after the last worker has ended.
DRAIN_S = 0.25
# The same Ctrl-C may arrive twice; one that comes later is another one.
REPEAT_NS = 200_000_000
STOPPING = "stopping, once more kills"
_POLL_S = 0.05
_LONGEST_WAIT_S = 0.2


class SignalInbox:
    """Turns signals to the launcher into something its loop can wait for."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.numbers = list(numbers)
        self.reader, self.writer = socket.socketpair()
        self.before: dict[int, Any] = {}
        self.seen: list[int] = []
        """All that ever came: after one of them nothing is started any more."""

    def __enter__(self) -> SignalInbox:
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.wakeup_before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        for number in self.numbers:
            # What nohup or a shell has switched off stays off.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
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
        self.seen += numbers
        return numbers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The number arrives through the wakeup descriptor."""


@dataclass(frozen=True, slots=True)
class OtherMachines:
    """What to ask every `interval_s`: `look` says why to end here too, or nothing."""

    interval_s: float
    look: Callable[[], str]


def watch(
    workers: list[Running],
    *,
    sentinel: Sentinel,
    shutdown_timeout_s: float,
    signal_timeout_s: float | None = None,
    inbox: SignalInbox | None = None,
    door: StoreDoor | None = None,
    door_patience_s: float = 0.0,
    linger_fd: int = -1,
    others: OtherMachines | None = None,
    screen: Screen | None = None,
) -> Ending:
    """Pass on output and wait for everybody's end; end everybody when one fails.

    After a signal to the launcher they have `signal_timeout_s` to do so, and a second one kills.
    `linger_fd` is closed when only the first worker is left: it serves the store for the others.
    `screen` says so when a signal has come.
    """
    shift = _Shift(workers, sentinel, shutdown_timeout_s)
    shift.inbox, shift.others, shift.screen = inbox, others, screen
    shift.signal_timeout_s = shutdown_timeout_s if signal_timeout_s is None else signal_timeout_s
    shift.door, shift.door_patience_s, shift.linger_fd = door, door_patience_s, linger_fd
    try:
        shift.begin()
        while shift.alive:
            shift.turn()
        shift.sweep()
    except BaseException:
        end_now(workers)
        raise
    finally:
        shift.close()
    return Ending(
        workers=tuple(shift.ends[worker.rank] for worker in workers),
        signal=shift.signal,
        elsewhere=shift.elsewhere,
    )


def end_now(workers: list[Running]) -> None:
    """Kill workers without asking, and wait until they are gone."""
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        while worker.poll() is None:
            time.sleep(0.005)


class _Shift:
    """The state of `watch`, one method per event."""

    inbox: SignalInbox | None
    others: OtherMachines | None
    screen: Screen | None
    door: StoreDoor | None
    door_patience_s: float
    linger_fd: int

    def __init__(self, workers: list[Running], sentinel: Sentinel, timeout_s: float) -> None:
        self.workers = workers
        self.sentinel = sentinel
        self.shutdown_timeout_s = self.signal_timeout_s = timeout_s
        self.selector = selectors.DefaultSelector()
        self.alive = list(workers)
        self.streams = [stream for worker in workers for stream in worker.streams]
        self.ends: dict[int, WorkerEnd] = {}
        self.pidfds: dict[int, int] = {}
        self.signal: int | None = None
        self.elsewhere = ""
        self.ending_since_ns = 0
        self.deadlines: dict[str, tuple[float, Callable[[], None]]] = {}

    def begin(self) -> None:
        for worker in self.workers:
            if worker.leads_group:
                self.sentinel.add(worker.pid)
            self._listen(worker.status_fd, partial(self.on_status, worker))
            with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old one
                pidfd = self.pidfds[worker.rank] = os.pidfd_open(worker.pid)
                self._listen(pidfd, partial(self.on_exit, worker))
        for stream in self.streams:
            os.set_blocking(stream.fd, False)
            self._listen(stream.fd, partial(self.on_output, stream))
        if self.inbox is not None:
            self._listen(self.inbox.fileno(), self.on_signal)
        if self.door is not None:
            self._listen(self.door.fileno(), self.on_knock)
        if self.others is not None:
            self._later("others", self.others.interval_s, self.on_others_due)
        self._release_the_last()

    def turn(self) -> None:
        """Wait for the next event, and deal with it."""
        now_s = time.monotonic()
        due = [when for when, _ in self.deadlines.values()]
        due += [stream.due_s for stream in self.streams if stream.due_s is not None]
        must_poll = len(self.pidfds) < len(self.alive)
        # A signal that comes just before the wait does not end it; Python looks at it afterwards.
        due.append(now_s + (_POLL_S if must_poll else _LONGEST_WAIT_S))
        timeout_s = max(0.0, min(due) - now_s)
        events = self.selector.select(timeout_s)
        # A Ctrl-C at the terminal reaches a worker that shares it too: it is no failure then.
        self.on_signal()
        for key, _ in events:
            if self.selector.get_map().get(key.fd) is key:  # not closed by an event before it
                key.data()
        now_s = time.monotonic()
        for name, (when, act) in list(self.deadlines.items()):
            if now_s >= when and self.deadlines.pop(name, None) is not None:
                act()
        for stream in self.streams:
            stream.tick(now_s)
        if must_poll:
            for worker in list(self.alive):
                self.on_exit(worker)

    def on_output(self, stream: Source) -> None:
        if not stream.read(time.monotonic()):
            self.selector.unregister(stream.fd)
            self.streams.remove(stream)
            stream.close()

    def on_status(self, worker: Running) -> None:
        """A worker says that it failed, though it may take long to end; or serves the store."""
        words = os.read(worker.status_fd, 64)
        if not words:
            self.selector.unregister(worker.status_fd)
        if SERVING in words and self.door is not None:
            self._shut_door()
        if FAILED in words and not worker.noticed_ns:
            worker.noticed_ns = time.monotonic_ns()
            record = read_record(worker.error_file)
            self.on_failure(is_secondary=record is not None and record.is_secondary)

    def on_exit(self, worker: Running) -> None:
        code = worker.poll()
        if code is None:
            return
        self.alive.remove(worker)
        if worker.rank in self.pidfds:
            pidfd = self.pidfds.pop(worker.rank)
            self.selector.unregister(pidfd)
            os.close(pidfd)
        end = self.ends[worker.rank] = self._describe(worker, code)
        if end.failed:
            self.on_failure(end.is_secondary)
        self._release_the_last()

    def _release_the_last(self) -> None:
        """Let the first worker go once nobody needs the store it serves."""
        if self.linger_fd >= 0 and self.alive == self.workers[:1]:
            os.close(self.linger_fd)
            self.linger_fd = -1

    def _describe(self, worker: Running, code: int) -> WorkerEnd:
        record = read_record(worker.error_file)
        before = bool(worker.noticed_ns) or not self.ending_since_ns
        if record is not None and 0 < record.time_ns <= self.ending_since_ns:
            before = True
        return WorkerEnd(
            rank=worker.rank,
            exit_code=code,
            noticed_ns=worker.noticed_ns or time.monotonic_ns(),
            record=record if before else None,
            ended_by_launcher=not before,
        )

    def on_failure(self, is_secondary: bool) -> None:
        if self.ending_since_ns:
            return
        if is_secondary:
            self._later("blame", BLAME_PATIENCE_S, self.end_all, unless_set=True)
        else:
            self.end_all()

    def on_signal(self) -> None:
        for number in self.inbox.read() if self.inbox is not None else ():
            if not self.ending_since_ns:
                self.signal = number
                self.end_all(number, self.signal_timeout_s)
                if self.screen is not None:
                    self.screen.note(STOPPING)
            elif time.monotonic_ns() - self.ending_since_ns > REPEAT_NS:
                self.kill_all()  # somebody presses Ctrl-C again

    def on_knock(self) -> None:
        """Somebody calls the store. Unless rank 0 opens soon, a keeper must."""
        assert self.door is not None
        self.selector.unregister(self.door.fileno())
        self._later("door", self.door_patience_s, self.door.start_keeper)

    def on_others_due(self) -> None:
        assert self.others is not None
        self.elsewhere = self.others.look()
        if self.elsewhere:
            self.end_all()
        else:
            self._later("others", self.others.interval_s, self.on_others_due)

    def end_all(self, number: int = signal.SIGTERM, timeout_s: float | None = None) -> None:
        """Ask every worker to end; kill those that have not after the timeout."""
        if self.ending_since_ns:
            return
        self.ending_since_ns = time.monotonic_ns()
        self.deadlines.pop("others", None)
        for worker in self.alive:
            if not worker.noticed_ns:  # one that has failed is ending by itself
                worker.send(number)
                worker.send(signal.SIGCONT)
        patience_s = self.shutdown_timeout_s if timeout_s is None else timeout_s
        self._later("kill", patience_s, self.kill_all)

    def kill_all(self) -> None:
        for worker in self.workers:
            if worker in self.alive or worker.has_leftovers():
                worker.send(signal.SIGKILL)

    def sweep(self) -> None:
        """End what the workers started and left behind, then read the last output."""
        number = signal.SIGKILL if self.ending_since_ns else signal.SIGTERM
        left = [worker for worker in self.workers if worker.has_leftovers()]
        for worker in left:
            worker.send(number)
        deadline_s = time.monotonic() + self.shutdown_timeout_s
        while any(worker.has_leftovers() for worker in left) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for worker in left:
            worker.send(signal.SIGKILL)
        deadline_s = time.monotonic() + DRAIN_S
        while self.streams and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in self.selector.select(left_s):
                if key.fd in {stream.fd for stream in self.streams}:
                    key.data()
                else:
                    self.selector.unregister(key.fd)

    def close(self) -> None:
        for worker in self.workers:
            if worker.leads_group:
                self.sentinel.remove(worker.pid)
            os.close(worker.status_fd)
        for stream in self.streams:
            stream.close()
        for pidfd in self.pidfds.values():
            os.close(pidfd)
        if self.linger_fd >= 0:
            os.close(self.linger_fd)
        self.selector.close()

    def _listen(self, fd: int, act: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, act)

    def _later(
        self, name: str, seconds: float, act: Callable[[], None], *, unless_set: bool = False
    ) -> None:
        if not (unless_set and name in self.deadlines):
            self.deadlines[name] = (time.monotonic() + seconds, act)

    def _shut_door(self) -> None:
        assert self.door is not None
        self.deadlines.pop("door", None)
        with contextlib.suppress(KeyError, ValueError):  # nobody has knocked yet, or it is shut
            self.selector.unregister(self.door.fileno())
        self.door.shut()
