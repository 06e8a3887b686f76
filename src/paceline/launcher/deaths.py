"""How workers end, whether a run survives that, and why it has ended: decided from facts alone.

    WorkerExit --Deaths.judge--> survived, or the words that end the run
    all WorkerExits, or a StopReason --RunResult--> one reason, said and written everywhere

An exception of the script's, or `sys.exit(1)`, is a bug, and ends the run. What no script causes is
an accident, and survived: signals, the kernel's want of memory, devices, loaders that were killed.
When one worker fails the others soon fail too, with errors that only say a peer is gone: the reason
is the first real failure, and its traceback is printed once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline import env
from paceline.env import step_file
from paceline.errors import describe_failure, first_line
from paceline.launcher.worker import FAILED_UNSAID, LOST_UNSAID

MAX_ERROR_BYTES = 4 * 2**20
SAME_STEP = 3
"""So many deaths at one step are a bug, not an accident."""
MOST_FAILURES, OWN_STEPS = 3, 100
"""So many failures of one worker within so many of its own steps are one, too."""
SAME_LINE = 2
"""So often one exception may come at one line, where exceptions are survived."""
BUG = "that is a bug, not an accident"
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS})
ASKS_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that are sent on purpose."""
BEFORE_TRAINING = -1
"""Stands for the step in which a worker died, where nothing was trained yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How one worker ended. A negative exit code is a signal, as in `subprocess`."""

    rank: int
    exit_code: int
    time_ns: int = 0
    """When it failed, by its own word or else when that was noticed; on the monotonic clock."""
    ended_by_launcher: bool = False
    summary: str = ""
    """What it wrote about the exception that ended it; empty where it wrote nothing."""
    traceback: str = ""
    at: str = ""
    """Which exception it was, and the line that raised it."""
    named: int = -1
    """The worker that the exception names, where all raise the same; -1 for this one."""
    is_secondary: bool = False
    """Whether the exception only says that another worker is gone."""
    is_accident: bool = False
    """Whether it says that a device or a process that loads data is."""
    ends_run: bool = False
    """Whether it said that no worker should continue."""
    step: int = 0
    """The last step of a `Run` that it began; 0 if none is known."""
    accused: str = ""
    """What the launcher has against it, if it ended the worker for that."""
    is_oom: bool = False
    """Whether the kernel killed it for want of memory."""
    is_late: bool = False
    """Whether its training was over."""

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.ended_by_launcher

    @property
    def raised(self) -> bool:
        """Whether an exception of its script ended it."""
        is_own = not self.is_secondary and not self.is_accident and not self.accused
        return bool(self.summary) and is_own

    @property
    def is_scripts(self) -> bool:
        """Whether its script has ended it: by an exception, or by an exit code that says failure,
        as after `except Exception: sys.exit(1)`."""
        is_code = self.exit_code > 0 and not (self.summary or self.accused or self.signal)
        return self.raised or (is_code and not self.is_accident)

    @property
    def culprit(self) -> int:
        """The worker that failed: this one, unless its exception says better."""
        return self.rank if self.named < 0 else self.named

    @property
    def killed_by(self) -> int:
        """The signal that killed it, unless it had failed before."""
        return -self.exit_code if self.exit_code < 0 and not self.summary else 0

    @property
    def signal(self) -> int:
        """The signal that killed it, or that it stopped for as its exit code 128+n says; else 0."""
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128
        is_one = number in set(signal.Signals) and not self.summary and not self.accused
        return number if is_one else 0

    @property
    def code_of_run(self) -> int:
        """The exit code of a run that it ends: 128+n for a signal, the one that its script has
        chosen with `sys.exit()`, or 1."""
        if self.signal:
            return 128 + self.signal
        return self.exit_code if self.exit_code > 0 and not (self.summary or self.accused) else 1

    @property
    def how(self) -> str:
        """What it did, as a sentence about it continues."""
        if self.accused:
            return self.accused
        if self.summary:
            return f"raised {self.first_line}"
        if self.exit_code < 0:
            why = ", out of memory" if self.is_oom else ""
            return f"was killed by signal {-self.exit_code} ({signal_name(-self.exit_code)}){why}"
        if self.signal:
            return f"was stopped by {signal_name(self.signal)} (exit code {self.exit_code})"
        return f"ended with exit code {self.exit_code}"

    @property
    def how_in_full(self) -> str:
        """The same with all that the exception said."""
        is_error = self.summary and not self.accused
        return f"raised {' '.join(self.summary.split())}".rstrip(".") if is_error else self.how

    @property
    def first_line(self) -> str:
        """Of the exception; empty where there was none."""
        return first_line(self.summary)

    @property
    def reason(self) -> str:
        """The same with its name and the step, as the reason of an end."""
        if self.raised:
            return describe_failure(self.culprit, self.first_line, self.step, is_late=self.is_late)
        return f"worker {self.rank} {self.how}{self.where}"

    @property
    def where(self) -> str:
        if self.is_late:
            return " after its training was over"
        return f" in step {self.step}" if self.step else ""

    def __str__(self) -> str:
        """In a few words, without the traceback."""
        if self.ended_by_launcher:
            return "ended by the launcher"
        return self.how if self.exit_code else "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReason:
    """Why a run ends early: the same on all its machines."""

    text: str = ""
    """Without a full stop."""
    exit_code: int = 1
    signal: int = 0
    """The signal that a launcher got, if that is why."""
    worker: int = -1
    """The worker whose end was one too many."""
    step: int = 0
    summary: str = ""
    """Of the exception, as the text may end."""
    traceback: str = ""
    lost_in: int = 0
    """The step in which the last worker died: the checkpoint carries on."""
    is_final: bool = False
    """No worker starts again."""
    is_hard: bool = False
    """No worker here may write anything any more."""

    @classmethod
    def by_signal(cls, number: int) -> StopReason:
        name = "Ctrl-C" if number == signal.SIGINT else signal_name(number)
        text, code = f"stopped by {name}", 128 + number
        return cls(text=text, exit_code=code, signal=number, is_final=True)

    @classmethod
    def of(cls, end: WorkerExit | None, text: str = "", lost_in: int = 0) -> StopReason:
        """It was the end of one worker, for which there may be other words; or of none."""
        if end is None:
            return cls(text=text, lost_in=lost_in)
        if not text and end.exit_code > 0 and end.signal in ASKS_TO_END:  # as all workers have
            text = cls.by_signal(end.signal).text
        return cls(
            text=text or end.reason,
            exit_code=end.code_of_run,
            worker=end.culprit,
            step=end.step,
            summary=end.first_line,
            traceback=end.traceback,
            lost_in=lost_in,
        )

    @classmethod
    def behind(cls, number: int) -> StopReason:
        """Why a launcher got a signal: what its own launcher has written; or else to stop."""
        path = env.read(env.REASON_VARIABLE)
        try:
            with open(path and end_file(path), encoding="utf-8") as file:
                return cls(text=file.read(), is_final=True)
        except OSError:
            return cls.by_signal(number)

    def leave(self) -> None:
        """Tell the launcher that has started this one, if one has, why the run has failed."""
        path = env.read(env.REASON_VARIABLE)
        if self.status == "failed" and path:
            with suppress(OSError), open(path, "w", encoding="utf-8") as file:
                file.write(self.text)

    @property
    def status(self) -> Literal["stopped", "failed"]:
        """What it makes of a run that was running."""
        is_asked = bool(self.signal) or self.exit_code - 128 in ASKS_TO_END
        return "stopped" if is_asked else "failed"

    def __str__(self) -> str:
        """As the launcher says it: with the traceback, which says the last words by itself."""
        if not self.traceback:
            return f"paceline: {self.text}."
        text = self.text.removesuffix(f": {self.summary}")
        return f"paceline: {text}:\n{self.traceback.rstrip()}"


