"""Which rank the others wait for, and in which phase it loses the time: a decision, pure.

A sum makes all ranks equally late, so the time of a whole step says nothing. What is compared is
each rank's own work: from the moment the last sums arrived, up to the moment its own gradients
were ready for the next. A rank is slow against the median of the others.

    windows of a few steps, by rank --> slower than the others, by more than chance? --> Blame
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from paceline.observe.stopwatch import OWN, StepTimes

WINDOWS = 4
"""How many windows count at most: a rank that recovers is forgiven after so many."""
LEAST_WINDOWS = 2
"""In so many windows in a row a rank must be the slowest: once is an accident."""
LEAST_SECONDS = 0.002
LEAST_SHARE = 0.10
"""Of the others' own work; less is not worth a person's time."""
SIGMAS = 6.0
"""By how many standard errors the difference must exceed chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One rank in one window: its own work in an average step."""

    steps: int
    """How many steps were measured; 0 for a rank that had nothing to do."""
    seconds_by_phase: Mapping[str, float]
    variance: float
    """Of the own work of single steps, in seconds squared."""

    @property
    def own(self) -> float:
        return sum(self.seconds_by_phase.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """One rank makes the others wait."""

    rank: int
    phase: str
    slower_by_s: float
    """How much longer its own work takes in an average step than the others' median."""
    phase_s: float
    others_phase_s: float
    steps: int
    """How many steps were compared."""

    def __str__(self) -> str:
        where = (
            f"its {self.phase} takes {_ms(self.phase_s)}, the others' {_ms(self.others_phase_s)}"
            if self.phase != "other"
            else f"outside forward, backward, optimizer and data it spends {_ms(self.phase_s)}, "
            f"the others {_ms(self.others_phase_s)}"
        )
        return (
            f"Rank {self.rank} is slow: {where}. All ranks wait for it, {_ms(self.slower_by_s)} "
            f"in each of the last {self.steps} steps."
        )


def summarise(steps: Sequence[StepTimes]) -> Pace:
    """One rank's window in numbers, without its longest step.

    A checkpoint, an evaluation or a collection of garbage makes one step of a window long, on one
    rank alone. That is no slow rank.
    """
    usual = sorted(steps, key=lambda step: step.own_ns)
    if len(usual) > 2:
        usual.pop()
    if not usual:
        return Pace(steps=0, seconds_by_phase=dict.fromkeys(OWN, 0.0), variance=0.0)
    means = {phase: fmean(step.ns_by_phase[phase] for step in usual) / 1e9 for phase in OWN}
    own = sum(means.values())
    squares = sum((step.own_ns / 1e9 - own) ** 2 for step in usual)
    return Pace(steps=len(usual), seconds_by_phase=means, variance=squares / max(1, len(usual) - 1))


def find_slow(windows: Sequence[Sequence[Pace]]) -> Blame | None:
    """The rank that the last windows, each by rank, show to be slow, if any does."""
    recent = windows[-WINDOWS:]
    if len(recent) < LEAST_WINDOWS:
        return None
    slowest = [_slowest(window) for window in recent[-LEAST_WINDOWS:]]
    rank = slowest[0]
    if rank is None or any(other != rank for other in slowest):
        return None
    together = [_together([window[r] for window in recent]) for r in range(len(recent[-1]))]
    mine = together[rank]
    others = [pace for r, pace in enumerate(together) if r != rank and pace.steps]
    typical = median(pace.own for pace in others)
    excess = mine.own - typical
    if excess < max(LEAST_SECONDS, LEAST_SHARE * typical, SIGMAS * _standard_error(mine, others)):
        return None
    if any(_excess(window, rank) < excess / 3 for window in recent[-LEAST_WINDOWS:]):
        return None  # it is one window's accident that carries the average
    usual = {phase: median(p.seconds_by_phase[phase] for p in others) for phase in OWN}
    phase = max(OWN, key=lambda phase: mine.seconds_by_phase[phase] - usual[phase])
    return Blame(
        rank=rank,
        phase=phase,
        slower_by_s=excess,
        phase_s=mine.seconds_by_phase[phase],
        others_phase_s=usual[phase],
        steps=mine.steps,
    )


def _slowest(window: Sequence[Pace]) -> int | None:
    """The rank with the most work of its own, where at least two had any."""
    busy = [rank for rank, pace in enumerate(window) if pace.steps]
    return max(busy, key=lambda rank: window[rank].own) if len(busy) > 1 else None


def _excess(window: Sequence[Pace], rank: int) -> float:
    others = [pace.own for r, pace in enumerate(window) if r != rank and pace.steps]
    return window[rank].own - median(others)


def _together(paces: Sequence[Pace]) -> Pace:
    """Several windows of one rank as one."""
    steps = sum(pace.steps for pace in paces)
    if not steps:
        return paces[-1]

    def mean(values: Sequence[float]) -> float:
        return sum(v * pace.steps for v, pace in zip(values, paces, strict=True)) / steps

    means = {phase: mean([pace.seconds_by_phase[phase] for pace in paces]) for phase in OWN}
    return Pace(steps=steps, seconds_by_phase=means, variance=mean([p.variance for p in paces]))


def _standard_error(mine: Pace, others: Sequence[Pace]) -> float:
    """How far the difference of two averages is off by chance.

    If all ranks are equally noisy, all their noise together is the best estimate of it; where
    one is noisier than the rest, its own counts.
    """
    pooled = fmean([mine.variance, *(pace.variance for pace in others)])
    variance = max(pooled, mine.variance)
    fewest = min(pace.steps for pace in others)
    return math.sqrt(variance / mine.steps + pooled / fewest)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1000:.1f} ms"
