"""The section "scaling": how much faster more workers are, and where the rest went.

Measured points are joined by a solid line. Whatever was computed and not measured is dashed and
says so. Keys that are missing leave their part of the page out; docs/report.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.explain.report.charts import Scale, Share, share_bar, swatch
from paceline.explain.report.markup import (
    Html,
    as_number,
    count,
    duration,
    figure,
    join,
    percent,
    sentence,
    table,
    tag,
    text,
)

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 14, 38
SIZES_LIMIT = 32
CURVES_LIMIT = 4
LOSSES = {
    "sharing": ("data", "sharing cores or devices with other workers"),
    "communication": ("transfer", "exchanging gradients when nothing is left to compute"),
    "waiting": ("wait", "waiting for the slowest worker"),
    "data": ("checkpoint", "fetching samples"),
    "optimizer": ("optimizer", "updating the weights"),
    "compute": ("forward", "computing a sample takes longer than on one worker"),
    "other": ("other", "whatever cannot be explained"),
}
"""Where time can be lost, with a colour and in words."""


@dataclass(frozen=True, slots=True)
class Size:
    """The job on some number of workers."""

    workers: int
    speedup: float
    efficiency: float | None = None
    step_s: float | None = None
    lost: dict[str, float] = field(default_factory=dict)


def section(study: dict[str, Any]) -> Html | None:
    """The section's content, or None where nothing was measured."""
    measured = _sizes(study.get("sizes"))
    if not measured:
        return None
    predicted = _predictions(study.get("predicted"))
    return join(
        [
            tag("p", tag("strong", _verdict(measured)), class_="verdict"),
            _kind(study),
            _chart(measured, predicted),
            _table(measured, predicted),
            _losses(measured),
            _said(study, "suggestion", "One thing to try"),
            _said(study, "check", "How good the prediction is"),
        ]
    )


def _sizes(value: Any) -> list[Size]:
    found = []
    for each in value[:SIZES_LIMIT] if isinstance(value, list) else ():
        if not isinstance(each, dict) or type(workers := each.get("workers")) is not int:
            continue
        speedup = as_number(each.get("speedup"))
        if workers < 1 or speedup is None or not 0 < speedup < math.inf:
            continue
        lost = each.get("lost")
        parts = {
            text(name, 60): amount
            for name, value in (lost.items() if isinstance(lost, dict) else ())
            if (amount := as_number(value)) is not None and 0 <= amount < math.inf
        }
        efficiency, step_s = as_number(each.get("efficiency")), as_number(each.get("step_s"))
        found.append(Size(workers, speedup, efficiency, step_s, parts))
    return sorted(found, key=lambda size: size.workers)


def _predictions(value: Any) -> dict[str, list[Size]]:
    """Predicted sizes by the network they were predicted for."""
    curves: dict[str, list[Any]] = {}
    for each in value if isinstance(value, list) else ():
        if isinstance(each, dict):
            curves.setdefault(text(each.get("network") or "", 60), []).append(each)
    shown = list(curves.items())[:CURVES_LIMIT]
    return {network: sizes for network, each in shown if (sizes := _sizes(each))}


def _verdict(measured: Sequence[Size]) -> str:
    largest = measured[-1]
    if largest.workers == 1:
        return "Only one worker was measured, so there is nothing to compare it with."
    return (
        f"{count(largest.workers, 'worker')} are {figure(largest.speedup)} times as fast as one: "
        f"{percent(efficiency_of(largest))} of the ideal."
    )


def efficiency_of(size: Size) -> float:
    return size.speedup / size.workers if size.efficiency is None else size.efficiency


def _kind(study: dict[str, Any]) -> Html | None:
    meaning = {
        "strong": "Strong scaling: the batch stays the same, and more workers share it.",
        "weak": "Weak scaling: every worker keeps its part, so more workers mean a larger batch.",
    }
    kind = str(study.get("mode"))
    return tag("p", meaning[kind]) if kind in meaning else None


def _said(study: dict[str, Any], key: str, title: str) -> Html | None:
    value = study.get(key)
    if isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, str) or not value:
        return None
    return join([tag("h3", title), tag("p", sentence(text(value, 600)))])


