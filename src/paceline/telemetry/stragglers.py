"""Watching the ranks while they train: which of them is slow, and which makes no progress.

Every few steps all ranks exchange a handful of numbers, so seldom that it takes about two
thousandths of the time; a rank that becomes slow is named within some hundred steps. `blame` says
what makes it slow.

A thread of every rank writes into the group's store, again and again, where the rank is: its pulse.
When the rank has stood still for too long, the thread prints step, bucket and the line of Python
it is at. If it waits for a sum, it reads the pulses of the others: those that do not wait are the
cause, and one whose pulse has stopped is stopped itself, or gone.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import math
import os
import re
import sys
import sysconfig
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from types import FrameType
from typing import Any, NamedTuple

import torch

from paceline.errors import PeerError, WireError, name_ranks
from paceline.files import parse_json
from paceline.group import Cadence, HostCopy, Membership, all_gather, word_device
from paceline.telemetry import spans, stopwatch
from paceline.telemetry.blame import WINDOWS, Blame, OwnWork, find_slow, has_lead, summarise
from paceline.telemetry.phases import Phase
from paceline.telemetry.stopwatch import Awaited, StepTimes, Stopwatch

WARM_UP_STEPS = 2
"""The first steps allocate memory and learn the order of gradients; they compare with nothing."""
LEAST_PERIOD, MOST_PERIOD = 5, 100
COST_SHARE = 0.002
"""Of the training time, about this much is spent on comparing, where steps are not tiny."""


def next_period(window: Sequence[OwnWork]) -> int:
    """In how many steps to compare again: the same answer on every rank."""
    took = min(each.took_s for each in window)
    step = max(each.step_s for each in window)
    wanted = took / (COST_SHARE * step) if step > 0 else MOST_PERIOD
    return max(LEAST_PERIOD, min(MOST_PERIOD, math.ceil(wanted)))


class StragglerDetector:
    """One rank's part in the comparisons of its group.

        counting steps --(period over)--> exchange --> windows --> a new Blame is told, on rank 0

    Invariant: the number of the step, and what the ranks of this generation have exchanged, decide
    when to exchange, so all ranks do.
    """

    def __init__(self, watch: Stopwatch, membership: Membership) -> None:
        self.tell: Callable[[int, Blame], None] = print_to_stderr
        """Called on rank 0 with the step and what was found.

        It lives as long as the group, so it must not hold it."""
        self._watch = watch
        self.cadence = Cadence(membership, WARM_UP_STEPS + LEAST_PERIOD)
        self.on_generation()
        membership.follow(self.on_generation)

    def on_generation(self) -> None:
        """Another group, perhaps of other ranks: nothing known before counts."""
        self.blame: Blame | None = None
        """Who is slow now, as far as is known; the same on every rank."""
        self.windows: deque[list[OwnWork]] = deque(maxlen=WINDOWS)
        self._seen: StepTimes | None = self._watch.finished[-1] if self._watch.finished else None
        """The last step that is compared already; numbers of steps may begin again."""
        self._warm_up_steps = WARM_UP_STEPS
        self._under_way: HostCopy | None = None
        """On a GPU, numbers on their way to the host and the event of their arrival."""
        self._took_s = 0.0
        self._hurries = False
        """Whether the next comparison comes soon, to confirm what the last one showed."""

    def after_step(self, membership: Membership, device: torch.device) -> None:
        """The gradients of a step are averaged, and it may be time to compare; on every rank."""
        step = self._watch.step
        if self.cadence.is_due(step):
            self.cadence.agree(step, LEAST_PERIOD)
            # Whoever is missing here is missed by the next sum too, which says so better.
            with stopwatch.waiting(membership.group), suppress(PeerError):
                self._exchange(membership, device)

    def _exchange(self, membership: Membership, device: torch.device) -> None:
        if self._under_way is not None:
            self._read(membership.rank, self._under_way.read())  # sent for some steps ago
            self._under_way = None
        steps = list(takewhile(lambda step: step is not self._seen, reversed(self._watch.finished)))
        self._seen = steps[0] if steps else self._seen
        steps = steps[: len(steps) - self._warm_up_steps]
        self._warm_up_steps = 0
        where = word_device(membership.group, device)
        begun = spans.now_ns()
        in_s = [{phase: ns / 1e9 for phase, ns in step.ns_by_phase.items()} for step in steps]
        mine = torch.tensor(summarise(in_s, self._took_s).row(), dtype=torch.float64).to(where)
        by_rank = all_gather(membership.group, mine, "Comparing the pace of the ranks")
        gathered = HostCopy(torch.stack(by_rank))
        self._took_s = (spans.now_ns() - begun) / 1e9
        if where.type == "cpu":
            self._read(membership.rank, gathered.read())
        else:  # the host does not wait for the device
            self._under_way = gathered

    def _read(self, rank: int, gathered: torch.Tensor) -> None:
        window = [OwnWork.from_row(row) for row in gathered.tolist()]
        self.windows.append(window)
        known, self.blame = self.blame, find_slow(list(self.windows))
        # Whoever leads for the first time is looked at again soon; who always leads, by chance or
        # because it is known to be slow, is not worth that.
        self._hurries = self.blame is None and not self._hurries and has_lead(window)
        if len(self.windows) == WINDOWS:  # until then often, whatever it costs
            period = LEAST_PERIOD if self._hurries else next_period(window)
            self.cadence.agree(self._watch.step, period)
        if self.blame is not None and self.blame.culprit != (known and known.culprit) and rank == 0:
            self._say(self.blame)

    def _say(self, blame: Blame) -> None:
        step, recorder = self._watch.step, spans.current
        if recorder is not None:
            facts = {"slow_rank": blame.rank, "phase": blame.phase, "step": step}
            recorder.add("blame", spans.now_ns(), None, facts)
        self.tell(step, blame)


def print_to_stderr(step: int, blame: Blame) -> None:
    _say_on_stderr(f"step {step}: {blame}")


LEAST_SILENCE_S = 2.0
"""A busy machine may delay a pulse that is to come more often than this."""
_KEY = "paceline/pulse/{worker}"
_STATUS_LIMIT_BYTES = 4096
_LINE_LIMIT_CHARS = 120
_workers = partial(name_ranks, noun="worker")


class Status(NamedTuple):
    """Where a rank says it is."""

    worker: int
    """Its number, which in a training that has lost workers is not its rank."""
    step: int
    phase: str
    what: str = ""
    """What it waits for, in words."""
    line: str = ""
    """The line of Python it is at."""
    beat: int = 0
    """Another number every time."""

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
            status = cls(**parse_json(data[:_STATUS_LIMIT_BYTES], "A pulse"))
        except (WireError, TypeError):
            return None
        kinds = [int, int, str, str, str, int]
        return status if [type(value) for value in status] == kinds else None


def say(status: Status, seconds: float) -> str:
    """What a rank that stands still prints about itself."""
    doing = f"waiting for {status.what or 'the other workers'}" if status.waits else status.place
    where = f" It is at {status.line}" if status.line else ""
    return (
        f"Worker {status.worker} has made no progress for {seconds:.0f} s: it is at step "
        f"{status.step}, {doing}.{where}"
    )


def accuse(said: Sequence[Status], silent: Sequence[int], everyone: Sequence[int]) -> str:
    """Whom the workers that wait are waiting for, as far as what they say tells."""
    waiting = [status.worker for status in said if status.waits]
    absent = sorted(set(everyone) - {status.worker for status in said} - set(silent))
    causes = [
        f"worker {status.worker}, which is {status.place}, at {status.line or 'no line'}"
        for status in said
        if not status.waits
    ]
    if silent:
        says = "says" if len(silent) == 1 else "say"
        causes.append(f"{_workers(list(silent))}, which {says} nothing any more: stopped or gone")
    if absent:
        has = "has" if len(absent) == 1 else "have"
        causes.append(f"{_workers(absent)}, which {has} not come this far")
    if not causes:
        return f"All {len(everyone)} workers wait for each other: they are not at the same sum."
    verb = "waits" if len(waiting) == 1 else "wait"
    who = _workers(waiting)
    return f"{who[0].upper()}{who[1:]} {verb} for {'; and for '.join(causes)}."


def line_of(frame: FrameType | None) -> str:
    """The innermost line that is the user's own: not torch's, Python's or ours."""
    folders = [os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"), "<frozen"]
    if (torch := sys.modules.get("torch")) is not None and torch.__file__:
        folders.append(os.path.dirname(torch.__file__))
    innermost = ""
    while frame is not None:
        path, number = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(path, number).strip()[:_LINE_LIMIT_CHARS]
        line = f"{path}:{number} in {frame.f_code.co_name}" + (f": {source}" if source else "")
        # Generated code, as dataclasses have, is in no file; a notebook's cell has its lines.
        if not path.startswith(tuple(folders)) and (source or not path.startswith("<")):
            return line
        innermost = innermost or line
        frame = frame.f_back
    return innermost


class StallWatch:
    """Looks after one stopwatch, from two threads: one to speak, one for the store.

        quiet --(nothing for timeout_s)--> said --(progress)--> quiet, and says so

    A store that is served by a stopped rank never answers; that must not keep a rank from
    speaking. Holds the stopwatch weakly: a group that is done with ends the watching.
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
        self._print = print_line or _say_on_stderr
        self.keep: Callable[[str], None] | None = None
        """Told what is printed, from another thread: a run keeps it for whoever looks at it."""
        self._clock = clock
        self._said_at_ns: int | None = None
        self._answered_ns = clock()
        """When the store answered last."""
        self._beats: dict[int, int] = {}
        """By rank, its pulse halfway through the time after which this rank speaks."""
        self._accused_since_ns: int | None = None
        self._speaks_after_s = max(timeout_s, timeout_s / 2 + LEAST_SILENCE_S)

    def start(self) -> None:
        for target in (self._speak, self._beat):
            threading.Thread(target=target, name="paceline stalls", daemon=True).start()

    def _speak(self) -> None:
        pause = threading.Event()
        while self.watch() is not None:
            self.look()
            pause.wait(min(1.0, max(0.02, self.timeout_s / 8)))

    def _beat(self) -> None:
        pause, beat, store, generation = threading.Event(), 0, None, -1
        while (watch := self.watch()) is not None:
            beat += 1
            if (membership := watch.membership()) is not None:
                # The store is gone with the process that served it; a sum will fail soon.
                with contextlib.suppress(Exception):
                    if store is None or generation != membership.generation:
                        # The training thread may be holding the other connection in a wait.
                        store = membership.group.get_group_store().clone()
                        generation = membership.generation
                    mine = status_of(watch, membership, beat)
                    self.exchange(store, mine, membership.numbers)
            left_s = self._speaks_after_s - (self._clock() - watch.since_ns) / 1e9
            del watch, membership  # whose end would not be noticed while this thread pauses
            period_s = self.timeout_s / 8
            pause.wait(left_s if 0 < left_s < period_s else period_s)

    def _say(self, line: str) -> None:
        self._print(line)
        if self.keep is not None:
            with contextlib.suppress(Exception):
                self.keep(line)

    def look(self) -> None:
        """Speak if there has been no progress, or if there is some again."""
        watch = self.watch()
        membership = watch.membership() if watch is not None else None
        if watch is None or membership is None:
            return
        since, now = watch.since_ns, self._clock()
        if self._said_at_ns is not None and since > self._said_at_ns:
            self._said_at_ns = None
            self._say(f"This worker continues, at step {watch.step}.")
        if self._said_at_ns is None and now - since >= self.timeout_s * 1e9:
            self._said_at_ns = now
            self._say(say(status_of(watch, membership), (now - since) / 1e9))
            if now - self._answered_ns > self.timeout_s * 1e9 / 2:
                self._say(
                    "The store of the group does not answer: the process that serves it, usually "
                    "rank 0, is stopped or gone."
                )

    def exchange(self, store: Any, mine: Status, everyone: Sequence[int]) -> None:
        """Say where this rank is, and, when it has waited for too long, who is the cause."""
        store.set(_KEY.format(worker=mine.worker), json.dumps(mine._asdict()))
        self._answered_ns = self._clock()
        watch = self.watch()
        since = self._clock() if watch is None else watch.since_ns
        stands_s = (self._clock() - since) / 1e9
        if since == self._accused_since_ns or not mine.waits or stands_s < self.timeout_s / 2:
            self._beats.clear()
            return
        said = [mine]
        for worker in sorted(set(everyone) - {mine.worker}):
            key = _KEY.format(worker=worker)
            status = Status.from_json(store.get(key)) if store.check([key]) else None
            if status is not None and status.worker == worker:
                said.append(status)
        if not self._beats:
            self._beats = {status.worker: status.beat for status in said}
        elif stands_s >= self._speaks_after_s:
            self._accused_since_ns = since
            silent = [s.worker for s in said if self._beats.get(s.worker) == s.beat]
            alive = sorted(status for status in said if status.worker not in silent)
            # One of those that wait is enough.
            if mine.worker == min(status.worker for status in alive if status.waits):
                self._say(accuse(alive, silent, everyone))


def status_of(watch: Stopwatch, members: Membership, beat: int = 0) -> Status:
    """Where the rank of a stopwatch is now."""
    what = ""
    if watch.awaited is not None:
        with contextlib.suppress(Exception):  # the buckets may be laid out anew this moment
            what = _describe(watch.awaited, members)
    line = line_of(sys._current_frames().get(watch.thread))
    return Status(members.numbers[members.rank], watch.step, watch.phase, what, line, beat)


def _describe(awaited: Awaited, members: Membership) -> str:
    what = re.sub(r"^Step \d+: ", "", awaited.describe(awaited.bucket))
    missing: list[int] = getattr(awaited.reduction, "missing", list)()
    if members.rank in missing:  # nobody lacks oneself: this host's part is complete
        return f"{what}, which lacks other hosts"
    numbers = [members.numbers[rank] for rank in missing]
    return f"{what}, which lacks {_workers(numbers)}" if missing else what


def begin_stall_watch(
    watch: Stopwatch, timeout_s: float, print_line: Callable[[str], None] | None = None
) -> None:
    """Look after a stopwatch from now on, on threads that end with it."""
    if watch.stalls is None:
        watch.stalls = StallWatch(watch, timeout_s, print_line=print_line)
        watch.stalls.start()


def _say_on_stderr(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)
