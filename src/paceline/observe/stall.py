"""A rank that makes no progress says so, says where it is, and finds out whom it waits for.

A thread looks at the rank's stopwatch now and then. When that has stood still for too long, it
prints step, bucket and the line of Python the rank is at, leaves the same in the group's store, and
reads there what the others left. Whoever waits for a sum waits for the ranks that do not: those say
where they are, and one that says nothing is stopped or gone.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from paceline.errors import name_ranks
from paceline.observe import spans
from paceline.observe.phases import Phase
from paceline.observe.stopwatch import Awaited, Stopwatch

_KEY = "paceline/stalled/{rank}"
_STATUS_LIMIT_BYTES = 4096
_LINE_LIMIT_CHARS = 120
_POLL_S = 0.1
_NO_STORE = (
    "The store of the group does not answer: the process that serves it, usually rank 0, is "
    "stopped or gone."
)


class Status(NamedTuple):
    """Where a rank that stands still says it is."""

    rank: int
    step: int
    phase: str
    what: str = ""
    """What it waits for, in words."""
    line: str = ""
    """The line of Python it is at."""

    @property
    def waits(self) -> bool:
        return self.phase == Phase.WAIT

    @property
    def place(self) -> str:
        return "in its own code" if self.phase == Phase.OTHER else f"in {self.phase}"

    @classmethod
    def from_json(cls, data: bytes) -> Status | None:
        """What another rank left in the store; nothing if that makes no sense."""
        try:
            status = cls(**json.loads(data[:_STATUS_LIMIT_BYTES]))
        except (ValueError, TypeError, RecursionError):
            return None
        return status if [type(value) for value in status] == [int, int, str, str, str] else None


def say(status: Status, seconds: float) -> str:
    """What a rank that stands still prints about itself."""
    doing = f"waiting for {status.what or 'the other ranks'}" if status.waits else status.place
    where = f" It is at {status.line}" if status.line else ""
    return (
        f"Rank {status.rank} has made no progress for {seconds:.0f} s: it is at step "
        f"{status.step}, {doing}.{where}"
    )


def accuse(said: Sequence[Status], size: int) -> str:
    """Whom the ranks that wait are waiting for, as far as what they said tells."""
    waiting = sorted(status.rank for status in said if status.waits)
    if not waiting:
        return ""
    silent = sorted(set(range(size)) - {status.rank for status in said})
    causes = [
        f"rank {status.rank}, which is {status.place}, at {status.line or 'no line'}"
        for status in sorted(said)
        if not status.waits
    ]
    if silent:
        causes.append(f"{name_ranks(silent)}, which said nothing: busy, stopped or gone")
    if not causes:
        return f"All {size} ranks wait for each other: they are not at the same sum."
    verb = "waits" if len(waiting) == 1 else "wait"
    who = name_ranks(waiting)
    return f"{who[0].upper()}{who[1:]} {verb} for {'; and for '.join(causes)}."


def line_of(frame: FrameType | None) -> str:
    """The innermost line that is the user's own: not torch's, Python's or ours."""
    foreign = _foreign_folders()
    innermost = ""
    while frame is not None:
        path, number = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(path, number).strip()[:_LINE_LIMIT_CHARS]
        line = f"{path}:{number} in {frame.f_code.co_name}" + (f": {source}" if source else "")
        # Generated code, as dataclasses have, is in no file; a notebook's cell has its lines.
        if not path.startswith(foreign) and (source or not path.startswith("<")):
            return line
        innermost = innermost or line
        frame = frame.f_back
    return innermost


