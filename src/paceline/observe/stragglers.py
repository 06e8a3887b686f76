"""Which rank the others wait for, and in which phase it loses the time.

A sum makes all ranks equally late, so the time of a whole step says nothing. What is compared is
each rank's own work: from the moment the last sums arrived, up to the moment its own gradients
were ready for the next. Every few steps all ranks exchange a handful of numbers, so seldom that it
takes about a thousandth of the time. A rank is slow against the median of the others.

    windows of a few steps, by rank --> slower than the others, by more than chance? --> Blame
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, median
from typing import Any

import torch

from paceline import comm
from paceline.comm.membership import Membership
from paceline.errors import PeerError
from paceline.observe import spans, stopwatch
from paceline.observe.phases import OWN, Phase
from paceline.observe.stopwatch import StepTimes, Stopwatch
from paceline.observe.units import seconds_text

WINDOWS = 4
"""How many windows count at most: a rank that recovers is forgiven after so many."""
LEAST_WINDOWS = 2
"""In so many windows in a row a rank must be the slowest: once is an accident."""
LEAST_SECONDS = 0.002
LEAST_SHARE = 0.10
"""Of the others' own work; less is not worth a person's time."""
SIGMAS = 6.0
"""By how many standard errors the difference must exceed chance."""
WARM_UP_STEPS = 2
"""The first steps allocate memory and learn the order of gradients; they compare with nothing."""
LEAST_PERIOD, MOST_PERIOD = 5, 500
COST_SHARE = 0.001
"""Of the training time, at most this much is spent on comparing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """One rank in one window: its own work in an average step."""

    steps: int
    """How many steps were measured; 0 for a rank that had nothing to do."""
    variance: float
    """Of a rank's own work in single steps, in seconds squared."""
    step_s: float = 0.0
    """How long an average step is with its waits."""
    took_s: float = 0.0
    """How long the exchange before took; the rank that came last did not wait in it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """One rank makes the others wait."""

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
            f"Rank {self.rank} is slow: {what} takes {own}, the others' {others}. All ranks wait "
            f"for it, {seconds_text(self.slower_by_s)} in each of the last {self.steps} steps."
        )


def summarise(steps: Sequence[StepTimes], took_s: float = 0.0) -> OwnWork:
    """One rank's window in numbers, without its longest step.

    A checkpoint, an evaluation or a collection of garbage makes one step of a window long, on one
    rank alone. That is not a slow rank.
    """
    usual = sorted(steps, key=lambda step: step.own_ns)
    if len(usual) > 2:
        usual.pop()
    count = max(1, len(usual))
    means = {phase: sum(step.ns_by_phase[phase] for step in usual) / count / 1e9 for phase in OWN}
    own_s = sum(means.values())
    squares = sum((step.own_ns / 1e9 - own_s) ** 2 for step in usual)
    whole_ns = sum(sum(step.ns_by_phase.values()) for step in steps)
    return OwnWork(
        steps=len(usual),
        variance=squares / max(1, len(usual) - 1),
        step_s=whole_ns / 1e9 / max(1, len(steps)),
        took_s=took_s,
        seconds_by_phase=means,
    )


def find_slow(windows: Sequence[Sequence[OwnWork]]) -> Blame | None:
    """The rank that the last windows, each by rank, show to be slow, if any does."""
    recent = windows[-WINDOWS:]
    leads = [lead for window in recent[-LEAST_WINDOWS:] if (lead := _lead(window))]
    if len(leads) < LEAST_WINDOWS or len({rank for rank, _ in leads}) > 1:
        return None
    rank = leads[0][0]
    together = [_together([window[r] for window in recent]) for r in range(len(recent[-1]))]
    mine = together[rank]
    others = [work for r, work in enumerate(together) if r != rank and work.steps]
    typical_s = median(work.seconds for work in others)
    excess = mine.seconds - typical_s
    if excess < max(LEAST_SECONDS, LEAST_SHARE * typical_s, SIGMAS * _chance(mine, others)):
        return None
    if min(lead for _, lead in leads) < excess / 3:
        return None  # it is one window's accident that carries the average
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


def _lead(window: Sequence[OwnWork]) -> tuple[int, float] | None:
    """The rank with the most work of its own, and by how much; where at least two had any."""
    seconds = {rank: work.seconds for rank, work in enumerate(window) if work.steps}
    if len(seconds) < 2:
        return None
    rank = max(seconds, key=seconds.__getitem__)
    return rank, seconds.pop(rank) - median(seconds.values())


def _together(windows: Sequence[OwnWork]) -> OwnWork:
    """Several windows of one rank as one."""
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


def _chance(mine: OwnWork, others: Sequence[OwnWork]) -> float:
    """How far the difference of two averages is off by chance: its standard error.

    If all ranks are equally noisy, all their noise together is the best estimate of it; where
    one is noisier than the rest, its own counts.
    """
    pooled = fmean([mine.variance, *(work.variance for work in others)])
    variance = max(pooled, mine.variance)
    return math.sqrt(variance / mine.steps + pooled / min(work.steps for work in others))


def next_period(window: Sequence[OwnWork]) -> int:
    """In how many steps to compare again: the same answer on every rank."""
    took = min(each.took_s for each in window)
    step = max(each.step_s for each in window)
    wanted = took / (COST_SHARE * step) if step > 0 else MOST_PERIOD
    return max(LEAST_PERIOD, min(MOST_PERIOD, math.ceil(wanted)))


class StragglerDetector:
    """One rank's part in the comparisons of its group.

        counting steps --(period over)--> exchange --> windows --> a new Blame is told, on rank 0

    Invariant: the number of synchronised steps in this group alone decides when to exchange,
    so all ranks do.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self.tell: Callable[[int, Blame], None] = print_to_stderr
        """Called on rank 0 with the step and what was found.

        It lives as long as the group, so it must not hold it."""
        self._watch = watch
        self._begin(None)

    def _begin(self, group: Any) -> None:
        """Another group, perhaps of other ranks: nothing known before counts."""
        self.group: Callable[[], Any] = _no_group if group is None else weakref.ref(group)
        self.blame: Blame | None = None
        """Who is slow now, as far as is known; the same on every rank."""
        self.windows: deque[list[OwnWork]] = deque(maxlen=WINDOWS)
        self.steps = 0
        """How many steps were synchronised in this group."""
        self.next_step = WARM_UP_STEPS + LEAST_PERIOD
        """When to compare next."""
        self._seen: StepTimes | None = self._watch.finished[-1] if self._watch.finished else None
        """The last step that is compared already; numbers of steps may begin again."""
        self._warm_up_steps = WARM_UP_STEPS
        self._under_way: tuple[Any, Any] | None = None
        """On a GPU, numbers on their way to the host and the event of their arrival."""
        self._took_s = 0.0

    def compare(self, membership: Membership, device: torch.device) -> None:
        """It is time to, or the group is another; every rank calls this after the same step."""
        if self.group() is not membership.group:
            self._begin(membership.group)
            self.steps = 1
        else:
            self.next_step = self.steps + LEAST_PERIOD
            # Whoever is missing here is missed by the next sum too, which says so better.
            with stopwatch.waiting(membership.group), suppress(PeerError):
                self._exchange(membership, device)

    def _exchange(self, membership: Membership, device: torch.device) -> None:
        if self._under_way is not None:
            gathered, arrival = self._under_way
            self._under_way = None
            arrival.synchronize()  # long past: that was some steps ago
            self._read(membership.rank, gathered)
        steps = list(takewhile(lambda step: step is not self._seen, reversed(self._watch.finished)))
        self._seen = steps[0] if steps else self._seen
        steps = steps[: len(steps) - self._warm_up_steps]
        self._warm_up_steps = 0
        where = comm.word_device(membership.group, device)
        begun = spans.now_ns()
        mine = torch.tensor(summarise(steps, self._took_s).row(), dtype=torch.float64).to(where)
        by_rank = comm.all_gather(membership.group, mine, "Comparing the pace of the ranks")
        gathered = torch.stack(by_rank).to("cpu", non_blocking=True)
        self._took_s = (spans.now_ns() - begun) / 1e9
        if where.type == "cpu":
            self._read(membership.rank, gathered)
        else:  # the host does not wait for the device
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
            self._under_way = gathered, arrival

    def _read(self, rank: int, gathered: torch.Tensor) -> None:
        window = [OwnWork.from_row(row) for row in gathered.tolist()]
        self.windows.append(window)
        if len(self.windows) == WINDOWS:  # until then often, whatever it costs
            self.next_step = self.steps + next_period(window)
        known, self.blame = self.blame, find_slow(list(self.windows))
        if self.blame is not None and self.blame.culprit != (known and known.culprit) and rank == 0:
            self._say(self.blame)

    def _say(self, blame: Blame) -> None:
        step, recorder = self._watch.step, spans.current
        if recorder is not None:
            facts = {"slow_rank": blame.rank, "phase": blame.phase, "step": step}
            recorder.add("blame", spans.now_ns(), None, facts)
        self.tell(step, blame)


def _no_group() -> None:
    return None


def print_to_stderr(step: int, blame: Blame) -> None:
    print(f"paceline: step {step}: {blame}", file=sys.stderr, flush=True)


def find(group: Any) -> StragglerDetector | None:
    """The detector of this rank in `group`, if it takes part in comparisons."""
    watch = stopwatch.find(group)
    return None if watch is None else watch.detector