@dataclass(frozen=True, slots=True)
class RunResult:
    """How all workers of one attempt on this machine ended, and why."""

    workers: tuple[WorkerExit, ...]
    stop: StopReason | None = None
    """Why they were ended, if that was not the first failure among them."""
    unstarted: tuple[int, ...] = ()
    """Those that had not been started when the first one failed."""

    @property
    def first_failure(self) -> WorkerExit | None:
        failed = [end for end in self.workers if end.failed]
        return min(failed, key=lambda end: (end.is_secondary, end.time_ns), default=None)

    @property
    def reason(self) -> StopReason | None:
        """Why the run has ended; None where it succeeded."""
        first = self.first_failure
        return self.stop or (None if first is None else StopReason.of(first))

    def with_late(self, late: Sequence[WorkerExit], can_repeat: bool) -> RunResult:
        """With those that were killed after their loop, if the others have failed for that."""
        if not late or not any(each.failed and each.is_secondary for each in self.workers):
            return self
        found = replace(self, workers=(*self.workers, *late))
        if not can_repeat or found.reason is None:
            return found
        return replace(found, stop=replace(found.reason, lost_in=late[0].step))

    @property
    def lost_in(self) -> int:
        """The step in which the last worker of a run died; the checkpoint carries on."""
        return 0 if self.stop is None else self.stop.lost_in

    @property
    def exit_code(self) -> int:
        """0, 1 for a failure, n for `sys.exit(n)`, 128+n for the signal n that ended the launcher
        or a worker."""
        return 0 if self.reason is None else self.reason.exit_code

    def __str__(self) -> str:
        """What the launcher prints: the reason with its traceback, then a line per worker."""
        reason = self.reason
        if reason is None:
            return ""
        lines = [str(reason)]
        for each in self.workers if not reason.signal else ():
            if each.rank != reason.worker:
                is_same = each.failed and reason.summary and each.first_line == reason.summary
                lines.append(f"  worker {each.rank}: {'raised the same' if is_same else each}")
        for rank in self.unstarted if not reason.signal else ():
            lines.append(f"  worker {rank}: not started")
        return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Deaths:
    """What the workers of a run died of so far; a replacement has the number of the dead one."""

    survives_errors: bool = False
    _at_step: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _counted: set[tuple[int, int]] = field(default_factory=set)
    _at_line: Counter[str] = field(default_factory=Counter)
    _joined: dict[int, int] = field(default_factory=dict)
    """In which step each began."""
    _steps: Counter[int] = field(default_factory=Counter)
    """How many steps its predecessors have had."""
    _failures: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """After how many of its own steps each worker has failed."""

    def on_joined(self, worker: int, step: int) -> None:
        """A worker takes part from now on."""
        self._joined[worker] = step

    def ends_run(self, end: WorkerExit) -> bool:
        """Whether no worker should continue after this death, were it the first."""
        return end.ends_run or (end.is_scripts and not self.survives_errors)

    def judge(self, end: WorkerExit, generation: int) -> str:
        """The death of a worker that took part: why it is one too many, or nothing."""
        if self.ends_run(end):
            return end.reason
        self._steps[end.rank] += max(0, end.step - self._joined.get(end.rank, 0))
        self._joined[end.rank] = end.step
        return (
            (self._judge_line(end) if end.raised else "")
            or (self._judge_worker(end) if end.raised or self._is_own_fault(end) else "")
            or self._judge_step(end, generation)
        )

    def _is_own_fault(self, end: WorkerExit) -> bool:
        return end.is_oom or end.killed_by in CRASHES

    def _judge_line(self, end: WorkerExit) -> str:
        self._at_line[end.at] += 1
        if self._at_line[end.at] < SAME_LINE:
            return ""
        return f"the same exception came {SAME_LINE} times at the same line: {end.reason}"

    def _judge_worker(self, end: WorkerExit) -> str:
        own = self._steps[end.rank]
        failures = self._failures[end.rank]
        failures.append(own)
        within = own - failures[-MOST_FAILURES:][0]
        if len(failures) < MOST_FAILURES or within > OWN_STEPS:
            return ""
        return (
            f"worker {end.rank} failed {MOST_FAILURES} times within {OWN_STEPS} of its own steps, "
            f"and at last it {end.how}{end.where}: {BUG}"
        )

    def _judge_step(self, end: WorkerExit, generation: int) -> str:
        """A crash follows the sample that causes it from worker to worker; who kills picks a
        worker. Several deaths in one generation count as one: they had one cause."""
        step, is_kill = end.step, end.killed_by == signal.SIGKILL and not end.is_oom
        if (generation, step) in self._counted:
            return ""
        self._counted.add((generation, step))
        key = (step, end.rank) if is_kill else (step,)
        self._at_step[key] += 1
        if self._at_step[key] < SAME_STEP:
            return ""
        return (
            f"step {step} ended a worker {SAME_STEP} times; the last was {end.rank}, which "
            f"{end.how}: {BUG}"
        )


