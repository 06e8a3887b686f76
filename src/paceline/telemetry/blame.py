"""Which worker is slow, by how much and in which phase: the one straggler test for all callers.

Every worker waits for the sum, so all steps take equally long and their times say nothing. What is
compared is each worker's own work: from the moment the previous sums arrived until its own
gradients were ready for the next. A worker is slow relative to the median of the others.

    windows of a few steps, by worker --> slower than the others, by more than chance? --> Blame
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import fmean, median

from paceline.telemetry.phases import OWN, Phase
from paceline.telemetry.units import seconds_text

WINDOWS = 4
"""How many windows are kept: a rank that recovers is cleared after this many."""
LEAST_WINDOWS = 2
"""How many windows in a row a rank must be the slowest: one may be an accident."""
LEAST_SECONDS = 0.002
LEAST_SHARE = 0.10
"""Of the others' own work; a smaller difference is not reported."""
SIGMAS = 6.0
"""By how many standard errors the difference must exceed chance."""
LEAST_STEPS = 5
"""The shortest window, where the caller does not set its length."""

StepSeconds = Mapping[Phase, float]
"""Where a step's time went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """One rank in one window: its own work in an average step."""

    steps: int
    """How many steps were measured; 0 for a rank without rows."""
    variance: float
    """Of a rank's own work in single steps, in seconds squared."""
    step_s: float = 0.0
    """How long an average step takes, waits included."""
    took_s: float = 0.0
    """How long the previous exchange took; the rank that came last did not wait in it."""
    seconds_by_phase: Mapping[Phase, float]

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_phase.values())

    def row(self) -> list[float]:
        """As floats, which fit a tensor."""
        seconds = (self.seconds_by_phase[phase] for phase in OWN)
        return [self.steps, self.variance, self.step_s, self.took_s, *seconds]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> OwnWork:
        steps, variance, step_s, took_s, *seconds = row
        return cls(
            steps=int(steps),
            variance=variance,
            step_s=step_s,
            took_s=took_s,
            seconds_by_phase=dict(zip(OWN, seconds, strict=True)),
        )


