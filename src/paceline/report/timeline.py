"""The section "timeline": a few steps in the middle of the run, worker above worker, on one clock.

The files may be as long as the run, so only a window of them is read: its place in the first
worker's file is found by size, in the others by time, because every line is one span in the order
of writing. What a whole run spent on each phase is in the workers' section.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import WireError
from paceline.report.charts import swatch, ticks
from paceline.report.files import opened, values_of
from paceline.report.markup import (
    Html,
    as_number,
    count,
    data_block,
    duration,
    figure,
    join,
    percent,
    table,
    tag,
    text,
)
from paceline.report.words import MEANT_BY_PHASE
from paceline.run_folder import LINE_LIMIT_BYTES, RunFolder
from paceline.spans import LANE_BY_NAME, LANES

RANKS_LIMIT = 16
STEPS = 10
"""How many steps the window has, where the spans say where steps end."""
SPANS_LIMIT = 1500
"""The most spans of one worker."""
HEADER_EVENTS = 400
LOOKED_AT = 8000
"""The most events that are read of one worker's file."""
NEAR_BYTES = 2**16
STATIC_LIMIT = 900
MINUS = "\N{MINUS SIGN}"
ROW, LABEL, WIDTH = 16, 62, 720


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


def section(window: Window) -> Html:
    """The section's content: a picture for everyone, and the spans for the page's script."""
    names = Counter(span.name for spans in window.spans.values() for span in spans)
    what = "some steps"
    if window.steps:
        what = f"steps {figure(window.steps[0])} to {figure(window.steps[1])}"
    said = (
        f"{what[:1].upper()}{what[1:]}, {duration((window.end - window.begin) / 1e6)} in all. Time "
        "goes from left to right. Every worker has a row for computing and one for exchanging "
        "gradients: the more of the exchange lies below computing, the less it costs."
    )
    known = [name for name in MEANT_BY_PHASE if name in names]
    legend = [
        tag("li", swatch(f"phase-{name}"), tag("b", name), f" {MEANT_BY_PHASE[name]}")
        for name in known
    ]
    if "ready" in names:
        legend.append(tag("li", swatch("ready"), tag("b", "ready"), " gradients can be sent"))
    controls = tag(
        "div",
        *(
            tag("button", sign, type="button", data_do=do, aria_label=label)
            for sign, do, label in (
                (MINUS, "out", "Zoom out"),
                ("+", "in", "Zoom in"),
                ("◀", "left", "Earlier"),
                ("▶", "right", "Later"),
                ("All", "all", "Show the whole window"),
            )
        ),
        tag("span", "drag, or use arrow keys, + and -", class_="hint"),
        class_="controls",
        hidden=True,
    )
    return join(
        [
            tag("p", said),
            *(tag("p", note, class_="note") for note in window.notes),
            tag(
                "div",
                controls,
                tag(
                    "div",
                    class_="canvas-place",
                    tabindex=0,
                    role="application",
                    hidden=True,
                    aria_label="Timeline: arrow keys move, plus and minus zoom",
                ),
                tag("p", "", class_="readout", role="status", hidden=True),
                tag(
                    "div",
                    _static(window),
                    class_="scroll static",
                    tabindex=0,
                    role="region",
                    aria_label="Picture of the timeline",
                ),
                data_block(None, _packed(window)),
                class_="timeline",
            ),
            tag("ul", *legend, class_="legend wide"),
            _shares(window),
            tag(
                "p",
                "The files in ",
                tag("code", "timeline/"),
                " hold the whole run. They are Chrome traces: Perfetto opens them.",
                class_="note",
            ),
        ]
    )


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """The rows of a worker, in order; a few at most."""
    return sorted({span.lane for span in spans} or {1})[:6]


def lane_label(lane: int) -> str:
    return {1: "computing", 2: "exchange"}.get(lane, LANES.get(lane, "thread"))


def _static(window: Window) -> Html:
    """A fixed picture of the first part of the window."""
    total = sum(len(spans) for spans in window.spans.values())
    shown = window.begin + (window.end - window.begin) * min(
        1.0, 0.35, STATIC_LIMIT / max(1, total)
    )
    scale = (WIDTH - LABEL - 8) / (shown - window.begin)
    parts, y = [], 18.0
    for mark in ticks(0, (shown - window.begin) / 1e6, 5):
        x = round(LABEL + mark * 1e6 * scale, 1)
        parts.append(tag("text", duration(mark), x=x, y=11, class_="tick middle"))
        parts.append(tag("line", x1=x, x2=x, y1=15, y2=2000, class_="grid"))
    for rank, spans in window.spans.items():
        lanes = lanes_of(spans)
        parts.append(tag("text", f"worker {rank}", x=0, y=y + 12, class_="tick strong"))
        for span in spans:
            if span.begin >= shown or span.lane not in lanes:
                continue
            left = max(span.begin, window.begin)
            x = round(LABEL + (left - window.begin) * scale, 1)
            top = y + lanes.index(span.lane) * ROW
            wide = (min(span.end, shown) - left) * scale
            said = f"{span.name}, {duration(span.length / 1e6)}"
            if span.length == 0:
                parts.append(tag("path", d=f"M{x} {top + 2:.0f}v{ROW - 4}", class_="ready"))
                continue
            look = span.name if span.name in MEANT_BY_PHASE else "other"
            parts.append(
                tag(
                    "rect",
                    tag("title", said),
                    x=x,
                    y=top + 1,
                    width=round(max(wide, 0.6), 1),
                    height=ROW - 2,
                    class_=f"fill-phase-{look}",
                )
            )
        y += len(lanes) * ROW + 8
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {y:.0f}",
        class_="timeline-picture",
        role="img",
        aria_label=f"{count(len(window.spans), 'worker')} side by side in time; "
        "the table below has the numbers",
    )


def _packed(window: Window) -> dict[str, Any]:
    """The spans for the canvas: names once, times in microseconds from the window's beginning."""
    names: dict[str, int] = {}
    ranks = []
    for rank, spans in window.spans.items():
        lanes = lanes_of(spans)
        rows = []
        for span in spans:
            if span.lane in lanes:
                name = names.setdefault(span.name, len(names))
                begin, length = round(span.begin - window.begin, 1), round(span.length, 1)
                rows.append([name, lanes.index(span.lane), begin, length, span.facts])
        labels = [lane_label(lane) for lane in lanes]
        ranks.append({"rank": rank, "lanes": labels, "spans": rows})
    return {"length": round(window.end - window.begin, 1), "names": list(names), "ranks": ranks}


def _shares(window: Window) -> Html | None:
    """What part of the window each worker spent on what: the picture as numbers."""
    length = window.end - window.begin
    names = [
        n for n in MEANT_BY_PHASE if any(s.name == n for r in window.spans.values() for s in r)
    ]
    rows = []
    for rank, spans in window.spans.items():
        spent = [covered([s for s in spans if s.name == name], window) for name in names]
        rows.append([f"{rank}", *(percent(each / length) for each in spent)])
    if not names:
        return None
    shown = table(["worker", *names], rows, caption="Share of the time shown above")
    note = "Gradients travel while the worker computes, so a row can add up to more than 100 %."
    return join([shown, tag("p", note, class_="note")])


def covered(spans: Sequence[Span], window: Window) -> float:
    """How much of the window lies under at least one of the spans; they are sorted by beginning."""
    total, reached = 0.0, window.begin
    for span in spans:
        end = min(span.end, window.end)
        total += max(0.0, end - max(span.begin, reached))
        reached = max(reached, end)
    return total
