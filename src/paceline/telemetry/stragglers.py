"""Watching the ranks while they train: which one is slow, and which makes no progress.

Every few steps all ranks exchange a few numbers, so rarely that it takes about two thousandths of
the time; a rank that becomes slow is named within some hundred steps. `blame` finds the phase.

A thread of every rank writes its status to the group's store at regular intervals: its heartbeat.
When the rank has made no progress for too long, the thread prints step, bucket and the line of
Python. If the rank waits for a sum, it reads the heartbeats of the others: those that do not wait
are the cause, and one whose heartbeat has stopped is itself stopped or gone.
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
from traceback import extract_tb
from types import FrameType
from typing import Any, NamedTuple

import torch

from paceline.errors import PeerError, WireError, name_ranks
from paceline.files import parse_json
from paceline.group import Cadence, HostCopy, Membership, all_gather, waiting, word_device
from paceline.telemetry import spans
from paceline.telemetry.blame import WINDOWS, Blame, OwnWork, find_slow, has_lead, summarise
from paceline.telemetry.phases import Phase
from paceline.telemetry.stopwatch import Awaited, StepTimes, Stopwatch

WARM_UP_STEPS = 2
"""The first steps allocate memory and learn the order of gradients; they compare with nothing."""
LEAST_PERIOD, MOST_PERIOD = 5, 100
COST_SHARE = 0.002
"""About this share of the training time is spent on comparing, unless steps are tiny."""


def next_period(window: Sequence[OwnWork]) -> int:
    """In how many steps to compare again: the same answer on every rank."""
    # The rank that came last did not wait for others: its time is what the exchange costs.
    took = min(each.took_s for each in window)
    step = max(each.step_s for each in window)
    wanted = took / (COST_SHARE * step) if step > 0 else MOST_PERIOD
    return max(LEAST_PERIOD, min(MOST_PERIOD, math.ceil(wanted)))


class StragglerDetector:
    """One rank's part in the comparisons of its group.

        counting steps --(period over)--> exchange --> windows --> rank 0 reports a new Blame

    Invariant: when to exchange depends only on the step's number and on what the ranks of this
    generation have exchanged, so all ranks do so in the same step.
    """

    def __init__(self, watch: Stopwatch, membership: Membership) -> None:
        self.on_blame: Callable[[int, Blame], None] = print_blame
        """Called on rank 0 with the step and the finding.

        This object lives as long as the group, so the function must not keep the group alive."""
        self._watch = watch
        self.cadence = Cadence(membership, WARM_UP_STEPS + LEAST_PERIOD)
        membership.follow(self.on_generation)
        self.on_generation()

    def on_generation(self) -> None:
        """Forget earlier windows: the group has changed, and ranks may be other workers."""
        self.blame: Blame | None = None
        """The current finding; the same on every rank."""
        self.windows: deque[list[OwnWork]] = deque(maxlen=WINDOWS)
        self._seen: StepTimes | None = self._watch.finished[-1] if self._watch.finished else None
        """The last step that has been compared; an object, because step numbers may restart."""
        self._warm_up_steps = WARM_UP_STEPS
        self._pending_copy: HostCopy | None = None
        """On a GPU, the numbers of the last exchange on their way to the host."""
        self._took_s = 0.0
        self._confirms_soon = False
        """Whether the next comparison is early, to confirm the last one."""

    def after_step(self, membership: Membership, device: torch.device) -> None:
        """Compare if this step is due; called on every rank once gradients are averaged."""
        step = self._watch.step
        if self.cadence.is_due(step):
            self.cadence.agree(step, LEAST_PERIOD)
            # A rank that is missing here is also missing in the next sum, whose error says more.
            with waiting(membership.group), suppress(PeerError):
                self._exchange(membership, device)

    def _exchange(self, membership: Membership, device: torch.device) -> None:
        if self._pending_copy is not None:
            self._read(membership.rank, self._pending_copy.read())  # of the previous exchange
            self._pending_copy = None
        steps = list(takewhile(lambda step: step is not self._seen, reversed(self._watch.finished)))
        self._seen = steps[0] if steps else self._seen
        steps = steps[: len(steps) - self._warm_up_steps]
        self._warm_up_steps = 0
        where = word_device(membership.group, device)
        begun = spans.now_ns()
        in_s = [{phase: ns / 1e9 for phase, ns in step.items()} for step in steps]
        mine = torch.tensor(summarise(in_s, self._took_s).row(), dtype=torch.float64).to(where)
        by_rank = all_gather(membership.group, mine, "Comparing the pace of the ranks")
        gathered = HostCopy(torch.stack(by_rank))
        self._took_s = (spans.now_ns() - begun) / 1e9
        if where.type == "cpu":
            self._read(membership.rank, gathered.read())
        else:  # the host must not wait for the device: read in the next exchange
            self._pending_copy = gathered

    def _read(self, rank: int, gathered: torch.Tensor) -> None:
        window = [OwnWork.from_row(row) for row in gathered.tolist()]
        self.windows.append(window)
        known, self.blame = self.blame, find_slow(list(self.windows))
        # A rank that leads for the first time is compared again soon; not one that always leads, by
        # chance or because it is known to be slow.
        self._confirms_soon = self.blame is None and not self._confirms_soon and has_lead(window)
        if len(self.windows) == WINDOWS:  # until then every LEAST_PERIOD steps, at any cost
            period = LEAST_PERIOD if self._confirms_soon else next_period(window)
            self.cadence.agree(self._watch.step, period)
        if self.blame is not None and self.blame.culprit != (known and known.culprit) and rank == 0:
            self._say(self.blame)

    def _say(self, blame: Blame) -> None:
        step, recorder = self._watch.step, spans.current
        if recorder is not None:
            facts = {"slow_rank": blame.rank, "phase": blame.phase, "step": step}
            recorder.add("blame", spans.now_ns(), None, facts)
        self.on_blame(step, blame)


def print_blame(step: int, blame: Blame) -> None:
    _print_line(f"step {step}: {blame}")


LEAST_SILENCE_S = 2.0
"""The shortest gap between heartbeats that means silence: a busy machine delays them."""
_KEY = "paceline/heartbeat/{worker}"
_STATUS_LIMIT_BYTES = 4096
_LINE_LIMIT_CHARS = 120
_workers = partial(name_ranks, noun="worker")


class Status(NamedTuple):
    """What a rank reports about itself."""

    worker: int
    """The worker's number; once workers were lost it differs from the rank."""
    step: int
    phase: str
    what: str = ""
    """What the rank waits for, in words."""
    line: str = ""
    """The line of Python that the rank is at."""
    beat: int = 0
    """Counts heartbeats."""

    @property
    def waits(self) -> bool:
        return self.phase == Phase.WAIT

    @property
    def place(self) -> str:
        return "in its own code" if self.phase == Phase.OTHER else f"in {self.phase}"

    @classmethod
    def from_json(cls, data: bytes) -> Status | None:
        """Another rank's status from the store; None if malformed."""
        try:
            status = cls(**parse_json(data[:_STATUS_LIMIT_BYTES], "A heartbeat"))
        except (WireError, TypeError):
            return None
        kinds = [int, int, str, str, str, int]
        return status if [type(value) for value in status] == kinds else None


