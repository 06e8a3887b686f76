"""What is measured over time, in bounded memory: a curve by step, and a window of the timelines.

Ranks report a sum and a count, so a curve's value is exact however many ranks add to it and in
whatever order. A run longer than the table makes two neighbouring cells one, as often as needed.
Timelines may be as long as the run: a few steps of them are kept, all workers on one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from paceline.errors import UsageError
from paceline.explain.report.markup import as_number, text
from paceline.observe.phases import Phase
from paceline.observe.run_folder import RunFolder
from paceline.observe.spans import LANE_BY_NAME
from paceline.observe.timeline import Clock, find_recordings, read_events, survey

CELLS = 2**13
POINTS_LIMIT = 400
"""The most points of a curve."""
LARGEST = 1e300
"""Beyond this, sums and ranges of numbers are infinite."""

RANKS_LIMIT = 16
STEPS = 10
"""How many steps the window has, where the spans say where steps end."""
SPANS_LIMIT = 1500
"""The most spans of one worker."""
LOOKED_AT = 8000
"""The most events that are read of one worker's timeline, of which the middle is shown."""
HEADER_EVENTS = 400
FACTS_LIMIT = 4
LATEST_US = 1e18
"""No clock shows more."""


class Point(NamedTuple):
    """Some neighbouring steps of a curve: their mean, lowest and highest value."""

    x: float
    mean: float
    low: float
    high: float


class Column:
    """Sums and counts by step, for one quantity."""

    def __init__(self, cells: int = CELLS) -> None:
        self.last = 0
        """The largest step that was added."""
        self.first_bad: int | None = None
        """The first step whose value is not a finite number, or next to infinite."""
        self._limit = cells
        self._stride = 1
        self._cells: dict[int, tuple[float, float]] = {}

    def add(self, step: int, total: float, weight: float) -> None:
        """Add what one rank measured in `step`; what is not a number is only remembered."""
        self.last = max(self.last, step)
        if not (max(abs(total), abs(total / weight)) < LARGEST and weight < LARGEST):
            self.first_bad = step if self.first_bad is None else min(step, self.first_bad)
            return
        self._put(step // self._stride, total, weight)
        while len(self._cells) > self._limit:
            old, self._cells = self._cells, {}
            self._stride *= 2
            for cell, sums in old.items():
                self._put(cell // 2, *sums)

    def _put(self, cell: int, total: float, weight: float) -> None:
        before = self._cells.get(cell, (0.0, 0.0))
        self._cells[cell] = before[0] + total, before[1] + weight

    def __bool__(self) -> bool:
        return bool(self._cells)

    def values(self) -> Iterator[tuple[float, float, float]]:
        """Step, sum and count of every cell, in order."""
        middle = (self._stride - 1) / 2
        for cell, (total, weight) in sorted(self._cells.items()):
            yield cell * self._stride + middle, total, weight

    def points(self, limit: int = POINTS_LIMIT) -> list[Point]:
        """The curve as at most `limit` points; no low or high is lost on the way."""
        found = list(self.values())
        per_point = max(1, math.ceil(len(found) / limit))
        points = []
        for begin in range(0, len(found), per_point):
            group = found[begin : begin + per_point]
            each = [total / weight for _, total, weight in group]
            mean = sum(total for _, total, _ in group) / sum(weight for *_, weight in group)
            step = group[0][0] if begin == 0 else group[-1][0]
            points.append(Point(step, mean, min(each), max(each)))
        return points


@dataclass(frozen=True, slots=True)
class Span:
    """One span, in microseconds of the first worker's clock; an instant has no length."""

    name: str
    lane: int
    begin: float
    length: float
    facts: str = ""
    step: int | None = None

    @property
    def end(self) -> float:
        return self.begin + self.length


@dataclass(slots=True)
class Window:
    """The spans between two moments, by rank, and what a reader should know about them."""

    begin: float
    end: float
    spans: dict[int, list[Span]]
    steps: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)


def read_window(folder: RunFolder) -> Window | None:
    """The window to show, or None where nobody recorded a timeline."""
    try:
        paths = find_recordings(folder.path)
        clock = _read_clock(paths[0])
        found = list(_spans(paths[0], 0.0))
        if not found:
            return None
        window = Window(*_choose(found), {})
        if len(paths) > RANKS_LIMIT:
            window.notes.append(f"The first {RANKS_LIMIT} of {len(paths):,} workers are shown.")
        is_aligned = True
        for path in paths[:RANKS_LIMIT]:
            own = _read_clock(path)
            is_aligned &= own.machine == clock.machine
            inside = (
                span
                for span in _spans(path, own.us_behind(clock))
                if span.end > window.begin and span.begin < window.end
            )
            kept = islice(inside, SPANS_LIMIT)
            rank = int(path.name.removeprefix("rank").partition(".")[0])
            window.spans[rank] = sorted(kept, key=lambda each: (each.begin, -each.length))
    except (UsageError, OSError):
        return None
    if not is_aligned:
        window.notes.append("The workers' clocks were not compared, so rows may be shifted.")
    steps = [
        span.step
        for span in found
        if span.name == Phase.FORWARD and window.begin <= span.begin < window.end and span.step
    ]
    window.steps = (min(steps), max(steps)) if steps else None
    return window


def _choose(spans: Sequence[Span]) -> tuple[float, float]:
    """From the end of one step to the end of another, in the middle of what was looked at."""
    ends = sorted(span.end for span in spans if span.name == Phase.OPTIMIZER)
    if len(ends) > 1:
        first = max(min(2, len(ends) - 2), (len(ends) - STEPS) // 2)
        return ends[first], ends[min(first + STEPS, len(ends) - 1)]
    shown = spans[:SPANS_LIMIT]
    return min(span.begin for span in shown), max(span.end for span in shown) + 1


def _read_clock(path: Path) -> Clock:
    clocks = survey(path, HEADER_EVENTS).clocks
    return clocks[-1] if clocks else Clock()


def _spans(path: Path, shift_us: float) -> Iterator[Span]:
    """The spans of a worker on the first one's clock, as far as they are looked at."""
    for event in islice(read_events(path), LOOKED_AT):
        begin, length = as_number(event.get("ts")), as_number(event.get("dur")) or 0.0
        if event.get("ph") not in ("X", "i", "I") or begin is None or not abs(begin) < LATEST_US:
            continue
        name, lane, args = event["name"], event.get("tid"), event["args"]
        keys = sorted(args, key=lambda key: key != "step")[:FACTS_LIMIT]
        yield Span(
            text(name, 40),
            lane if type(lane) is int and 0 < lane < 64 else LANE_BY_NAME.get(name, 1),
            begin + shift_us,
            length if 0 < length < LATEST_US else 0.0,
            ", ".join(f"{text(key, 20)} {text(args[key], 40)}" for key in keys),
            step if type(step := args.get("step")) is int else None,
        )
