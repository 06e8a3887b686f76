"""Supervision: starts the worker processes of this machine and watches until the last has ended.

One loop, one thread, no polling: exits, output, failures and signals all arrive as file
descriptors that become readable.

    running --(a worker fails, a signal, another machine fails)--> ending --(timeout)--> killed

Invariant: when `Supervisor.run` returns or raises, no worker is left, and nothing a worker has
started. `OrphanGuard` sees to the same when the launcher itself is killed.
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
from types import FrameType
from typing import Any

from paceline import env
from paceline.errors import SettingError, UsageError
from paceline.launcher.flags import SHUTDOWN_TIMEOUT_S, SIGNAL_TIMEOUT_S, LaunchOptions
from paceline.launcher.follower import Follower
from paceline.launcher.generations import End, Generations
from paceline.launcher.output import Console, Pipes, Source
from paceline.launcher.plan import WorkerSpec
from paceline.launcher.process import (
    Ending,
    OrphanGuard,
    WorkerEnd,
    WorkerProcess,
    end_now,
    read_error,
    read_step,
)
from paceline.launcher.store import StoreServer
from paceline.launcher.template import Template, has_orphans
from paceline.launcher.worker import ALIVE, BEATS, FAILED
from paceline.observe.units import count_text

# How long a failure that only blames a peer waits for the peer's own.
BLAME_PATIENCE_S = 0.2
# How long output may still come after the last worker has ended.
DRAIN_S = 0.25
# How runs are shown where nobody wants to read that workers start.
SILENT = ("quiet", "json")
# Importing torch takes seconds, in which nothing is to be seen.
GREETING_S = 0.05
# The same Ctrl-C may arrive twice; one that comes later is another one.
REPEAT_NS = 200_000_000
STOPPING = "stopping, once more kills"
# In a stall window workers are looked at `BEATS` times; one that was stopped, or silent, at so many
# of them is ended. They are counted, not timed: a launcher that was stopped itself blames nobody.
MOST_LOOKS = 6
# Under load a process may be silent for a while without being at fault.
LEAST_SILENCE_S = 5.0
RESIZING: dict[int, Callable[[Generations], None]] = {
    signal.SIGUSR1: Generations.grow,
    signal.SIGUSR2: Generations.shrink,
}
# A signal that comes just before the wait does not end it, and not every kernel tells of exits.
_LONGEST_WAIT_S = 0.2


@dataclass(eq=False)
class Supervisor:
    """Starts workers, passes on output and waits for everybody's end; ends all when one fails.

    `start` makes a process of a spec and its pipes. After a signal to the launcher workers have
    longer to end, and a second signal kills. `store` is served from when the workers run.
    `look_elsewhere` says why to end here too because of other machines, or nothing.
    """

    specs: list[WorkerSpec]
    start: Callable[[WorkerSpec, Pipes], WorkerProcess]
    options: LaunchOptions
    console: Console
    store: StoreServer | None = None
    inbox: SignalInbox | None = None
    look_elsewhere: Callable[[], str] | None = None
    generations: Generations | Follower | None = None
    make_spec: Callable[[int], WorkerSpec] | None = None
    """Plans a worker on a seat that nobody had yet."""
    template: Template | None = None
    announce: Callable[[str], None] | None = None
    """Says that workers start, which takes them seconds, where that is not drawn."""

    def __post_init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.workers: list[WorkerProcess] = []
        self.alive: list[WorkerProcess] = []
        self.sources: list[Source] = []
        self.ends: dict[int, WorkerEnd] = {}
        self.survived: dict[int, WorkerEnd] = {}
        self.orphaned: list[int] = []
        """Process groups whose worker is gone, and of which some are yet to be buried."""
        self.guard: OrphanGuard | None = None
        self.signal: int | None = None
        self.elsewhere = ""
        self.ending_since_ns = 0
        self.timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self.stall_s = env.read_observation(self.specs[0].environment).stall_s

    def run(self) -> Ending:
        try:
            self._start_all()
            while self.alive or (self.generations is not None and self.generations.is_needed):
                self._turn()
            self._sweep()
        except BaseException:
            end_now(self.workers)
            raise
        finally:
            self._close()
        ends = tuple(self.ends[worker.rank] for worker in self.workers if worker.rank in self.ends)
        end = None if self.generations is None else self.generations.end
        lost_in = 0 if end is None else end.lost_in
        return Ending(workers=ends, signal=self.signal, elsewhere=self.elsewhere, lost_in=lost_in)

    def _start_all(self) -> None:
        if self.inbox is not None:
            self._listen(self.inbox.fileno(), self.on_signal)
        if self.generations is not None:
            for machine, wire in self.generations.wires.items():
                self._listen(wire.fileno(), partial(self.generations.on_wire, machine))
        self._plan_greeting()
        if self.template is not None:
            self._listen(self.template.fileno(), lambda: None)
            while not self.template.look() and not self.ending_since_ns:
                self._turn()
            self.selector.unregister(self.template.fileno())
        for spec in self.specs:
            self.on_signal()
            if self.ending_since_ns:
                break
            self._start_one(spec)
        self._set_guard()
        if self.store is not None:
            self.store.start()
        if self.look_elsewhere is not None:
            self._after(self.options.monitor_interval, "elsewhere", self.on_look_elsewhere)
        if self.stall_s:
            self._after(self.stall_s / BEATS, "look", self.on_look)

    def _plan_greeting(self) -> None:
        first, shown = self.specs[0], env.read_terminal(self.specs[0].environment)
        is_bar = shown.progress == "bar" or (shown.progress in ("", "auto") and not shown.is_ci)
        is_bar = is_bar and self.console.screen is not None
        workers = count_text(len(self.specs), "worker")
        if first.takes_terminal or not first.speaks_for_all:
            return
        if is_bar:
            greet = partial(self.console.greet, f"{workers} running")
            self._after(GREETING_S, "greeting", greet)
        elif self.announce is not None and not first.rank and shown.progress not in SILENT:
            self.announce(f"starting {workers}.")

    def _start_one(self, spec: WorkerSpec) -> None:
        pipes = None
        try:
            os.makedirs(os.path.dirname(spec.error_file), mode=0o700, exist_ok=True)
            pipes = Pipes(spec, self.console)
            worker = self.start(spec, pipes)
        except BaseException as error:
            if pipes is not None:
                pipes.close()
            if not isinstance(error, OSError):
                raise
            raise UsageError(
                f"Cannot start rank {spec.rank}: {error.strerror}.",
                advice="Start fewer workers, or raise the limits on processes, memory and open "
                "files (ulimit).",
            ) from error
        pipes.close_theirs()
        self.workers.append(worker)
        self.alive.append(worker)
        self._listen(pipes.status_fd, partial(self.on_status, worker))
        if self.generations is not None:
            line = self.generations.lines[worker.rank].socket
            self._listen(line.fileno(), partial(self.generations.on_word, worker.rank))
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old one
            worker.pidfd = os.pidfd_open(worker.pid)
            self._listen(worker.pidfd, partial(self.on_exit, worker))
        for source in pipes.sources:
            self.sources.append(source)
            os.set_blocking(source.fd, False)
            self._listen(source.fd, partial(self.on_output, source))

    def _turn(self) -> None:
        """Wait for the next event, and deal with it."""
        now_s = time.monotonic()
        due = [now_s + _LONGEST_WAIT_S]
        due += [when for when, _ in self.timers.values()]
        due += [source.due_s for source in self.sources if source.due_s is not None]
        if self.generations is not None and self.generations.due_s is not None:
            due.append(self.generations.due_s)
        events = self.selector.select(max(0.0, min(due) - now_s))
        # A Ctrl-C at the terminal reaches a worker that shares it too: that is not a failure.
        self.on_signal()
        for key, _ in events:
            if self.selector.get_map().get(key.fd) is key:  # not closed by an event before it
                key.data()
        now_s = time.monotonic()
        for name, (when, act) in list(self.timers.items()):
            if now_s >= when and self.timers.pop(name, None) is not None:
                act()
        for source in self.sources:
            source.tick(now_s)
        for worker in list(self.alive):
            self.on_exit(worker)
        self.orphaned = [pid for pid in self.orphaned if has_orphans(pid)]
        if self.generations is not None:
            self._keep_alive(self.generations)

    def _keep_alive(self, generations: Generations | Follower) -> None:
        """Do what was decided about the workers of this machine."""
        generations.keep_in_touch()
        while generations.broken:
            wire = generations.broken.pop()
            self.selector.unregister(wire.fileno())
            wire.close()
        if self.ending_since_ns:
            return
        for seat in generations.take_starts():
            self._replace(seat)
        for worker in self.alive:
            if worker.rank in generations.dismissed:
                worker.send(signal.SIGKILL)
        if generations.end is not None:
            self._end_with_others(generations.end)

    def _end_with_others(self, end: End) -> None:
        if end.signal:
            self.signal = end.signal
            self.end_all(end.signal)
            return
        if end.seat in self.survived:
            self.ends[end.seat] = self.survived[end.seat]
        self.elsewhere = end.text
        self.end_all()
        if end.is_hard:
            self.kill_all()

    def _replace(self, seat: int) -> None:
        """Start a worker on a seat, in the place of one that has ended if there was one."""
        before = next((each for each in self.workers if each.rank == seat), None)
        if before is not None:
            self._clear(before)
        spec = next((spec for spec in self.specs if spec.rank == seat), None)
        if spec is None:
            assert self.make_spec is not None
            assert isinstance(self.generations, Generations)  # a new seat is on the lead
            try:
                spec = self.make_spec(seat)
            except SettingError as error:
                self.generations.give_up(seat, error.what)
                return
            self.specs.append(spec)
        self._start_one(spec)
        self._set_guard()

    def _clear(self, before: WorkerProcess) -> None:
        """Forget a worker that has ended."""
        for source in before.pipes.sources:
            if source in self.sources:
                self.on_output(source)
            if source in self.sources:
                self.sources.remove(source)
                self.selector.unregister(source.fd)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(before.pipes.status_fd)
        before.close()
        for path in (before.error_file, env.step_file(before.error_file)):
            with contextlib.suppress(OSError):
                os.unlink(path)  # or the next one's end would be taken for this one's
        self.workers.remove(before)
        self.ends.pop(before.rank, None)

    def _set_guard(self) -> None:
        before = self.guard
        self.guard = OrphanGuard([worker.pid for worker in self.workers if worker.leads_group])
        if before is not None:
            before.close()

    def on_output(self, source: Source) -> None:
        if not source.read(time.monotonic()):
            self.selector.unregister(source.fd)
            self.sources.remove(source)
            source.close()

    def on_status(self, worker: WorkerProcess) -> None:
        """A worker says that it is alive, or that it has failed."""
        words = os.read(worker.pipes.status_fd, 64)
        worker.looks_silent, worker.beats = 0, ALIVE in words and not worker.failed_ns
        if not words:
            self.selector.unregister(worker.pipes.status_fd)
        if FAILED in words and not worker.failed_ns:
            worker.failed_ns = time.monotonic_ns()
            if self.generations is not None and self.generations.is_on:
                worker.send(signal.SIGKILL)  # nobody waits for it, nor it for anybody
                return
            self.on_failure(read_error(worker.error_file).get("is_secondary", False))

    def on_exit(self, worker: WorkerProcess) -> None:
        code = worker.poll()
        if code is None:
            return
        self.alive.remove(worker)
        if worker.pidfd >= 0:
            self.selector.unregister(worker.pidfd)
        error, step = read_error(worker.error_file), read_step(worker.error_file)
        is_survived = self._is_survived(worker, code, error, step)
        if worker.accused:
            where = f" in step {step}" if step else ""
            error, code = {"summary": f"{worker.accused}{where}"}, code or 1
        failed_before = 0 < error.get("time_ns", 0) <= self.ending_since_ns
        is_cause = bool(worker.failed_ns or worker.accused) or not self.ending_since_ns
        by_itself = is_cause or failed_before
        noticed = {"time_ns": worker.failed_ns or time.monotonic_ns()}
        end = WorkerEnd(
            rank=worker.rank,
            exit_code=code,
            ended_by_launcher=not by_itself,
            step=step,
            **(noticed | error if by_itself else noticed),
        )
        if is_survived:
            self.survived[worker.rank] = end
            worker.send(signal.SIGKILL)  # what it has started
            self.orphaned.append(worker.pid)
            return
        self.ends[worker.rank] = end
        if end.failed:
            self.on_failure(end.is_secondary)

    def _is_survived(
        self, worker: WorkerProcess, code: int, error: dict[str, Any], step: int
    ) -> bool:
        """Whether the others continue without a worker that has ended."""
        generations, rank = self.generations, worker.rank
        if generations is None:
            return False
        self.selector.unregister(generations.lines[rank].socket.fileno())
        ledger = generations.close_line(rank)
        is_member = generations.is_member(rank)
        if self.ending_since_ns or (code == 0 and not is_member):
            return False
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if error:
            lines = error["summary"].splitlines()
            how = f"raised {' '.join(lines[:1] if is_member else lines)}".rstrip(".")
        how = f"was {worker.accused}" if worker.accused else how
        is_survived = generations.on_exit(
            rank,
            ledger,
            how,
            step=step,
            is_kill=code == -9 and not error,
            is_error=bool(error),
            is_signal=code < 0 and not error,
            ends_run=error.get("ends_run", False),
        )
        if generations.is_on and code == 0 and not is_survived:
            worker.accused = "finished before its run was, with exit code 0"
        return is_survived

    def on_failure(self, is_secondary: bool) -> None:
        if not is_secondary:
            self.end_all()
        elif "blame" not in self.timers:
            self._after(BLAME_PATIENCE_S, "blame", self.end_all)

    def on_signal(self) -> None:
        for number in self.inbox.read() if self.inbox is not None else ():
            if number in RESIZING and number not in self.options.signals_to_handle:
                if isinstance(self.generations, Generations) and not self.ending_since_ns:
                    RESIZING[number](self.generations)
            elif not self.ending_since_ns:
                self.signal = number
                if self.generations is not None:
                    self.generations.pass_on(End(signal=number, is_final=True))
                self.end_all(number)
                if self.console.screen is not None:
                    self.console.screen.note(STOPPING)
            elif time.monotonic_ns() - self.ending_since_ns > REPEAT_NS:
                self.kill_all()  # somebody presses Ctrl-C again

    def on_look(self) -> None:
        """End workers that are stopped or silent: the others would wait for them for good."""
        look_s = self.stall_s / BEATS
        most_silent = max(MOST_LOOKS, LEAST_SILENCE_S / look_s)
        for worker in self.alive if not self.ending_since_ns else ():
            worker.look(look_s)
            if worker.looks_stopped >= MOST_LOOKS:
                seconds = worker.looks_stopped * look_s
                worker.accused = (
                    f"stopped by a signal for {seconds:.3g} s, so the launcher ended it"
                )
            elif worker.looks_silent >= most_silent:
                seconds = worker.looks_silent * look_s
                worker.accused = f"silent for {seconds:.3g} s, so the launcher ended it"
            if worker.accused:
                worker.send(signal.SIGKILL)
        self._after(look_s, "look", self.on_look)

    def on_look_elsewhere(self) -> None:
        if self.look_elsewhere is not None and not self.ending_since_ns:
            self.elsewhere = self.look_elsewhere()
            if self.elsewhere:
                self.end_all()
            self._after(self.options.monitor_interval, "elsewhere", self.on_look_elsewhere)

    def end_all(self, number: int = signal.SIGTERM) -> None:
        """Ask every worker to end; kill those that have not after the timeout."""
        if self.ending_since_ns:
            return
        self.ending_since_ns = time.monotonic_ns()
        note = env.note_failure if self.signal is None else env.note_signal
        note(self.specs[0].environment)
        for worker in self.alive:
            if not worker.failed_ns:  # one that has failed is ending by itself
                worker.send(number)
                worker.send(signal.SIGCONT)
        self._after(self._shutdown_timeout_s(), "kill", self.kill_all)

    def _shutdown_timeout_s(self) -> float:
        if self.options.shutdown_timeout is not None:
            return self.options.shutdown_timeout
        return SHUTDOWN_TIMEOUT_S if self.signal is None else SIGNAL_TIMEOUT_S

    def kill_all(self) -> None:
        for worker in self.workers:
            if worker in self.alive or worker.has_leftovers():
                worker.send(signal.SIGKILL)

    def _sweep(self) -> None:
        """End what the workers started and left behind, then read the last output."""
        left = [worker for worker in self.workers if worker.has_leftovers()]
        for worker in left:
            worker.send(signal.SIGKILL if self.ending_since_ns else signal.SIGTERM)
        deadline_s = time.monotonic() + self._shutdown_timeout_s()
        while any(worker.has_leftovers() for worker in left) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for worker in left:
            worker.send(signal.SIGKILL)
        deadline_s = time.monotonic() + DRAIN_S
        while self.sources and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in self.selector.select(left_s):
                if key.fd in {source.fd for source in self.sources}:
                    key.data()
                else:
                    self.selector.unregister(key.fd)

    def _close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.selector.close()
        if self.guard is not None:
            self.guard.close()

    def _listen(self, fd: int, act: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, act)

    def _after(self, seconds: float, name: str, act: Callable[[], None]) -> None:
        self.timers[name] = time.monotonic() + seconds, act


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
