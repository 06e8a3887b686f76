"""How a run ended: who failed first, what the launcher prints, and which code it exits with.

When one worker fails the others soon fail too, with errors that only say a peer is gone. The
traceback worth reading is that of the first real failure, so it is printed alone and once.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass

MAX_RECORD_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Record:
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
    record: Record | None = None
    ended_by_launcher: bool = False

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 and not self.ended_by_launcher

    @property
    def is_secondary(self) -> bool:
        return self.record is not None and self.record.is_secondary

    @property
    def sort_key(self) -> tuple[bool, int]:
        return self.is_secondary, (self.record and self.record.time_ns) or self.noticed_ns


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
        return min((w for w in self.workers if w.failed), key=lambda w: w.sort_key, default=None)

    @property
    def succeeded(self) -> bool:
        return self.signal is None and not self.elsewhere and self.first_failure is None

    @property
    def exit_code(self) -> int:
        """0, 1 for a failure, 128+n for the signal n that ended the launcher or a worker."""
        if self.signal is not None:
            return 128 + self.signal
        first = self.first_failure
        if first is not None and first.record is None and first.exit_code < 0:
            return 128 - first.exit_code
        return 0 if self.succeeded else 1


def read_record(path: str) -> Record | None:
    """The record a worker left, in our format or in that of torch's `@record`; else None."""
    try:
        if os.path.getsize(path) > MAX_RECORD_BYTES:
            return None
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        message = data["message"]
        if isinstance(message, str):
            message = {"message": message}
        traceback = message.get("extraInfo", {}).get("py_callstack", "")
        return Record(
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
    if end.record is not None:
        return end.record.summary.partition("\n")[0]
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
    elif first is not None and first.record is not None and first.record.traceback:
        lines += [f"paceline: rank {first.rank} failed:", first.record.traceback.rstrip()]
    elif first is not None:
        lines.append(f"paceline: rank {first.rank} failed: {describe_exit(first)}.")
    elif ending.elsewhere:
        lines.append(f"paceline: {ending.elsewhere}")
    others = [end for end in ending.workers if end is not first and ending.signal is None]
    lines += [f"  rank {end.rank}: {describe_exit(end)}" for end in others]
    return "\n".join(lines) + "\n"