def _chart(measured: Sequence[Size], predicted: dict[str, list[Size]]) -> Html:
    everything = [*measured, *(size for sizes in predicted.values() for size in sizes)]
    most = max(size.workers for size in everything)
    is_wide = most > 16
    low = min(1.0, *(size.speedup for size in everything)) if is_wide else 0.0
    x = Scale(1, max(most, 2), LEFT, WIDTH - RIGHT, is_wide)
    y = Scale(low, max(most, 2), HEIGHT - BOTTOM, TOP, is_wide)
    workers = sorted({size.workers for size in everything})
    parts = [_axes(x, y, workers, is_wide)]
    ideal = [(float(n), float(n)) for n in (1, max(most, 2))]
    parts.append(_path(ideal, x, y, "line ideal stroke-ideal"))
    last = measured[-1]
    for network, sizes in predicted.items():
        begin = [(float(last.workers), last.speedup)] if sizes[0].workers > last.workers else []
        points = [*begin, *((float(s.workers), s.speedup) for s in sizes)]
        parts.append(_path(points, x, y, "line predicted stroke-predicted"))
        parts += [_dot(size, x, y, "dot hollow stroke-predicted") for size in sizes]
        at_x, at_y = x(sizes[-1].workers), y(sizes[-1].speedup)
        label = f"predicted, {network}" if network else "predicted"
        parts.append(tag("text", label, x=at_x + 4, y=at_y + 20, class_="tick end"))
    points = [(float(size.workers), size.speedup) for size in measured]
    parts.append(_path(points, x, y, "line stroke-measured"))
    parts += [_dot(size, x, y, "dot fill-measured") for size in measured]
    legend = [
        tag("li", swatch("measured"), "measured (solid)"),
        tag("li", swatch("ideal"), "ideal: n workers, n times as fast (dotted)"),
    ]
    if predicted:
        legend.insert(1, tag("li", swatch("predicted"), "predicted, not measured (dashed)"))
    return tag(
        "figure",
        tag(
            "figcaption",
            tag("strong", "How many times as fast as one worker"),
            tag("ul", *legend, class_="legend"),
        ),
        tag(
            "svg",
            *parts,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            class_="scaling-picture",
            role="img",
            aria_label="Speed-up by number of workers; the table below has the numbers",
        ),
    )


def _axes(x: Scale, y: Scale, workers: Sequence[int], is_wide: bool) -> Html:
    if is_wide:
        marks = [2.0**k for k in range(math.ceil(math.log2(y.low)), int(math.log2(y.high)) + 1)]
        marks = marks[:: 1 + len(marks) // 8]
    else:
        marks = [float(n) for n in range(0, int(y.high) + 1, 1 + int(y.high) // 9)]
    parts = []
    for mark in marks:
        at = y(mark)
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        label = f"{figure(mark)} \N{MULTIPLICATION SIGN}"
        parts.append(tag("text", label, x=LEFT - 6, y=at + 4, class_="tick end"))
    reached = -math.inf
    for n in workers:
        at = x(n)
        if at - reached >= 26:
            parts.append(tag("text", figure(n), x=at, y=HEIGHT - 20, class_="tick middle"))
            reached = at
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(tag("text", "workers", x=middle, y=HEIGHT - 4, class_="tick middle"))
    return tag("g", *parts, aria_hidden="true")


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale, look: str) -> Html:
    return tag("path", d="M" + "L".join(f"{x(a)} {y(b)}" for a, b in points), class_=look)


def _dot(size: Size, x: Scale, y: Scale, look: str) -> Html:
    said = f"{count(size.workers, 'worker')}: {figure(size.speedup)} times as fast"
    at_x, at_y = x(size.workers), y(size.speedup)
    return tag("circle", tag("title", said), cx=at_x, cy=at_y, r=4, class_=look)


def _table(measured: Sequence[Size], predicted: dict[str, list[Size]]) -> Html:
    def row(size: Size, how: str) -> list[object]:
        return [
            figure(size.workers),
            how,
            figure(size.speedup),
            percent(efficiency_of(size)),
            duration(size.step_s),
        ]

    rows = [row(size, "measured") for size in measured]
    for network, sizes in predicted.items():
        rows += [row(size, f"predicted, {network}" if network else "predicted") for size in sizes]
    head = ("workers", "how", "times as fast", "of the ideal", "time of a step")
    return table(head, rows, caption="Speed-up by number of workers", words=(0, 1))


def _losses(measured: Sequence[Size]) -> Html | None:
    with_parts = [size for size in measured if sum(size.lost.values()) > 0]
    if not with_parts:
        return None
    names = list(dict.fromkeys([n for n in LOSSES if any(n in s.lost for s in with_parts)]))
    names += sorted({name for size in with_parts for name in size.lost} - set(names))
    rows = []
    for size in with_parts:
        whole = sum(size.lost.values())
        shares = (percent(size.lost.get(name, 0) / whole) for name in names)
        rows.append([figure(size.workers), *shares, "100 %"])
    legend = [
        tag("li", swatch(f"phase-{_look(name)}"), tag("b", name), f" {_meaning(name)}")
        for name in names
    ]
    bars = [
        tag(
            "li",
            tag("span", count(size.workers, "worker"), class_="bar-label"),
            _bar(size, names),
            tag("span", f"{percent(1 - efficiency_of(size))} lost", class_="bar-value"),
        )
        for size in with_parts
    ]
    return join(
        [
            tag("h3", "Where the rest went"),
            tag("p", "What keeps the workers from the ideal, as shares of the time that is lost."),
            tag("ul", *bars, class_="bars"),
            tag("ul", *legend, class_="legend wide"),
            table(("workers", *names, "together"), rows, caption="Shares of the lost time"),
        ]
    )


def _look(name: str) -> str:
    return LOSSES.get(name, ("other", ""))[0]


def _meaning(name: str) -> str:
    return LOSSES.get(name, ("", ""))[1]


def _bar(size: Size, names: Sequence[str]) -> Html:
    whole = sum(size.lost.values())
    parts = {name: size.lost.get(name, 0) / whole for name in names}
    shares = [
        Share(_look(name), part, f"{name}: {percent(part)}")
        for name, part in parts.items()
        if part > 0
    ]
    workers = count(size.workers, "worker")
    return share_bar(shares, f"{workers}: shares of the lost time, as in the table")
