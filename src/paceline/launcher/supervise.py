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
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline import env
from paceline.errors import SettingError, summarize
from paceline.launcher.deaths import (
    ASKS_TO_END,
    UNSAID,
    OomKills,
    RunResult,
    StopReason,
    WorkerExit,
    read_error,
    read_step,
)
from paceline.launcher.flags import SHUTDOWN_TIMEOUT_S, SIGNAL_TIMEOUT_S, LaunchOptions
from paceline.launcher.follower import Follower
from paceline.launcher.generations import Generations, without_survival
from paceline.launcher.output import Console, Pipes
from paceline.launcher.plan import TRAIN_ALONE, WorkerSpec
from paceline.launcher.process import EndRecord, OrphanGuard, SignalInbox, WorkerProcess, end_now
from paceline.launcher.reading import Reading
from paceline.launcher.stalls import StallJudge, main_thread, read_stack
from paceline.launcher.starts import Starts
from paceline.launcher.store import StoreServer
from paceline.launcher.template import Template, has_orphans
from paceline.launcher.worker import ALIVE, ALONE, EXITS, FAILED, HANGS, WAITS
from paceline.launcher.workers import RESIZING
from paceline.telemetry import count_text, read_terminal

# How long a failure that only blames a peer waits for the peer's own.
BLAME_PATIENCE_S = 0.2
# How runs are shown where it is not to be read that workers start.
SILENT = ("quiet", "json")
# Importing torch takes seconds, in which nothing is to be seen.
GREETING_S = 0.05
# The same Ctrl-C may arrive twice; one that comes later is another one.
REPEAT_NS = 200_000_000
STOPPING = "stopping, once more kills"
# So often the rest of a script may be killed.
MOST_LATE = 3
# A signal that comes just before the wait does not end it, and not every kernel tells of exits.
_LONGEST_WAIT_S = 0.2