def describe_stall(status: Status, seconds: float) -> str:
    """What a rank that makes no progress prints about itself."""
    doing = f"waiting for {status.what or 'the other workers'}" if status.waits else status.place
    where = f" It is at {status.line}" if status.line else ""
    return (
        f"Worker {status.worker} has made no progress for {seconds:.0f} s: it is at step "
        f"{status.step}, {doing}.{where}"
    )


def name_causes(statuses: Sequence[Status], silent: Sequence[int], everyone: Sequence[int]) -> str:
    """Which workers the waiting ones wait for, according to all statuses."""
    waiters = [status.worker for status in statuses if status.waits]
    absent = sorted(set(everyone) - {status.worker for status in statuses} - set(silent))
    causes = [
        f"worker {status.worker}, which is {status.place}, at {status.line or 'no line'}"
        for status in statuses
        if not status.waits
    ]
    if silent:
        sends = "sends" if len(silent) == 1 else "send"
        causes.append(f"{_workers(list(silent))}, which {sends} no heartbeat: stopped or gone")
    if absent:
        has = "has" if len(absent) == 1 else "have"
        causes.append(f"{_workers(absent)}, which {has} not come this far")
    if not causes:
        return f"All {len(everyone)} workers wait for each other: they are not at the same sum."
    verb = "waits" if len(waiters) == 1 else "wait"
    who = _workers(waiters)
    return f"{who[0].upper()}{who[1:]} {verb} for {'; and for '.join(causes)}."


def _other_folders() -> tuple[str, ...]:
    """Where code is that is not the user's."""
    stdlib = sysconfig.get_path("stdlib")
    folders = [os.path.dirname(os.path.dirname(__file__)), f"{stdlib}{os.sep}", "<frozen"]
    if (torch := sys.modules.get("torch")) is not None and torch.__file__:
        folders.append(os.path.dirname(torch.__file__))
    return tuple(folders)


def line_of_error(error: BaseException) -> str:
    """The user's line that led to an exception; of code that has ended `line_of` knows nothing."""
    calls = extract_tb(error.__traceback__)
    others = _other_folders()
    users = [call for call in calls if not call.filename.startswith(others)]
    call = (users or calls)[-1]
    return f"{call.filename}:{call.lineno} in {call.name}" + (f": {call.line}" if call.line else "")


def line_of(frame: FrameType | None) -> str:
    """The innermost line of the user's code: not torch's, Python's or ours."""
    folders, innermost = _other_folders(), ""
    while frame is not None:
        path, number = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(path, number).strip()[:_LINE_LIMIT_CHARS]
        line = f"{path}:{number} in {frame.f_code.co_name}" + (f": {source}" if source else "")
        # Generated code, such as a dataclass's methods, has no source; a notebook's cell has.
        if not path.startswith(folders) and (source or not path.startswith("<")):
            return line
        innermost = innermost or line
        frame = frame.f_back
    return innermost


