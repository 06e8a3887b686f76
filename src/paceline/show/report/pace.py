"""Each worker's own work in windows of steps, in bounded memory, and which ones were slow when.

In a run longer than the table, neighbouring windows are merged in pairs, as often as needed. So a
page names a slow worker however long ago it was slow, with the range of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.telemetry import OWN, OwnWork, Phase, find_slow_spans, find_slow_worker

WIDTH, WINDOWS_LIMIT = 5, 64
"""Steps of the first windows, and how many windows there are at most."""
NOW = 2
"""A worker that was slow in one of this many last windows counts as slow now."""


class RecentStep(NamedTuple):
    """One of a rank's last steps."""

    step: int
    t: float
    epoch: int
    samples: float
    phases: dict[Phase, float]
    queued: int | None = None


class Window:
    """One worker's own work in some steps: sums, and the longest step, which is left out."""

    __slots__ = ("by_phase", "longest", "longest_s", "squares", "steps", "total")

    def __init__(self) -> None:
        self.steps, self.total, self.squares, self.longest_s = 0, 0.0, 0.0, -1.0
        self.by_phase: dict[Phase, float] = {}
        self.longest: Mapping[Phase, float] = {}

    def add(self, spent: Mapping[Phase, float], own_s: float) -> None:
        self.steps += 1
        self.total += own_s
        self.squares += own_s * own_s
        sums = self.by_phase
        for phase, seconds in spent.items():
            sums[phase] = sums.get(phase, 0.0) + seconds
        if own_s > self.longest_s:
            self.longest_s, self.longest = own_s, spent

    def join(self, other: Window) -> None:
        self.steps += other.steps
        self.total += other.total
        self.squares += other.squares
        for phase, seconds in other.by_phase.items():
            self.by_phase[phase] = self.by_phase.get(phase, 0.0) + seconds
        if other.longest_s > self.longest_s:
            self.longest_s, self.longest = other.longest_s, other.longest

    def summarise(self) -> OwnWork:
        """The averages, without the longest step."""
        # As in `telemetry.blame.summarise`: one long step is a pause, not a slow worker.
        less, longest = (self.longest_s, self.longest) if self.steps > 2 else (0.0, {})
        steps = self.steps - (self.steps > 2)
        count, total = max(1, steps), self.total - less
        variance = (self.squares - less * less - total * total / count) / max(1, steps - 1)
        by_phase = {
            phase: (self.by_phase.get(phase, 0.0) - longest.get(phase, 0.0)) / count
            for phase in OWN
        }
        return OwnWork(steps=steps, variance=max(0.0, variance), seconds_by_phase=by_phase)


class PaceTable:
    """One worker's windows, by number."""

    def __init__(self) -> None:
        self.width = WIDTH
        self._windows: dict[int, Window] = {}

    def add(self, step: int, spent: Mapping[Phase, float], own_s: float) -> None:
        number = (step - 1) // self.width
        window = self._windows.get(number)
        if window is None:
            window = self._windows[number] = Window()
        window.add(spent, own_s)
        if len(self._windows) > WINDOWS_LIMIT:
            self.widen(2 * self.width)

    def widen(self, width: int) -> None:
        """Merge windows to `width` steps, a multiple of their current width."""
        factor, old = width // self.width, self._windows
        self.width, self._windows = width, {}
        for number, window in old.items():
            joined = self._windows.setdefault(number // factor, Window())
            joined.join(window)

    @property
    def is_empty(self) -> bool:
        return not self._windows

    def summaries(self) -> dict[int, OwnWork]:
        return {number: window.summarise() for number, window in self._windows.items()}


@dataclass(frozen=True, slots=True)
class SlowSpan:
    """A worker held the others up in the steps from `first` to `last`."""

    rank: int
    phase: Phase
    slower_by_s: float
    """In an average step of these."""
    first: int
    last: int
    is_now: bool
    """Whether it still did in the last steps that were read."""


def find_spans(
    tables: Mapping[int, PaceTable], recent: Mapping[int, Sequence[RecentStep]]
) -> list[SlowSpan]:
    """The spans in which workers were slow: current ones first, then the most expensive.

    Windows of a long run are long, so whether a worker is slow now is computed from the last steps.
    """
    used = {rank: table for rank, table in sorted(tables.items()) if not table.is_empty}
    if len(used) < 2:
        return []
    last_step = max((steps[-1].step for steps in recent.values() if steps), default=0)
    width = max(table.width for table in used.values())
    for table in used.values():
        table.widen(width)
    ranks, by_rank = list(used), [table.summaries() for table in used.values()]
    numbers, nothing = sorted(set().union(*by_rank)), Window().summarise()
    windows = [[each.get(number, nothing) for each in by_rank] for number in numbers]
    now = find_slow_worker({rank: [each.phases for each in recent[rank]] for rank in ranks})
    found = list[SlowSpan]()
    for begin, end, blame in find_slow_spans(windows):
        rank, last = ranks[blame.rank], min(last_step, (numbers[end - 1] + 1) * width)
        is_now = now is not None and now.rank == rank and end > len(windows) - NOW
        first = numbers[begin] * width + 1
        last = last_step if is_now else last
        found.append(SlowSpan(rank, blame.phase, blame.slower_by_s, first, last, is_now))
    first = last_step - now.steps + 1 if now is not None else 0
    # Do not report a worker twice: a span that reaches into the last steps is the same finding.
    is_known = any(
        span.is_now or (now and span.rank == now.rank) for span in found if span.last >= first
    )
    if now is not None and not is_known:
        found.append(SlowSpan(now.rank, now.phase, now.slower_by_s, first, last_step, True))
    return sorted(found, key=lambda span: not span.is_now)
