"""Pictures as SVG: a line chart, bars of shares, and the legend of either.

They are readable without a script, in light and dark, and on paper. A look is a class that sets a
colour; the numbers behind the lines travel along for the page's script to point at.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.explain.report.markup import Html, data_block, figure, html, note, text
from paceline.explain.report.series import Point

TOP, RIGHT, BOTTOM = 12, 12, 34
SMALLEST = 1e-300
"""A range below this has no room for numbers inside it."""
CHARACTER = 6.4
"""How wide a digit of an axis is, in pixels."""
NARROWEST = 26
"""Numbers of the horizontal axis are at least so far apart, in pixels."""
CUT_FACTOR = 3.0
"""Peaks this many times as high as the line's own range are cut off, and said."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart: a name for its legend, and a class for its look."""

    label: str
    look: str
    points: Sequence[Point]
    has_dots: bool = False
    """Whether each point is a measurement that deserves a dot."""
    is_named: bool = False
    """Whether its name stands at its end, because other lines look the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart needs: lines, what the axes mean, and how to say a value."""

    title: str
    lines: Sequence[Curve]
    x_label: str = "step"
    x_marks: Sequence[float] = ()
    """Where the horizontal axis has numbers, if not where they are round."""
    say: Callable[[float], str] = figure
    from_zero: bool = False
    ceiling: float | None = None
    """The highest value that makes sense, such as 1 for a share."""
    is_log: bool = False
    width: int = 360
    height: int = 212
    summary: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels along one axis."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log2(each) for each in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


def ticks(low: float, high: float, *, is_log: bool = False) -> list[float]:
    """Round numbers between two values, or powers of two."""
    if is_log:
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        return [2.0**power for power in powers[:: 1 + len(powers) // 8]] or [low]
    rough = (high - low) / 4
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
    # A loss may fall from high up in its first steps: that is not a peak.
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
    low, high, cut = value_range(chart)
    marks = ticks(low, high, is_log=chart.is_log)
    labels = [chart.say(mark) if mark else "0" for mark in marks]
    left = max(46, 8 + CHARACTER * max(map(len, labels)))
    first = min(line.points[0].x for line in chart.lines)
    last = max(line.points[-1].x for line in chart.lines)
    low, high = min(low, marks[0]), max(high, marks[-1])
    x = Scale(first, last, left, chart.width - RIGHT, chart.is_log)
    y = Scale(low, high, chart.height - BOTTOM, TOP, chart.is_log)
    parts = [_axes(chart, x, y, dict(zip(marks, labels, strict=True)))]
    parts += [_draw_line(line, x, y) for line in chart.lines]
    notes = list(chart.notes)
    if cut is not None:
        parts.append(html('<path d="M{} {}l4 7h-8z" class="cut"/>', x(cut.x), TOP - 9))
        notes.append(
            f"A peak of {chart.say(cut.high)} near {chart.x_label} {figure(round(cut.x))} "
            "is cut off, so that the rest can be seen."
        )
    names = {line.look: line.label for line in chart.lines if not line.is_named}
    return html(
        '<figure class="chart-box"><figcaption><strong>{}</strong>{}</figcaption>'
        '<svg viewBox="0 0 {} {}" class="chart" role="img" aria-label="{}. {}">{}'
        '<g class="crosshair"></g></svg><p class="said">{}</p>{}{}</figure>',
        chart.title,
        legend((look, name, "") for look, name in names.items()) if len(names) > 1 else None,
        chart.width,
        chart.height,
        chart.title,
        chart.summary,
        parts,
        chart.summary,
        list(map(note, notes)),
        data_block(_values(chart, x, y)),
    )


def _axes(chart: Chart, x: Scale, y: Scale, marks: dict[float, str]) -> Html:
    parts = []
    for mark, label in marks.items():
        line = '<line x1="{}" x2="{}" y1="{}" y2="{}" class="grid"/>'
        parts.append(html(line, x.begin, x.end, y(mark), y(mark)))
        words = '<text x="{}" y="{}" class="tick end">{}</text>'
        parts.append(html(words, x.begin - 6, y(mark) + 4, label))
    under, reached = '<text x="{}" y="{}" class="tick middle">{}</text>', -math.inf
    whole = [mark for mark in ticks(x.low, x.high) if mark == int(mark)] or [x.low]
    for mark in chart.x_marks or whole:
        if x(mark) - reached >= NARROWEST:
            parts.append(html(under, x(mark), chart.height - 18, figure(mark)))
            reached = x(mark)
    parts.append(html(under, (x.begin + x.end) / 2, chart.height - 3, chart.x_label))
    return html('<g aria-hidden="true">{}</g>', parts)


def _draw_line(line: Curve, x: Scale, y: Scale) -> Html:
    def path(values: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{a} {b}" for a, b in values)

    top = y(y.high) - 2
    parts = []
    if any(point.high > point.low for point in line.points):
        upper = [(x(p.x), max(top, y(p.high))) for p in line.points]
        lower = [(x(p.x), y(p.low)) for p in reversed(line.points)]
        parts.append(html('<path d="{}z" class="band fill"/>', Html(path(upper + lower))))
    middle = [(x(p.x), max(top, y(p.mean))) for p in line.points]
    if len(middle) > 1:
        parts.append(html('<path d="{}" class="line stroke"/>', Html(path(middle))))
    if line.has_dots or len(middle) == 1:
        parts += [html('<circle cx="{}" cy="{}" r="3" class="dot fill"/>', *at) for at in middle]
    if line.is_named:
        (a, b), words = middle[-1], '<text x="{}" y="{}" class="tick end">{}</text>'
        parts.append(html(words, a + 4, b + 20, line.label))
    return html('<g class="{}">{}</g>', line.look, parts)


def _values(chart: Chart, x: Scale, y: Scale) -> dict[str, Any]:
    """The points in pixels and in words, for the page's script to point at."""
    top = y(y.high)
    lines = []
    for line in chart.lines:
        points = [[x(p.x), max(top, y(p.mean)), round(p.x), chart.say(p.mean)] for p in line.points]
        lines.append({"look": line.look, "label": text(line.label, 60), "points": points})
    frame = [chart.width, TOP, chart.height - BOTTOM]
    return {"x": chart.x_label, "frame": frame, "lines": lines}


def legend(entries: Iterable[tuple[str, str, str]]) -> Html:
    """Looks with their names and meanings."""
    item = (
        '<li><svg viewBox="0 0 12 12" class="swatch {}" aria-hidden="true">'
        '<rect width="12" height="12" rx="2" class="fill"/></svg><b>{}</b> {}</li>'
    )
    return html('<ul class="legend">{}</ul>', [html(item, *entry) for entry in entries])


def bars(rows: Iterable[tuple[object, Sequence[tuple[str, float, str]], str]]) -> Html:
    """One bar below the other: a name, its pieces (look, share of the width, words), a value."""
    items = []
    for name, pieces, value in rows:
        parts, x = [], 0.0
        for look, share, said in pieces:
            part = '<rect x="{}" width="{}" height="22" class="fill {}"><title>{}</title></rect>'
            parts.append(html(part, x, max(1000 * share - 1.5, 0.8), look, said))
            x += 1000 * share
        item = (
            '<li><span class="bar-label">{}</span><svg viewBox="0 0 1000 22" class="bar" '
            'preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
            '<span class="bar-value">{}</span></li>'
        )
        label = ", ".join(said for *_, said in pieces)
        items.append(html(item, name, label, parts, value))
    return html('<ul class="bars">{}</ul>', items)
