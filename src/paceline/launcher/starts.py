"""Starting workers one after the other: forks of the template, or new interpreters.

    queue --> start --(a process)--------------------------------> started
                └--(the template is asked)--> answered ------------> started
                         └--> it is stopped or gone: a new interpreter

Nothing here waits: `turn` looks what has come. Where others train already, a worker that cannot be
started is tried again later, and ends no other worker.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline import env
from paceline.errors import UsageError
from paceline.launcher.deaths import WorkerExit
from paceline.launcher.follower import Follower
from paceline.launcher.generations import Generations
from paceline.launcher.output import Console, Pipes
from paceline.launcher.plan import WorkerSpec
from paceline.launcher.process import WorkerProcess
from paceline.launcher.template import Template, TemplateError

# A template that is to answer is looked at so often, and is done without, in favour of new
# interpreters, if it is stopped, or has not computed at so many looks in a row. On a machine that
# is busy it takes as long as it takes: a new one would take longer.
LOOK_S, MOST_IDLE = 5.0, 12
LIMITS = {
    errno.EAGAIN: "there are too many processes",
    errno.EMFILE: "there are too many open files",
    errno.ENFILE: "there are too many open files",
    errno.ENOMEM: "there is too little memory",
}
"""Why a process cannot be started, where that may change."""


@dataclass(eq=False)
class Starts:
    """Those that are to be started. One that the template was asked for has no number yet."""

    start: Callable[[WorkerSpec, Pipes], WorkerProcess]
    console: Console
    generations: Generations | Follower
    template: Template | None
    on_started: Callable[[WorkerProcess], None]
    on_template_gone: Callable[[int], object]
    """Told of its descriptor, before that is closed."""
    may_start: Callable[[], bool]
    queue: deque[WorkerSpec] = field(default_factory=deque)
    due_s: float | None = None
    """When to look at the template, from which something is awaited."""
    _idle: int = 0
    """At how many looks in a row it had not computed."""
    _computed_s: float = 0.0
    _asked: tuple[WorkerSpec, WorkerProcess] | None = None

    def __post_init__(self) -> None:
        if self.template is not None and not self.template.is_ready:
            self.due_s = time.monotonic() + LOOK_S

    @property
    def is_busy(self) -> bool:
        return bool(self.queue) or self._asked is not None

    def turn(self) -> None:
        """Hear what the template says, and start the workers that can be started now."""
        if self.template is not None:
            self._hear(self.template)
        while self.queue and self._asked is None:
            if self.template is not None and not self.template.is_ready:
                return
            if not self.may_start():
                return
            self._start(self.queue.popleft())

    def add(self, spec: WorkerSpec) -> None:
        """Start a worker when it is its turn; one with its number that waits has come too late."""
        self.queue = deque(each for each in self.queue if each.rank != spec.rank)
        self.queue.append(spec)

    def give_up(self) -> None:
        """Start no more workers."""
        self.queue.clear()
        if self._asked is not None:
            self._drop(*self._take_asked())
        if self.template is not None:
            self.template.give_up()

    def _start(self, spec: WorkerSpec) -> None:
        pipes = None
        try:
            os.makedirs(os.path.dirname(spec.error_file), mode=0o700, exist_ok=True)
            pipes = Pipes(spec, self.console)
            worker = self.start(spec, pipes)
        except BaseException as error:
            if pipes is not None:
                pipes.close()
            self.generations.drop_worker_channel(spec.rank)
            if not isinstance(error, OSError | MemoryError | UsageError):
                raise
            self._on_failed(spec, error)
            return
        if worker.pid:
            self.on_started(worker)
        else:
            self._asked, self._idle = (spec, worker), 0
            self.due_s = time.monotonic() + LOOK_S

    def _hear(self, template: Template) -> None:
        try:
            forked = template.answer()
        except TemplateError:
            self._drop_template(template)
            return
        except OSError as error:
            spec, worker = self._take_asked()
            self._drop(spec, worker)
            self._on_failed(spec, error)
            return
        if forked is not None:
            _, worker = self._take_asked()
            worker.pid = forked.pid
            self.on_started(worker)
        elif self._asked is None and template.is_ready:
            self.due_s = None
        elif self.due_s is not None and time.monotonic() > self.due_s:
            self._look_at(template)

    def _look_at(self, template: Template) -> None:
        """It has not answered yet: go on without it if nothing says that it will."""
        state, computed_s = env.read_process(template.pid)
        is_at_work = state in (b"R", b"D") or computed_s > self._computed_s
        self._idle, self._computed_s = 0 if is_at_work else self._idle + 1, computed_s
        if state == b"T" or self._idle >= MOST_IDLE:
            self._drop_template(template)
        else:
            self.due_s = time.monotonic() + LOOK_S

    def _drop_template(self, template: Template) -> None:
        """Do without it: it is gone, or stopped."""
        self.on_template_gone(template.fileno())
        template.close()
        self.template, self.due_s = None, None
        if self._asked is not None:
            spec, worker = self._take_asked()
            self._drop(spec, worker)
            self.queue.appendleft(spec)

    def _take_asked(self) -> tuple[WorkerSpec, WorkerProcess]:
        assert self._asked is not None
        taken, self._asked, self.due_s = self._asked, None, None
        return taken

    def _drop(self, spec: WorkerSpec, worker: WorkerProcess) -> None:
        worker.pipes.close()
        self.generations.drop_worker_channel(spec.rank)

    def _on_failed(self, spec: WorkerSpec, error: Exception) -> None:
        number = getattr(error, "errno", None) or errno.ENOMEM
        if self.generations.is_on:
            why = LIMITS.get(number, os.strerror(number))
            why = error.what.rstrip(".") if isinstance(error, UsageError) else why
            how = f"could not be started: {why}"
            lost = " What it does after the loop is lost." if spec.is_alone else ""
            self.generations.say(f"worker {spec.rank} {how}.{lost}")
            self.generations.on_exit(WorkerExit(rank=spec.rank, exit_code=1, accused=how), {})
            return
        if isinstance(error, UsageError):
            raise error
        raise UsageError(
            f"Cannot start rank {spec.rank}: {os.strerror(number)}.",
            advice="Start fewer workers, or raise the limits on processes, memory and open "
            "files (ulimit).",
        ) from error
