"""Each worker's own work in windows of steps, in bounded memory, and which ones were slow when.

In a run longer than the table, neighbouring windows are merged in pairs, as often as needed. So a
page names a slow worker however long ago it was slow, with the range of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.telemetry import OwnWork, Phase, WorkWindow, find_slow_spans, find_slow_worker

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


class PaceTable:
    """One worker's windows, by number."""

    def __init__(self) -> None:
        self.width = WIDTH
        self._windows: dict[int, WorkWindow] = {}

    def add(self, step: int, spent: Mapping[Phase, float], own_s: float) -> None:
        number = (step - 1) // self.width
        window = self._windows.get(number)
        if window is None:
            window = self._windows[number] = WorkWindow()
        window.add(spent, own_s)
        if len(self._windows) > WINDOWS_LIMIT:
            self.widen(2 * self.width)

    def widen(self, width: int) -> None:
        """Merge windows to `width` steps, a multiple of their current width."""
        factor, old = width // self.width, self._windows
        self.width, self._windows = width, {}
        for number, window in old.items():
            joined = self._windows.setdefault(number // factor, WorkWindow())
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
    numbers, nothing = sorted(set().union(*by_rank)), WorkWindow().summarise()
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