def _foreign_folders() -> tuple[str, ...]:
    folders = [os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"), "<frozen"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        folders.append(os.path.dirname(torch.__file__))
    return tuple(folders)


class StallWatch:
    """Looks after one stopwatch.

        quiet --(nothing for timeout_s)--> said --(progress)--> quiet, and says so

    Holds it weakly: a group that is done with ends the watching.
    """

    def __init__(
        self,
        watch: Stopwatch,
        timeout_s: float,
        *,
        print_line: Callable[[str], None] | None = None,
        clock: Callable[[], int] = spans.now_ns,
    ) -> None:
        self.watch = weakref.ref(watch)
        self.timeout_s = timeout_s
        self._print = print_line or _print_to_stderr
        self._clock = clock
        self._said_at_ns: int | None = None

    def run(self) -> None:
        """Look now and then, as long as there is something to look at."""
        pause = threading.Event()
        while self.watch() is not None:
            self.look()
            pause.wait(min(1.0, max(0.02, self.timeout_s / 8)))

    def look(self) -> None:
        """Speak if there has been no progress, or if there is some again."""
        watch = self.watch()
        membership = watch.membership() if watch is not None else None
        if watch is None or membership is None:
            return
        since, now = watch.since_ns, self._clock()
        if self._said_at_ns is not None and since > self._said_at_ns:
            self._said_at_ns = None
            self._print(f"Rank {membership.rank} continues, at step {watch.step}.")
        if self._said_at_ns is None and now - since >= self.timeout_s * 1e9:
            self._said_at_ns = now
            status = status_of(watch, membership.rank)
            self._print(say(status, (now - since) / 1e9))
            # On a thread of its own: a store that is served by a stopped rank never answers.
            asking = threading.Thread(
                target=self._ask, args=(status, since), name="paceline stall", daemon=True
            )
            asking.start()

    def _ask(self, mine: Status, since_ns: int) -> None:
        """Tell the others, hear what they say, and let the lowest rank that speaks sum it up."""
        patience = threading.Timer(self.timeout_s + 1.0, self._print, [_NO_STORE])
        patience.daemon = True
        patience.start()
        key = _KEY.format(rank=mine.rank)
        try:
            size, store = self._store()
            store.set(key, json.dumps(mine._asdict()))
            said = self._listen(store, size, mine, since_ns)
            patience.cancel()
            verdict = accuse(list(said.values()), size)
            if self._stands_since(since_ns) and verdict and min(said) == mine.rank:
                self._print(verdict)
            pause = threading.Event()
            while self._stands_since(since_ns):
                pause.wait(_POLL_S)
            store.delete_key(key)  # it would mislead when somebody stands still again
        except Exception:
            return  # the store is gone with the rank that served it; a sum will fail soon
        finally:
            patience.cancel()

    def _store(self) -> tuple[int, Any]:
        """How many ranks there are, and a connection of our own to their store.

        The training thread may be holding the other one in a wait. And nobody here may keep the
        group, whose end would not be noticed then.
        """
        watch = self.watch()
        membership = watch.membership() if watch is not None else None
        if membership is None:
            raise RuntimeError("nobody is watched any more")
        return membership.size, membership.group.get_group_store().clone()

    def _listen(self, store: Any, size: int, mine: Status, since_ns: int) -> dict[int, Status]:
        """What all say, after a while for those that notice later than this rank."""
        said = {mine.rank: mine}
        pause = threading.Event()
        for _ in range(int(max(2.0, self.timeout_s / 2) / _POLL_S)):
            for rank in set(range(size)) - set(said):
                key = _KEY.format(rank=rank)
                status = Status.from_json(store.get(key)) if store.check([key]) else None
                if status is not None and status.rank == rank:
                    said[rank] = status
            if len(said) == size or not self._stands_since(since_ns):
                break
            pause.wait(_POLL_S)
        return said

    def _stands_since(self, since_ns: int) -> bool:
        watch = self.watch()
        return watch is not None and watch.since_ns == since_ns


def status_of(watch: Stopwatch, rank: int) -> Status:
    """Where the rank of a stopwatch is now."""
    what = ""
    if watch.awaited is not None:
        with contextlib.suppress(Exception):  # the buckets may be laid out anew this moment
            what = _describe(watch.awaited, rank)
    line = line_of(sys._current_frames().get(watch.thread))
    return Status(rank, watch.step, watch.phase, what, line)


def _describe(awaited: Awaited, rank: int) -> str:
    what = re.sub(r"^Step \d+: ", "", awaited.describe(awaited.bucket))
    missing: list[int] = getattr(awaited.reduction, "missing", list)()
    if rank in missing:  # nobody lacks oneself: this host's part is complete
        return f"{what}, which lacks other hosts"
    return f"{what}, which lacks {name_ranks(missing)}" if missing else what


def begin(
    watch: Stopwatch, timeout_s: float, print_line: Callable[[str], None] | None = None
) -> None:
    """Look after a stopwatch from now on, on a thread that ends with it."""
    if watch.stalls is None:
        watch.stalls = StallWatch(watch, timeout_s, print_line=print_line)
        thread = threading.Thread(target=watch.stalls.run, name="paceline stalls", daemon=True)
        thread.start()


def _print_to_stderr(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)
