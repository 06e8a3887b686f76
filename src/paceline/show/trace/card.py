"""A recorded step as one picture: 1200 x 630, for the top of a page or a slide.

On the left the batch, then a coloured lane for each worker with its rows and the followed gradient,
on the right the combined gradient, below the result of the check. Text stays text, so it can be
copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from paceline.record import Trace
from paceline.show.trace.drawing import bounded, name_of, numbers_of
from paceline.telemetry import count_text, shape_text

WIDTH, HEIGHT = 1200, 630
COLOURS = ("#2a72c9", "#c2611a", "#2f7a35", "#a8457f")
MOST_LANES, MOST_EXTENTS, MOST_LETTERS = 4, 3, 110
INK, MUTED, RULE, PAGE, GOOD, BAD = "#1a2028", "#55606c", "#d9dfe6", "#ffffff", "#1b6e2c", "#a3271f"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BATCH_X, LANES_X, LANES_END, SUM_X, SUM_END = 48, 300, 830, 890, 1152
TOP, BOTTOM = 150, 500


def draw_card(trace: Trace) -> str:
    """The picture as SVG."""
    trace = bounded(trace)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(_summary(trace))}" '
            f'font-family="{SANS}">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="18" fill="{PAGE}"/>',
            *_content(trace),
            "</svg>\n",
        ]
    )


def _summary(trace: Trace) -> str:
    rows = " + ".join(str(shape[0]) for shape in _shares(trace)[:MOST_LANES] if shape)
    said = trace.check.text if trace.check else ""
    return f"{trace.batch_rows} rows, {rows}, on {trace.workers} workers. {said}"


def _content(trace: Trace) -> Iterator[str]:
    is_dp = trace.engine == "DataParallel"
    who = "replicas in one process" if is_dp else "workers, each a process"
    yield _text(48, 68, f"One training step on {trace.workers} {who}", 34, weight=700)
    said = f"{trace.engine}: {trace.model.name}, {trace.model.parameters:,} weights, as recorded"
    if trace.weight:
        said += f"; the gradients of {name_of(trace.weight)}"
    yield _text(48, 104, said[:MOST_LETTERS], 19, MUTED)
    lanes = _lanes(trace)
    height = (BOTTOM - TOP - 24 * (len(lanes) - 1)) / len(lanes)
    middle = (TOP + BOTTOM) / 2
    yield _box(BATCH_X, middle - 75, 170, 150, MUTED)
    yield _text(BATCH_X + 85, middle - 22, "batch", 18, MUTED, anchor="middle")
    yield _text(BATCH_X + 85, middle + 20, f"{trace.batch_rows:,}", 40, weight=700, anchor="middle")
    yield _text(BATCH_X + 85, middle + 50, "rows", 18, MUTED, anchor="middle")
    gradients = numbers_of(trace, "gradient")
    total = numbers_of(trace, "averaged gradient") or numbers_of(trace, "summed gradient")
    shares = _shares(trace)
    for number, lane in enumerate(lanes):
        y, colour = TOP + number * (height + 24), COLOURS[number % len(COLOURS)]
        centre = y + height / 2
        yield _join(BATCH_X + 170, middle, LANES_X, centre, colour)
        yield _box(LANES_X, y, LANES_END - LANES_X, height, colour)
        title = f"{'replica' if is_dp else 'worker'} {lane}"
        if lane < len(shares) and (shape := shares[lane][:MOST_EXTENTS]):
            count = f"{shape[0]:,}"
            size = 36 if len(count) < 4 else 150 // len(count)
            yield _text(LANES_X + 22, centre + 13, count, size, colour, weight=700)
            yield _text(LANES_X + 116, centre + 19, shape_text(shape), 16, MUTED)
        yield _text(LANES_X + 116, centre - 6, title, 19, weight=600)
        yield _text(LANES_X + 230, centre + 6, "forward → backward", 14, MUTED)
        if lane < len(gradients):
            said, place = _number(gradients[lane]), LANES_END - 22
            yield _text(place, centre - 8, "gradient", 16, MUTED, anchor="end")
            yield _text(place, centre + 20, said, 21, colour, mono=True, anchor="end")
        yield _join(LANES_END, centre, SUM_X, middle, colour, INK)
    yield _box(SUM_X, middle - 85, SUM_END - SUM_X, 170, INK)
    centre = (SUM_X + SUM_END) / 2
    word = "added up" if is_dp else "the average, on all"
    yield _text(centre, middle - 34, word, 18, MUTED, anchor="middle")
    if total:
        yield _text(
            centre, middle + 10, _number(total[0]), 34, mono=True, weight=700, anchor="middle"
        )
    yield _text(centre, middle + 50, "the same update", 18, MUTED, anchor="middle")
    more = trace.workers - len(lanes)
    if more > 0:
        words = f"and {count_text(more, 'other')} in the same way"
        yield _text(LANES_X + 22, BOTTOM + 26, words, 16, MUTED)
    yield from _verdict(trace)


def _verdict(trace: Trace) -> Iterator[str]:
    check = trace.check
    if check is None:
        return
    sign, colour = ("✓", GOOD) if check.is_same else ("✗", BAD)
    yield f'<path d="M48 545H1152" stroke="{RULE}"/>'
    yield _text(48, 592, sign, 28, colour, weight=700)
    yield _text(86, 591, f"{check.text[:1].upper()}{check.text[1:60]}", 24, weight=600)
    yield _text(1152, 591, "paceline trace", 19, MUTED, mono=True, anchor="end")


def _lanes(trace: Trace) -> list[int]:
    """The workers that get a lane: the first ones and the last."""
    if trace.workers <= MOST_LANES:
        return list(range(max(1, trace.workers)))
    return [*range(MOST_LANES - 1), trace.workers - 1]


def _shares(trace: Trace) -> list[list[int]]:
    """The shape of each worker's part of the batch."""
    name = "split" if trace.engine == "DataParallel" else "batch"
    stage = next((stage for stage in trace.stages if stage.name == name), None)
    tensors = [part.tensors for part in stage.parts] if stage else []
    return [each[0].shape if each else [] for each in tensors]


def _number(value: float) -> str:
    return f"{value:.5f}" if 1e-4 <= abs(value) < 10 or not value else f"{value:.3g}"


def _text(
    x: float,
    y: float,
    words: str,
    size: int,
    colour: str = INK,
    *,
    weight: int = 400,
    anchor: str = "start",
    mono: bool = False,
) -> str:
    family = f' font-family="{MONO}"' if mono else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}"{family}>{escape(words)}</text>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="12" '
        f'fill="{colour}" fill-opacity="0.07" stroke="{colour}" stroke-width="2.5"/>'
    )


def _join(x: float, y: float, to_x: float, to_y: float, colour: str, head_colour: str = "") -> str:
    half = (x + to_x) / 2
    path = f"M{x:g} {y:g}C{half:g} {y:g} {half:g} {to_y:g} {to_x - 10:g} {to_y:g}"
    head = f"M{to_x:g} {to_y:g}l-13 -7v14z"
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="3"/>'
        f'<path d="{head}" fill="{head_colour or colour}"/>'
    )
