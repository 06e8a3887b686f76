"""The section "timeline": some steps, worker above worker, with time from left to right.

A fixed picture is for everyone; the page's script puts a canvas in its place that can be zoomed.
What a whole run spent on each phase is in the workers' section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.explain.report.charts import swatch, ticks
from paceline.explain.report.markup import (
    Html,
    count,
    data_block,
    duration,
    figure,
    join,
    percent,
    table,
    tag,
)
from paceline.explain.report.window import Span, Window, covered
from paceline.explain.report.words import MEANT_BY_PHASE
from paceline.observe.spans import LANES

STATIC_LIMIT = 900
"""The most spans of the fixed picture."""
MINUS = "\N{MINUS SIGN}"
ROW, LABEL, WIDTH = 16, 62, 720


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