class WorkWindow:
    """One worker's own work in some steps: sums, and the longest step, which is left out.

    A checkpoint, an evaluation or a garbage collection makes one step of a window long on one
    worker alone. That does not make it a slow worker.
    """

    __slots__ = ("by_phase", "longest", "longest_s", "own_s", "squares", "steps")

    def __init__(self) -> None:
        self.steps, self.own_s, self.squares, self.longest_s = 0, 0.0, 0.0, -1.0
        self.by_phase: dict[Phase, float] = {}
        self.longest: StepSeconds = {}

    def add(self, spent: StepSeconds, own_s: float) -> None:
        """Add a step; `own_s` is the sum of its own work in `spent`, which callers know."""
        self.steps += 1
        self.own_s += own_s
        self.squares += own_s * own_s
        sums = self.by_phase
        for phase, seconds in spent.items():
            sums[phase] = sums.get(phase, 0.0) + seconds
        if own_s > self.longest_s:
            self.longest_s, self.longest = own_s, spent

    def join(self, other: WorkWindow) -> None:
        self.steps += other.steps
        self.own_s += other.own_s
        self.squares += other.squares
        for phase, seconds in other.by_phase.items():
            self.by_phase[phase] = self.by_phase.get(phase, 0.0) + seconds
        if other.longest_s > self.longest_s:
            self.longest_s, self.longest = other.longest_s, other.longest

    def summarise(self) -> OwnWork:
        """The averages, without the longest step."""
        less, longest = (self.longest_s, self.longest) if self.steps > 2 else (0.0, {})
        steps = self.steps - (self.steps > 2)
        count, own_s = max(1, steps), self.own_s - less
        variance = (self.squares - less * less - own_s * own_s / count) / max(1, steps - 1)
        by_phase = {
            phase: (self.by_phase.get(phase, 0.0) - longest.get(phase, 0.0)) / count
            for phase in OWN
        }
        return OwnWork(steps=steps, variance=max(0.0, variance), seconds_by_phase=by_phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """A finding: one rank makes the others wait."""

    rank: int
    phase: Phase
    slower_by_s: float
    """How much longer its own work takes in an average step than the others' median."""
    phase_s: float
    others_phase_s: float
    steps: int
    """How many steps were compared."""

    @property
    def culprit(self) -> tuple[int, Phase]:
        return self.rank, self.phase

    def __str__(self) -> str:
        own, others = seconds_text(self.phase_s), seconds_text(self.others_phase_s)
        what = f"its {self.phase}"
        if self.phase == Phase.OTHER:
            what = "what it does outside data, forward, backward and optimizer"
        return (
            f"Worker {self.rank} is slow: {what} takes {own}, the others' {others}. All wait "
            f"for it, {seconds_text(self.slower_by_s)} in each of the last {self.steps} steps."
        )


def find_slow_worker(steps_by_worker: Mapping[int, Sequence[StepSeconds]]) -> Blame | None:
    """The slow worker, if there is one; `steps_by_worker` has the newest step last."""
    everyones = list(steps_by_worker.values())
    longest = max(map(len, everyones), default=0)
    count = min(WINDOWS, longest // LEAST_STEPS)
    if count < LEAST_WINDOWS:
        return None
    width = longest // count
    # Windows are counted from the end, where all workers are at about the same step.
    bounds = [(-width * (number + 1), -width * number or None) for number in range(count)]
    windows = [[summarise(steps[a:b]) for steps in everyones] for a, b in reversed(bounds)]
    blame = find_slow(windows)
    return blame and replace(blame, rank=list(steps_by_worker)[blame.rank])


def summarise(steps: Sequence[StepSeconds], took_s: float = 0.0) -> OwnWork:
    """Average one worker's steps; see `WorkWindow`."""
    window = WorkWindow()
    for step in steps:
        window.add(step, sum(step.get(phase, 0.0) for phase in OWN))
    step_s = sum(window.by_phase.values()) / max(1, len(steps))  # waits included
    return replace(window.summarise(), step_s=step_s, took_s=took_s)


def find_slow(windows: Sequence[Sequence[OwnWork]]) -> Blame | None:
    """The slow rank in the last windows, if there is one; a window lists its ranks in order."""
    leads = [_lead(window) for window in windows[-WINDOWS:]]
    newest = leads[-1] if leads else None
    if newest is None:
        return None
    # A lead that shrinks to a third has another cause, or was an accident: older windows are
    # then not evidence for this one.
    rank, least = newest[0], newest[1] / 3
    lasts = takewhile(lambda lead: lead and lead[0] == rank and lead[1] >= least, reversed(leads))
    count = len(list(lasts))
    return compare(windows[-count:], rank) if count >= LEAST_WINDOWS else None


def compare(windows: Sequence[Sequence[OwnWork]], rank: int) -> Blame | None:
    """Compare one rank's work with the others' in windows that it leads; None if not slower."""
    together = [_pool([window[r] for window in windows]) for r in range(len(windows[-1]))]
    mine = together[rank]
    others = [work for r, work in enumerate(together) if r != rank and work.steps]
    typical_s = median(work.seconds for work in others)
    excess = mine.seconds - typical_s
    if excess < max(LEAST_SECONDS, LEAST_SHARE * typical_s, SIGMAS * _standard_error(mine, others)):
        return None
    usual = {phase: median(work.seconds_by_phase[phase] for work in others) for phase in OWN}
    phase = max(OWN, key=lambda phase: mine.seconds_by_phase[phase] - usual[phase])
    return Blame(
        rank=rank,
        phase=phase,
        slower_by_s=excess,
        phase_s=mine.seconds_by_phase[phase],
        others_phase_s=usual[phase],
        steps=mine.steps,
    )


def has_lead(window: Sequence[OwnWork]) -> bool:
    """Whether one rank of a window is slow enough to be compared again soon."""
    lead = _lead(window)
    typical_s = median(work.seconds for work in window if work.steps) if lead else 0.0
    return lead is not None and lead[1] >= max(LEAST_SECONDS, LEAST_SHARE * typical_s)


def find_slow_spans(windows: Sequence[Sequence[OwnWork]]) -> list[tuple[int, int, Blame]]:
    """The spans of windows [begin, end) in which a rank was slow, the most expensive first.

    A single window in which another rank had more work does not end a span.
    """
    leads = [_lead(window) for window in windows]
    slow = dict[int, int]()
    for end in range(LEAST_WINDOWS, len(windows) + 1):
        begin = max(0, end - WINDOWS)
        if (blame := find_slow(windows[begin:end])) is not None:
            for at in range(begin, end):
                lead = leads[at]
                if lead and lead[0] == blame.rank and lead[1] >= blame.slower_by_s / 3:
                    slow[at] = blame.rank
    spans = list[list[int]]()
    for at, rank in sorted(slow.items()):
        if spans and spans[-1][2] == rank and at - spans[-1][1] <= 1:
            spans[-1][1] = at + 1
        else:
            spans.append([at, at + 1, rank])
    found = [(begin, end, compare(windows[begin:end], rank)) for begin, end, rank in spans]
    known = [(begin, end, blame) for begin, end, blame in found if blame is not None]
    return sorted(known, key=lambda each: -each[2].slower_by_s * each[2].steps)


def _lead(window: Sequence[OwnWork]) -> tuple[int, float] | None:
    """The rank with the most work of its own and its lead; None unless two ranks had work."""
    seconds = {rank: work.seconds for rank, work in enumerate(window) if work.steps}
    if len(seconds) < 2:
        return None
    rank = max(seconds, key=seconds.__getitem__)
    return rank, seconds.pop(rank) - median(seconds.values())


def _pool(windows: Sequence[OwnWork]) -> OwnWork:
    """Average several windows of one rank, weighted by their steps."""
    steps = sum(work.steps for work in windows)

    def mean(values: Iterable[float]) -> float:
        pairs = zip(values, windows, strict=True)
        return sum(value * work.steps for value, work in pairs) / max(1, steps)

    return OwnWork(
        steps=steps,
        variance=mean(work.variance for work in windows),
        seconds_by_phase={
            phase: mean(work.seconds_by_phase[phase] for work in windows) for phase in OWN
        },
    )


def _standard_error(mine: OwnWork, others: Sequence[OwnWork]) -> float:
    """The standard error of the difference between this rank's mean and the others'.

    Where all ranks are equally noisy, the pooled variance is the best estimate; a rank that is
    noisier than the rest is judged by its own.
    """
    pooled = fmean([mine.variance, *(work.variance for work in others)])
    variance = max(pooled, mine.variance)
    return math.sqrt(variance / mine.steps + pooled / min(work.steps for work in others))