@dataclass(eq=False)
class Supervisor:
    """Starts workers, passes on output and waits for their end; ends all when one fails.

    `start` makes a process of a spec and its pipes; it has no number yet where the template was
    asked for it. After a signal to the launcher workers have longer to end, and a second signal
    kills. `store` is served from when the workers run.
    """

    specs: list[WorkerSpec]
    start: Callable[[WorkerSpec, Pipes], WorkerProcess]
    options: LaunchOptions
    console: Console
    store: StoreServer | None = None
    inbox: SignalInbox | None = None
    generations: Generations | Follower = field(default_factory=without_survival)
    make_spec: Callable[[int], WorkerSpec] | None = None
    """Plans a worker with a new number."""
    template: Template | None = None
    announce: Callable[[str], None] | None = None
    """Says that workers start, which takes them seconds, where that is not drawn; and that they
    never meet."""

    def __post_init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.workers: list[WorkerProcess] = []
        self.alive: list[WorkerProcess] = []
        self.reading = Reading(self.selector, self.console)
        self.exits: dict[int, WorkerExit] = {}
        self.survived: dict[int, WorkerExit] = {}
        self.late: list[WorkerExit] = []
        """Of workers that were killed when their training was over."""
        self.alone: set[int] = set()
        """Workers that train without a process group."""
        self.orphaned: list[int] = []
        """Process groups whose worker is gone, and of which some are yet to be buried."""
        self.guard: OrphanGuard | None = None
        self.stop: StopReason | None = None
        """Why all are ended, if that is not the first failure among them."""
        environ = self.specs[0].environment
        self.folder = EndRecord(env.read(env.FOLDER_VARIABLE, environ), self.console)
        self.ending_since_ns, self.is_killed = 0, False
        self.oom_kills = OomKills()
        self.timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self.starts = Starts(
            lambda spec, pipes: self.start(spec, pipes),
            self.console,
            self.generations,
            self.template,
            on_started=self._watch,
            on_template_gone=self.selector.unregister,
            may_start=self._may_start,
        )
        wishes = env.read_observation(environ)
        self.judge = StallJudge(wishes.stall_s, wishes.stall_end_s) if wishes.stall_s else None

    def run(self) -> RunResult:
        generations = self.generations
        try:
            self._start_all()
            while self.alive or self.starts.is_busy or (self._decides and generations.is_needed):
                self._turn()
            self._sweep()
        except BaseException as error:
            end_now(self.workers)
            failed = StopReason(text=f"the launcher failed: {summarize(error)}")
            is_signal = isinstance(error, KeyboardInterrupt)
            self.folder.record(StopReason.by_signal(2) if is_signal else failed)
            raise
        finally:
            self._close()
        ends = tuple(self.exits[rank] for rank in sorted(self.exits))
        ended = {*self.exits, *self.survived, *(end.rank for end in self.late)}
        unstarted = tuple(spec.rank for spec in self.specs if spec.rank not in ended)
        result = RunResult(ends, self.stop, unstarted).with_late(self.late, generations.can_repeat)
        if result.reason is not None:
            self.folder.record(result.reason)
        return result

    def _start_all(self) -> None:
        if self.inbox is not None:
            self._listen(self.inbox.fileno(), self.on_signal)
        for machine, channel in self.generations.channels.items():
            self._listen(channel.fileno(), partial(self.generations.on_channel, machine))
        self._plan_greeting()
        if self.template is not None:
            self._listen(self.template.fileno(), lambda: None)
        self.starts.queue += self.specs
        self.starts.turn()
        while self.starts.is_busy:
            self._turn()
        if self.store is not None:
            self.store.start()
        if self.judge is not None:
            self._after(self.judge.look_s, "look", self.on_look)

    def _plan_greeting(self) -> None:
        first, shown = self.specs[0], read_terminal(self.specs[0].environment)
        is_bar = shown.progress == "bar" or (shown.progress in ("", "auto") and not shown.is_ci)
        is_bar = is_bar and self.console.screen is not None
        workers = count_text(len(self.specs), "worker")
        if first.takes_terminal or not first.speaks_for_all:
            return
        if is_bar:
            self._after(GREETING_S, "greeting", partial(self.console.greet, f"{workers} running"))
        elif self.announce is not None and not first.rank and shown.progress not in SILENT:
            self.announce(f"starting {workers}.")

    def _may_start(self) -> bool:
        self.on_signal()
        return not self.ending_since_ns

    def _watch(self, worker: WorkerProcess) -> None:
        """From now on the worker is one of those that run."""
        self.oom_kills.forget()
        pipes = worker.pipes
        pipes.close_theirs()
        self.workers.append(worker)
        self.alive.append(worker)
        self._listen(pipes.status_fd, partial(self.on_status, worker))
        if worker.rank in self.generations.worker_channels:
            channel = self.generations.worker_channels[worker.rank].socket
            self._listen(channel.fileno(), partial(self.generations.on_message, worker.rank))
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old one
            worker.pidfd = os.pidfd_open(worker.pid)
            self._listen(worker.pidfd, partial(self.on_exit, worker))
        self.reading.add(pipes.sources)
        if not self.starts.queue:  # a worker that is forked from here would hold the guard's pipe
            self._set_guard()

    def _turn(self) -> None:
        """Wait for the next event, and deal with it."""
        now_s = time.monotonic()
        due = [now_s + _LONGEST_WAIT_S, *(when for when, _ in self.timers.values())]
        due += self.reading.due_s(now_s)
        decided_s = self.generations.due_s if self._decides else None
        due += [when for when in (decided_s, self.starts.due_s) if when is not None]
        events = self.selector.select(max(0.0, min(due) - now_s))
        # A Ctrl-C at the terminal reaches a worker that shares it too: that is not a failure.
        self.on_signal()
        for key, _ in events:
            # Not closed by an event before it, and not by the other end.
            if self.selector.get_map().get(key.fd) is key and key.data() is False:
                self.selector.unregister(key.fd)
        now_s = time.monotonic()
        for name, (when, act) in list(self.timers.items()):
            if now_s >= when and self.timers.pop(name, None) is not None:
                act()
        self.reading.turn()
        for worker in list(self.alive):
            self.on_exit(worker)
        self.orphaned = [pid for pid in self.orphaned if has_orphans(pid)]
        self._keep_alive()
        self.starts.turn()

    def _keep_alive(self) -> None:
        """Do what was decided about the workers of this machine."""
        generations = self.generations
        generations.keep_in_touch()
        while generations.broken:
            channel = generations.broken.pop()
            self.selector.unregister(channel.fileno())
            channel.close()
        if not self._decides:
            return
        for worker_id in generations.take_starts():
            if not self.ending_since_ns:
                self._replace(worker_id)
        for worker in self.alive:
            if worker.rank in generations.dismissed:
                worker.send(signal.SIGKILL)
        if generations.end is not None and not self.ending_since_ns:
            self._end_with_others(generations.end)

    def _end_with_others(self, end: StopReason) -> None:
        if end.worker in self.survived:
            self.exits[end.worker] = self.survived[end.worker]
        self.stop = end
        self.end_all(end.signal or signal.SIGTERM)
        if end.is_hard:
            self.kill_all()

    def _replace(self, worker_id: int) -> None:
        """Start a worker, in the place of one that has ended if there was one."""
        before = next((each for each in self.workers if each.rank == worker_id), None)
        if before is not None:
            self._clear(before)
        spec = next((spec for spec in self.specs if spec.rank == worker_id), None)
        if spec is None:
            assert self.make_spec is not None
            assert isinstance(self.generations, Generations)  # a new worker is on the lead
            try:
                spec = self.make_spec(worker_id)
            except SettingError as error:
                self.generations.give_up(worker_id, error.what)
                return
            self.specs.append(spec)
        self.starts.add(spec.alone() if worker_id in self.generations.rests else spec)

    def _clear(self, before: WorkerProcess) -> None:
        """Forget a worker that has ended."""
        self.reading.drop(before.pipes.sources)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(before.pipes.status_fd)
        before.close()
        for path in (before.error_file, env.step_file(before.error_file)):
            with contextlib.suppress(OSError):
                os.unlink(path)  # or the next one's end would be taken for this one's
        self.workers.remove(before)
        self.exits.pop(before.rank, None)

    def _set_guard(self) -> None:
        groups = [worker.pid for worker in self.workers if worker.leads_group]
        self.guard = OrphanGuard.of(groups, self.guard)

    def on_status(self, worker: WorkerProcess) -> bool:
        """A worker says that it is alive, or that it has failed; False at the end."""
        words = os.read(worker.pipes.status_fd, 64)
        beats = [word for word in (ALIVE, WAITS, HANGS) if word in words]
        worker.looks_silent, worker.beats = 0, bool(beats) and not worker.failed_ns
        worker.word = max(beats, key=words.rfind, default=worker.word)
        if ALONE in words:
            self.alone.add(worker.rank)
            if len(self.alone) == len(self.specs) and self.announce is not None:
                self.announce(TRAIN_ALONE.format(count_text(len(self.specs), "worker")))
        worker.unsaid = next((UNSAID[word] for word in UNSAID if word in words), worker.unsaid)
        failures = [word for word in (EXITS, FAILED, *UNSAID) if word in words]
        if failures and not worker.failed_ns and not self.ending_since_ns:
            worker.failed_ns = time.monotonic_ns()
            end = self._exit_of(worker, 1)
            if failures == [EXITS]:
                pass  # its code comes with its end, for which Python may take a while
            elif not self.generations.is_on:
                self.on_failure(end.is_secondary)
            elif not end.raised or self.generations.survives_errors:
                worker.send(signal.SIGKILL)  # it waits for no process, and none for it
            elif self.generations.on_exit(end, {}):
                worker.is_judged = True
                worker.send(signal.SIGKILL)
            elif self.generations.end is None:
                self.on_failure(is_secondary=False)
        return bool(words)

    def _exit_of(self, worker: WorkerProcess, code: int) -> WorkerExit:
        """How a worker has ended, or will."""
        rank, generations = worker.rank, self.generations
        error = read_error(worker.error_file) or worker.unsaid
        is_late = generations.has_finished(rank)
        if code == 0 and generations.is_on and generations.is_member(rank) and not is_late:
            worker.accused, code = "finished before its run was, with exit code 0", 1
        elif worker.accused:
            error, code = {}, code or 1
            if stack := read_stack(worker):
                error["traceback"] = f"It was at:\n{main_thread(stack)}"
        if error.get("is_secondary"):
            error["is_secondary"] = generations.explains_loss(rank)
        failed_before = 0 < error.get("time_ns", 0) <= self.ending_since_ns
        is_cause = bool(worker.failed_ns or worker.accused) or not self.ending_since_ns
        noticed = {"time_ns": worker.failed_ns or time.monotonic_ns()}
        return WorkerExit(
            rank=rank,
            exit_code=code,
            ended_by_launcher=not (is_cause or failed_before),
            step=read_step(worker.error_file),
            accused=worker.accused,
            is_late=is_late and not generations.has_left_loop(rank),
            is_oom=code == -signal.SIGKILL and not error and self.oom_kills.explains_one(),
            **(noticed | error if is_cause or failed_before else noticed),
        )

    def on_exit(self, worker: WorkerProcess) -> None:
        if (code := worker.poll()) is None:
            return
        self.alive.remove(worker)
        if worker.pidfd >= 0:
            self.selector.unregister(worker.pidfd)
        ledger = self._close_channel(worker)
        end = self._exit_of(worker, code)
        is_ending = bool(self.ending_since_ns)
        if is_ending and self._decides and ledger is not None:
            self.generations.on_exit(end, ledger)  # the others stop without it
        if not is_ending and (worker.is_judged or self._is_survived(end, ledger)):
            self.survived[worker.rank] = end
            self.folder.show_first(end)
            worker.send(signal.SIGKILL)  # what it has started
            self.orphaned.append(worker.pid)
        elif not is_ending and end.killed_by and end.is_late:
            self._lose_late(worker, end)
        else:
            self.exits[worker.rank] = end
            if end.failed:
                self.on_failure(end.is_secondary)

    def _close_channel(self, worker: WorkerProcess) -> dict[str, Any] | None:
        """Hear the last words of a worker that has ended; what it leaves behind."""
        if worker.rank not in self.generations.worker_channels:
            return None
        with contextlib.suppress(KeyError):  # the worker may have closed its end before
            self.selector.unregister(self.generations.worker_channels[worker.rank].socket)
        return self.generations.close_worker_channel(worker.rank)

    def _is_survived(self, end: WorkerExit, ledger: dict[str, Any] | None) -> bool:
        """Whether the others continue without a worker that has ended."""
        if end.exit_code == 0 or ledger is None:
            return False
        if end.accused and end.traceback:
            ledger["stack"] = end.traceback.partition("\n")[2]
            self.generations.say(f"worker {end.rank} was at:\n{ledger['stack']}")
        return self.generations.on_exit(end, ledger)

    def _lose_late(self, worker: WorkerProcess, end: WorkerExit) -> None:
        """A worker was killed after its loop. The others finish what they do.

        What was left to it is done once more if it is done once for all, as rank 0 writes a model:
        by a new process, alone, which finds the training complete. See docs/survive.md.
        """
        generations, rank = self.generations, worker.rank
        worker.send(signal.SIGKILL)  # what it has started
        self.orphaned.append(worker.pid)
        self.late.append(end)
        tries = sum(each.rank == rank for each in self.late)
        what = "What it had still to do is lost"
        if generations.does_rest(rank):
            self._clear(worker)
            self.exits[rank] = end
            if end.signal in ASKS_TO_END or tries == MOST_LATE or not generations.can_repeat:
                what += "" if generations.can_repeat else f": {generations.why_not_repeated}"
            else:
                spec = next(spec for spec in self.specs if spec.rank == rank)
                self.starts.add(spec.alone())
                what = "Another one runs the script again, and finds the training complete"
        generations.say(f"{end.reason}. {what}.")

    def on_failure(self, is_secondary: bool) -> None:
        if not is_secondary:
            self.end_all()
        elif "blame" not in self.timers:
            self._after(BLAME_PATIENCE_S, "blame", self.end_all)

    def on_signal(self) -> None:
        numbers = [] if self.inbox is None else self.inbox.read()
        if self.console.is_left and not self.ending_since_ns:  # the signal of any other program
            numbers.append(signal.SIGPIPE)
        for number in numbers:
            if number in RESIZING and number not in self.options.signals_to_handle:
                if not self.ending_since_ns:
                    self.generations.resize(number)
            # It may have come to another machine before, which has passed it on.
            elif not self.ending_since_ns or (self._stops and self.stop is self.generations.end):
                self.stop = StopReason.behind(number)
                self.generations.pass_on(self.stop)
                self.end_all(number)
                if self.console.screen is not None:
                    self.console.screen.note(STOPPING)
            elif time.monotonic_ns() - self.ending_since_ns > REPEAT_NS:
                self.kill_all()  # Ctrl-C was pressed again

    def on_look(self) -> None:
        """End workers for whom others would wait for good; or all, if all wait for each other."""
        assert self.judge is not None
        if not self.ending_since_ns:
            self.judge.look(self.alive, self.generations)
            if (end := self.judge.find_deadlock(self.alive, self.generations)) is not None:
                self._end_with_others(end)
        self._after(self.judge.look_s, "look", self.on_look)

    def end_all(self, number: int = signal.SIGTERM) -> None:
        """Ask every worker to end; kill those that have not after the timeout."""
        if self.ending_since_ns:
            return
        self.ending_since_ns = time.monotonic_ns()
        self.stop = self.stop or self.generations.end
        self.starts.give_up()
        why = self.stop.text if self.stop else "another worker has failed"
        env.note_ending(self.specs[0].environment, why if self._stops else "")
        if self._stops:
            self.generations.on_stop()
        else:
            self.generations.tell_end(why)
        for worker in self.alive:
            if not worker.failed_ns:  # one that has failed ends by itself
                # A `Run` saves at the usual signals; and Python ignores that of a pipe.
                is_run = self.generations.trains(worker.rank)
                is_odd = is_run or number == signal.SIGPIPE
                word = signal.SIGTERM if is_odd and number not in ASKS_TO_END else number
                # Those who train have heard it, and end their loaders, which a signal would reach.
                worker.send(word if self._stops or not is_run else 0)
                worker.send(signal.SIGCONT)  # a stopped one handles no signal
        self._after(self._shutdown_timeout_s(), "kill", self.kill_all)

    def _shutdown_timeout_s(self) -> float:
        chosen_s, usual_s = self.options.shutdown_timeout, SHUTDOWN_TIMEOUT_S
        return (SIGNAL_TIMEOUT_S if self._stops else usual_s) if chosen_s is None else chosen_s

    @property
    def _stops(self) -> bool:
        """Whether a signal ends the run, so that workers finish a step and save."""
        return self.stop is not None and bool(self.stop.signal)

    @property
    def _decides(self) -> bool:
        """Whether workers that lose another one may still form a group."""
        return not self.ending_since_ns or (self._stops and not self.is_killed)

    def kill_all(self) -> None:
        self.is_killed = True
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
        self.reading.drain()

    def _close(self) -> None:
        self.starts.give_up()
        for worker in self.workers:
            worker.close()
        self.selector.close()
        if self.guard is not None:
            self.guard.close()

    def _listen(self, fd: int, act: Callable[[], bool | None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, act)

    def _after(self, seconds: float, name: str, act: Callable[[], None]) -> None:
        self.timers[name] = time.monotonic() + seconds, act
