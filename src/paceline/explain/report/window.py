"""A window of the timelines: some steps in the middle of the run, all workers on one clock.

The files may be as long as the run, so only a part of them is read: its place in the first worker's
file is found by size, in the others by time, because every line is one span in the order of
writing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import WireError
from paceline.explain.report.files import opened, values_of
from paceline.explain.report.markup import as_number, text
from paceline.observe.run_folder import LINE_LIMIT_BYTES, RunFolder
from paceline.observe.spans import LANE_BY_NAME

RANKS_LIMIT = 16
STEPS = 10
"""How many steps the window has, where the spans say where steps end."""
SPANS_LIMIT = 1500
"""The most spans of one worker."""
HEADER_EVENTS = 400
LOOKED_AT = 8000
"""The most events that are read of one worker's file."""
NEAR_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Span:
    """One span, in microseconds of the first worker's clock; an instant has no length."""

    name: str
    lane: int
    begin: float
    length: float
    facts: str = ""

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
    paths = _paths(folder.timeline)
    if not paths:
        return None
    notes = []
    if len(paths) > RANKS_LIMIT:
        notes.append(f"The first {RANKS_LIMIT} of {len(paths):,} workers are shown.")
    ranks = sorted(paths)[:RANKS_LIMIT]
    first = paths[ranks[0]]
    found = list(islice(_spans(first, _offset_of_middle(first)), LOOKED_AT))
    if not found:
        found = list(islice(_spans(first, 0), LOOKED_AT))
    if not found:
        return None
    begin, end = _choose(found)
    window = Window(begin, end, {}, notes=notes)
    machines, unaligned = set(), False
    for rank in ranks:
        shift, machine, has_clock = _clock(paths[rank])
        machines.add(machine)
        unaligned |= len(machines) > 1 and not has_clock
        kept: list[Span] = []
        for span in islice(_spans(paths[rank], _offset_of(paths[rank], begin - shift)), LOOKED_AT):
            moved = Span(span.name, span.lane, span.begin + shift, span.length, span.facts)
            if moved.end > begin and moved.begin < end and len(kept) < SPANS_LIMIT:
                kept.append(moved)
        window.spans[rank] = sorted(kept, key=lambda each: (each.begin, -each.length))
    if unaligned:
        notes.append("The workers' clocks were not compared, so rows may be shifted.")
    steps = [
        int(match[1])
        for span in found
        if span.name == "forward" and begin <= span.begin < end
        if (match := re.match(r"step (\d+)", span.facts))
    ]
    window.steps = (min(steps), max(steps)) if steps else None
    return window


def _paths(folder: Path) -> dict[int, Path]:
    try:
        listed = [path for path in folder.iterdir() if not path.is_symlink()]
    except OSError:
        return {}
    named = ((re.fullmatch(r"rank(\d{1,7})\.trace\.json", path.name), path) for path in listed)
    return {int(match[1]): path for match, path in named if match and path.is_file()}


def _choose(spans: Sequence[Span]) -> tuple[float, float]:
    """From the end of one step to the end of another, past the first steps if there are more."""
    ends = sorted(span.end for span in spans if span.name == "optimizer")
    if len(ends) > 1:
        first = min(2, len(ends) - 2) if len(ends) <= STEPS + 2 else min(2, len(ends) - STEPS - 1)
        return ends[first], ends[min(first + STEPS, len(ends) - 1)]
    shown = spans[:SPANS_LIMIT]
    return min(span.begin for span in shown), max(span.end for span in shown) + 1


def _spans(path: Path, offset: int) -> Iterator[Span]:
    for event in _events(path, offset):
        span = _span(event)
        if span is not None:
            yield span


def _events(path: Path, offset: int) -> Iterator[Any]:
    """The events from about `offset` on; what is not an event is left out."""
    try:
        if offset == 0:
            yield from values_of(path)
            return
        with opened(path) as file:
            file.seek(offset)
            file.readline(LINE_LIMIT_BYTES)
            while line := file.readline(LINE_LIMIT_BYTES):
                try:
                    yield json.loads(line.rstrip(b", \r\n"))
                except (ValueError, RecursionError):
                    continue
    except (WireError, OSError):
        return


def _span(event: Any) -> Span | None:
    match event:
        case {"name": str(name), "ph": "X" | "i" | "I", "ts": int() | float() as begin}:
            length = as_number(event.get("dur")) or 0.0
            lane = event.get("tid")
            known = LANE_BY_NAME.get(name, 1)
            args = event.get("args")
            return Span(
                text(name, 40),
                lane if type(lane) is int and 0 < lane < 64 else known,
                float(begin),
                max(0.0, length),
                _facts(args) if isinstance(args, dict) else "",
            )
    return None


def _facts(args: dict[str, Any]) -> str:
    keys = sorted(args, key=lambda key: key != "step")[:4]
    return ", ".join(f"{text(key, 20)} {text(args[key], 40)}" for key in keys)


def _size(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def _offset_of_middle(path: Path) -> int:
    """Where to look in the first file: the middle, or the beginning of a short one."""
    size = _size(path)
    return 0 if size < 16 * NEAR_BYTES else size // 2


def _offset_of(path: Path, begin: float) -> int:
    """A place in the file shortly before the spans of a moment."""
    low, high = 0, _size(path)
    while high - low > 2 * NEAR_BYTES:
        middle = (low + high) // 2
        at = next((span.begin for span in islice(_spans(path, middle), 50)), None)
        if at is None or at >= begin:
            high = middle
        else:
            low = middle
    # A span is written when it ends, and the writer may lag behind: look a little earlier.
    return max(0, low - NEAR_BYTES)


def _clock(path: Path) -> tuple[float, str, bool]:
    """The shift to the first worker's clock, the machine, and whether the shift was measured."""
    shift, machine, has_clock = 0.0, "", False
    for event in islice(_events(path, 0), HEADER_EVENTS):
        match event:
            case {"ph": "M", "name": "paceline_clock", "args": {"offset_ns": int() as offset}}:
                shift, has_clock = offset / 1000, True
            case {"ph": "M", "name": "paceline", "args": {"machine": str() as found}}:
                machine = found
    return shift, machine, has_clock


def covered(spans: Sequence[Span], window: Window) -> float:
    """How much of the window lies under at least one of the spans; they are sorted by beginning."""
    total, reached = 0.0, window.begin
    for span in spans:
        end = min(span.end, window.end)
        total += max(0.0, end - max(span.begin, reached))
        reached = max(reached, end)
    return total
