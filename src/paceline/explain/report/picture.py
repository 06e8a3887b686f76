"""The pipeline picture: one row of boxes for each stage, joined to the row before.

What belongs to a worker stands in that worker's lane and colour; what belongs to all is as wide as
the picture. So a batch that is cut up fans out, and gradients that are averaged come together,
without the drawing knowing any stage by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.explain.report.markup import Html, count, duration, figure, size, tag, text
from paceline.record.stages import Part, Stage, TensorFacts

WIDTH = 380
LANES = 4
"""More boxes than this do not fit side by side: the last one then says how many there are."""
JOIN = 26
"""How high the connections to the row before are."""
BOX = 74
GAP = 8
LETTER = 7.2
"""How wide a letter of a box is."""
LOOKS = 6
"""How many colours workers have; then they repeat."""


@dataclass(frozen=True, slots=True)
class Box:
    """One box of a row, and the parts that it stands for."""

    title: str
    lines: tuple[str, ...]
    look: str
    x: float
    width: float
    glyph: tuple[float, float] | None = None
    worker: int | None = None

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


NOUN_BY_NAME = {
    "row numbers": "row",
    "own gradients": "gradient",
    "averaged gradients": "gradient",
    "gradients": "gradient",
    "weights": "weight",
}
"""What the numbers of a list are, where a tensor's name says so."""


def shape(tensor: TensorFacts) -> str:
    """A shape as people say it: `50 x 10`, `385 gradients`."""
    if len(tensor.shape) == 1:
        return count(tensor.shape[0], NOUN_BY_NAME.get(tensor.name, "value"))
    if tensor.shape:
        return " \N{MULTIPLICATION SIGN} ".join(f"{each:,}" for each in tensor.shape)
    return "one number" if tensor.dtype else f"{text(tensor.name, 40)}, {size(tensor.bytes)}"


def look_of(worker: int | None) -> str:
    return "all" if worker is None else f"worker{worker % LOOKS}"


def lay_out(stage: Stage, largest: float) -> list[Box]:
    """The boxes of one row from left to right. `largest`: elements of the largest tensor shown."""
    parts = stage.parts
    if not parts:
        return [Box(stage.title, (), "all", 0, WIDTH)]
    shown = parts if len(parts) <= LANES else parts[: LANES - 1]
    slots = min(len(parts), LANES)
    width = (WIDTH - GAP * (slots - 1)) / slots
    boxes = []
    for index, part in enumerate(shown):
        lines = _lines(part)
        room = min(46.0, width / 4)
        glyph = _glyph(part.tensors[0], largest, room) if part.tensors and width > 100 else None
        look = look_of(part.worker)
        x = index * (width + GAP)
        boxes.append(Box(text(part.title, 60), lines, look, x, width, glyph, part.worker))
    if len(parts) > LANES:
        left = len(parts) - len(shown)
        x = len(shown) * (width + GAP)
        boxes.append(Box(f"… {left:,} more", ("alike",), "more", x, width))
    return boxes


def _lines(part: Part) -> tuple[str, ...]:
    lines = []
    if part.tensors:
        first = part.tensors[0]
        is_single = first.first is not None and not first.shape
        lines.append(figure(first.first[0]) if is_single and first.first else shape(first))
        if len(part.tensors) > 1:
            lines.append(f"and {len(part.tensors) - 1} more")
    elif part.text:
        lines.append(text(part.text, 60))
    if part.seconds is not None:
        lines.append(duration(part.seconds))
    return tuple(lines[:2])


def _glyph(tensor: TensorFacts, largest: float, room: float) -> tuple[float, float] | None:
    """Width and height of a small rectangle whose sides follow columns and rows."""
    if len(tensor.shape) < 2 or 0 in tensor.shape:
        return None
    rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])

    def length(amount: float, most: float, pixels: float) -> float:
        return max(3.0, pixels * math.sqrt(min(1.0, amount / most)))

    return round(length(columns, 100, room), 1), round(length(rows, largest, 50), 1)


def draw_row(
    stage: Stage, boxes: Sequence[Box], before: Sequence[Box], *, marks: Sequence[int | None] = ()
) -> Html:
    """One row. `marks`: the workers at which the followed sample is at this stage."""
    top = JOIN if before else 4
    height = top + BOX + 2
    parts = [_join(a, b, len(before), len(boxes), top) for a in before for b in boxes]
    parts += [_draw_box(box, top, box.worker in marks) for box in boxes]
    words = "; ".join(f"{box.title} {' '.join(box.lines)}".strip() for box in boxes)
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {height}",
        class_="row-picture",
        role="img",
        aria_label=f"{text(stage.title, 100)}: {words}",
    )


def draw_rest(boxes: Sequence[Box]) -> Html:
    """The lines below a row, as long as the words beside it are."""
    lines = [
        tag("path", d=f"M{box.middle:.1f} 0V10", class_=f"join stroke-{box.look}") for box in boxes
    ]
    return tag(
        "svg",
        *lines,
        viewBox=f"0 0 {WIDTH} 10",
        preserveAspectRatio="none",
        class_="rest",
        aria_hidden="true",
    )


def _join(a: Box, b: Box, before: int, after: int, top: float) -> Html | None:
    """The connection of two boxes. Between equal lanes it goes straight down and nowhere else."""
    if before == after and a.x != b.x and a.look != "all":
        return None
    if before == after and a.look == "all" and before > 1 and a.x != b.x:
        return None
    bend = top / 2
    begin, end = f"{a.middle:.1f}", f"{b.middle:.1f}"
    path = f"M{begin} 0C{begin} {bend:.1f} {end} {bend:.1f} {end} {top - 5:.1f}"
    look = b.look if a.look in {"all", "more"} else a.look
    return tag(
        "g",
        tag("path", d=path, class_=f"join stroke-{look}"),
        tag("path", d=f"M{b.middle:.1f} {top:.1f}l-4 -7h8z", class_=f"fill-{look}"),
    )


def _draw_box(box: Box, top: float, is_marked: bool) -> Html:
    parts = [
        tag(
            "rect",
            x=box.x + 1,
            y=top,
            width=box.width - 2,
            height=BOX,
            rx=8,
            class_=f"box stroke-{box.look}",
        )
    ]
    left = box.x + 12
    if box.glyph is not None:
        wide, high = box.glyph
        middle, room = top + BOX / 2, min(46.0, box.width / 4)
        parts.append(
            tag(
                "rect",
                x=round(box.x + 10 + (room - wide) / 2, 1),
                y=round(middle - high / 2, 1),
                width=wide,
                height=high,
                rx=1.5,
                class_=f"tensor fill-{box.look}",
            )
        )
        left = box.x + room + 18
    letters = int((box.x + box.width - left - 4) / LETTER)
    lines = [_fit(line, letters) for line in (box.title, *box.lines)]
    first = top + BOX / 2 - (len(lines) - 1) * 8.5 + 4
    for index, line in enumerate(lines):
        kind = "name" if index == 0 else "shape" if index == 1 else "small"
        parts.append(
            tag("text", line, x=left, y=round(first + index * 17, 1), class_=f"box-text {kind}")
        )
    if is_marked:
        parts.append(tag("circle", cx=box.x + box.width - 10, cy=top + 9, r=4.5, class_="followed"))
    return tag("g", *parts)


def _fit(line: str, room: int) -> str:
    return line if len(line) <= room else line[: max(1, room - 1)] + "…"