class StallWatch:
    """Watches one stopwatch from two threads: one prints, one talks to the store.

        quiet --(no progress for timeout_s)--> reported --(progress)--> quiet, and says so

    Two threads, because a store served by a stopped rank never answers, and that must not keep this
    rank from reporting. Holds the stopwatch weakly: the threads end with the group.
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
        self._print = print_line or _print_line
        self.keep: Callable[[str], None] | None = None
        """Called with each line that is printed, from these threads: a run records it."""
        self._clock = clock
        self._said_at_ns: int | None = None
        self._answered_ns = clock()
        """When the store last answered."""
        self._beats: dict[int, int] = {}
        """By worker, its heartbeat count when this rank had waited for half of `timeout_s`."""
        self._named_since_ns: int | None = None
        self._speaks_after_s = max(timeout_s, timeout_s / 2 + LEAST_SILENCE_S)

    def start(self) -> None:
        """Watch from now on, on threads that end with the stopwatch."""
        for target in (self._watch_progress, self._exchange_heartbeats):
            threading.Thread(target=target, name="paceline stalls", daemon=True).start()

    def _watch_progress(self) -> None:
        pause = threading.Event()
        while self.watch() is not None:
            self.check_progress()
            pause.wait(min(1.0, max(0.02, self.timeout_s / 8)))

    def _exchange_heartbeats(self) -> None:
        pause, beat, store, generation = threading.Event(), 0, None, -1
        while (watch := self.watch()) is not None:
            beat += 1
            if (membership := watch.membership()) is not None:
                # The store dies with the process that serves it; the next sum reports that.
                with contextlib.suppress(Exception):
                    if store is None or generation != membership.generation:
                        # A connection of its own: the training thread may be blocked in a wait on
                        # the group's.
                        store = membership.group.get_group_store().clone()
                        generation = membership.generation
                    mine = status_of(watch, membership, beat)
                    self.exchange(store, mine, membership.numbers)
            # Wake up exactly when this rank may have to report, else at the usual interval.
            left_s = self._speaks_after_s - (self._clock() - watch.since_ns) / 1e9
            del watch, membership  # or the pause would keep them alive, and this thread with them
            period_s = self.timeout_s / 8
            pause.wait(left_s if 0 < left_s < period_s else period_s)

    def _say(self, line: str) -> None:
        self._print(line)
        if self.keep is not None:
            with contextlib.suppress(Exception):
                self.keep(line)

    def check_progress(self) -> None:
        """Report if there has been no progress, or if there is some again."""
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
            self._say(describe_stall(status_of(watch, membership), (now - since) / 1e9))
            if now - self._answered_ns > self.timeout_s * 1e9 / 2:
                self._say(
                    "The store of the group does not answer: the process that serves it, usually "
                    "rank 0, is stopped or gone."
                )

    def exchange(self, store: Any, mine: Status, everyone: Sequence[int]) -> None:
        """Publish this rank's status, and, when it has waited for too long, name the cause."""
        store.set(_KEY.format(worker=mine.worker), json.dumps(mine._asdict()))
        self._answered_ns = self._clock()
        watch = self.watch()
        since = self._clock() if watch is None else watch.since_ns
        stands_s = (self._clock() - since) / 1e9
        if since == self._named_since_ns or not mine.waits or stands_s < self.timeout_s / 2:
            self._beats.clear()
            return
        statuses = [mine]
        for worker in sorted(set(everyone) - {mine.worker}):
            key = _KEY.format(worker=worker)
            status = Status.from_json(store.get(key)) if store.check([key]) else None
            if status is not None and status.worker == worker:
                statuses.append(status)
        # Two readings: a rank is silent if its heartbeat has not changed in the second half of the
        # wait. A single old heartbeat may only mean that a busy machine delays the thread.
        if not self._beats:
            self._beats = {status.worker: status.beat for status in statuses}
        elif stands_s >= self._speaks_after_s:
            self._named_since_ns = since
            silent = [s.worker for s in statuses if self._beats.get(s.worker) == s.beat]
            alive = sorted(status for status in statuses if status.worker not in silent)
            # Only one of the waiting ranks prints it.
            if mine.worker == min(status.worker for status in alive if status.waits):
                self._say(name_causes(alive, silent, everyone))


def status_of(watch: Stopwatch, members: Membership, beat: int = 0) -> Status:
    """The current status of a stopwatch's rank."""
    what = ""
    if watch.awaited is not None:
        with contextlib.suppress(Exception):  # the training thread may be replacing the buckets
            what = _describe(watch.awaited, members)
    line = line_of(sys._current_frames().get(watch.thread))
    return Status(members.numbers[members.rank], watch.step, watch.phase, what, line, beat)


def _describe(awaited: Awaited, members: Membership) -> str:
    what = re.sub(r"^Step \d+: ", "", awaited.describe(awaited.bucket))
    missing: list[int] = getattr(awaited.reduction, "missing", list)()
    if members.rank in missing:  # this host's part is complete, and stands for all its ranks
        return f"{what}, which lacks other hosts"
    numbers = [members.numbers[rank] for rank in missing]
    return f"{what}, which lacks {_workers(numbers)}" if missing else what


def _print_line(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)
