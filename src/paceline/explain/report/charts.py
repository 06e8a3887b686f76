"""Line charts as SVG: readable without a script, in light and dark, and on paper.

A chart is drawn at about the size at which it is shown, so that its letters keep theirs. Colours
are classes, and the numbers behind the lines travel along for the page's script to point at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.explain.report.markup import Html, data_block, figure, number, tag, text
from paceline.explain.report.series import Point

WIDTH, HEIGHT = 360, 212
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 34
POINTS_LIMIT = 400
SMALLEST = 1e-300
"""A range below this has no room for numbers inside it."""
CHARACTER = 6.4
"""How wide a character of an axis is, in pixels; the digits are about as wide as this."""
CUT_FACTOR = 3.0
"""Peaks this many times as high as the line's own range are cut off, and said."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: a name for its legend, and a class for its look."""

    label: str
    look: str
    points: Sequence[Point]
    marked: bool = False
    """Whether each point is a measurement that deserves a dot."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels along one axis."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = (math.log2(each) for each in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart needs: lines, what the axes mean, and how to say a value."""

    title: str
    lines: Sequence[Line]
    x_label: str = "step"
    say: Callable[[float], str] = figure
    from_zero: bool = False
    ceiling: float | None = None
    """The highest value that makes sense, such as 1 for a share."""
    summary: str = ""
    notes: Sequence[str] = field(default_factory=list)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers between two values."""
    rough = (high - low) / about
    if not rough > SMALLEST:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(u * power for u in (1, 2, 2.5, 5, 10) if u * power >= rough * 0.999)
    first = math.ceil(low / unit - 1e-9)
    return [k * unit for k in range(first, math.floor(high / unit + 1e-9) + 1)]


def value_range(chart: Chart) -> tuple[float, float, Point | None]:
    """The lowest and highest value drawn, and the peak that is cut off, if there is one."""
    points = [point for line in chart.lines for point in line.points]
    low = min(point.low for point in points)
    peak = max(points, key=lambda point: point.high)
    means = [point.mean for point in points]
    # A loss may fall from high up in its first steps: that is no peak.
    begin = statistics.median(means[: len(means) // 10 + 1])
    usual = max(begin, sorted(means)[int((len(means) - 1) * 0.97)])
    high, cut = peak.high, None
    if high > usual + CUT_FACTOR * max(usual - low, abs(usual) * 1e-3) and len(points) > 20:
        high, cut = max(usual + 0.5 * (usual - low), usual * 1.1), peak
    if chart.from_zero:
        low = min(0.0, low)
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin * (not chart.from_zero), high + margin
    if chart.ceiling is not None and high <= chart.ceiling < high + 0.25 * (high - low):
        high = chart.ceiling
    return low, high, cut


def draw(chart: Chart) -> Html:
    """The chart as a figure, with its values for the script and a summary in words."""
    lines = [line for line in chart.lines if line.points]
    low, high, cut = value_range(chart)
    marks = ticks(low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])
    first = min(line.points[0].step for line in lines)
    last = max(line.points[-1].step for line in lines)
    longest = max(len(_label(chart, mark)) for mark in marks)
    x = Scale(first, last, max(LEFT, 8 + CHARACTER * longest), WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [_axes(chart, x, y, marks)]
    parts += [_draw_line(line, x, y) for line in lines]
    notes = list(chart.notes)
    if cut is not None:
        at = number(x(cut.step))
        parts.append(tag("path", d=f"M{at} {TOP - 9}l4 7h-8z", class_="cut"))
        notes.append(
            f"A peak of {chart.say(cut.high)} near {chart.x_label} {figure(round(cut.step))} "
            "is cut off, so that the rest can be seen."
        )
    parts.append(tag("g", class_="crosshair"))
    picture = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        class_="chart",
        role="img",
        aria_label=f"{chart.title}. {chart.summary}",
    )
    legend = tag(
        "ul", *(tag("li", swatch(line.look), line.label) for line in lines), class_="legend"
    )
    return tag(
        "figure",
        tag("figcaption", tag("strong", chart.title), legend if len(lines) > 1 else None),
        picture,
        tag("p", chart.summary, class_="said") if chart.summary else None,
        *(tag("p", note, class_="note") for note in notes),
        data_block(None, _values(chart, lines, x, y)),
        class_="chart-box",
    )


def swatch(look: str) -> Html:
    """A small square in the colour of what a word stands for."""
    return tag(
        "svg",
        tag("rect", width=12, height=12, rx=2, class_=f"fill-{look}"),
        viewBox="0 0 12 12",
        class_="swatch",
        aria_hidden="true",
    )


def _axes(chart: Chart, x: Scale, y: Scale, marks: Sequence[float]) -> Html:
    parts = []
    for mark in marks:
        at = y(mark)
        parts.append(tag("line", x1=x.begin, x2=x.end, y1=at, y2=at, class_="grid"))
        label = _label(chart, mark)
        parts.append(tag("text", label, x=x.begin - 6, y=at + 4, class_="tick end"))
    whole = [mark for mark in ticks(x.low, x.high, 4) if mark == int(mark)] or [x.low]
    for mark in whole:
        parts.append(tag("text", figure(mark), x=x(mark), y=HEIGHT - 18, class_="tick middle"))
    middle = (x.begin + x.end) / 2
    parts.append(tag("text", chart.x_label, x=middle, y=HEIGHT - 3, class_="tick middle"))
    return tag("g", *parts, aria_hidden="true")


def _label(chart: Chart, mark: float) -> str:
    return chart.say(mark) if mark else "0"


def _draw_line(line: Line, x: Scale, y: Scale) -> Html:
    def path(values: Sequence[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{number(a)} {number(b)}" for a, b in values)

    top = y(y.high)
    parts = []
    if any(point.high > point.low for point in line.points):
        upper = [(x(p.step), max(top - 2, y(p.high))) for p in line.points]
        lower = [(x(p.step), y(p.low)) for p in reversed(line.points)]
        parts.append(tag("path", d=path(upper + lower) + "z", class_=f"band fill-{line.look}"))
    middle = [(x(p.step), max(top - 2, y(p.mean))) for p in line.points]
    if len(middle) > 1:
        parts.append(tag("path", d=path(middle), class_=f"line stroke-{line.look}"))
    if line.marked or len(middle) == 1:
        parts += [tag("circle", cx=a, cy=b, r=3, class_=f"dot fill-{line.look}") for a, b in middle]
    return tag("g", *parts)


def _values(chart: Chart, lines: Sequence[Line], x: Scale, y: Scale) -> dict[str, Any]:
    """The points in pixels and in words, for the page's script to point at."""
    top = y(y.high)
    return {
        "x": chart.x_label,
        "frame": [WIDTH, TOP, HEIGHT - BOTTOM],
        "lines": [
            {
                "look": line.look,
                "label": text(line.label, 60),
                "points": [
                    [x(p.step), max(top, y(p.mean)), round(p.step), chart.say(p.mean)]
                    for p in line.points
                ],
            }
            for line in lines
        ],
    }


@dataclass(frozen=True, slots=True)
class Share:
    """One piece of a bar: what it looks like, its part of the whole, and what it says."""

    look: str
    part: float
    said: str


def share_bar(shares: Sequence[Share], label: str) -> Html:
    """Pieces side by side, each as wide as its part of the whole."""
    pieces, x = [], 0.0
    for share in shares:
        width = 1000 * share.part
        pieces.append(
            tag(
                "rect",
                tag("title", share.said),
                x=round(x, 1),
                y=0,
                width=round(max(width - 1.5, 0.8), 1),
                height=22,
                class_=f"fill-phase-{share.look}",
            )
        )
        x += width
    return tag(
        "svg",
        *pieces,
        viewBox="0 0 1000 22",
        preserveAspectRatio="none",
        class_="bar",
        role="img",
        aria_label=label,
    )