class OomKills:
    """Which kills were the kernel's, for want of memory: its cgroup counts them.

    Workers share the cgroup of their launcher. One that is killed while the counter has risen was
    killed for that; two at once make it rise by two.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path or next(filter(os.path.exists, _oom_files()), "")
        self._seen = self._read()

    def forget(self) -> None:
        """A worker begins: what was killed before was another process."""
        self._seen = self._read()

    def explains_one(self) -> bool:
        """Whether the counter has risen; once per kill."""
        has_risen = self._read() > self._seen
        self._seen += has_risen
        return has_risen

    def _read(self) -> int:
        try:
            with open(self._path, encoding="ascii") as file:
                found = [line.split() for line in file]
        except (OSError, ValueError):
            return 0
        return next((int(words[1]) for words in found if words[:1] == ["oom_kill"]), 0)


def _oom_files() -> list[str]:
    """Where the kernel may count: in cgroups of version 2 or 1, by their path or, in a container,
    at the top."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except (OSError, ValueError):
        return []
    found = []
    for _, names, path in groups:
        if "memory" in names.split(","):
            places = (f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory")
            found += [f"{place}/memory.oom_control" for place in places]
        elif not names:
            places = (f"/sys/fs/cgroup{path}", "/sys/fs/cgroup")
            found += [f"{place}/memory.events" for place in places]
    return found


UNSAID: dict[bytes, dict[str, Any]] = {
    FAILED_UNSAID: {"summary": "its exception could not be written down, and is printed above"},
    LOST_UNSAID: {"is_accident": True},
}
"""What takes the place of an error file, by the word of a worker that had no room for one."""


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
            "at": str(data.get("at", "")),
            "named": int(data.get("named", -1)),
            "is_secondary": bool(data.get("is_secondary", False)),
            "is_accident": bool(data.get("is_accident", False)),
            "ends_run": bool(data.get("ends_run", False)),
        }
        return found | ({"time_ns": int(data["time_ns"])} if "time_ns" in data else {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def end_file(reason_file: str) -> str:
    """Where a launcher whose reason goes to this file finds why it is ended itself."""
    return os.path.join(os.path.dirname(reason_file), "end")


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
