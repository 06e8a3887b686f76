"""Boxes side by side and the lines between rows of them: geometry on text, nothing else.

A row of `n` boxes divides the width evenly, so that a line from one row to the next can be drawn
from the numbers of boxes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GAP = 2


@dataclass(frozen=True, slots=True)
class Box:
    """A title, what is inside, and a remark at the right end of the title's line."""

    title: str
    lines: Sequence[str]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class _Slot:
    start: int
    width: int

    @property
    def centre(self) -> int:
        return self.start + self.width // 2


def side_by_side(
    boxes: Sequence[Box], margin: int, width: int, *, is_fed: bool = False
) -> list[str]:
    """The boxes in one row, all as high as the highest; `is_fed` draws an arrow into each."""
    slots = _slots(len(boxes), margin, width)
    drawn = [_draw(box, slot.width, is_fed) for box, slot in zip(boxes, slots, strict=True)]
    height = max(map(len, drawn))
    padded = [
        [*lines[:-1], *[f"│{' ' * (slot.width - 2)}│"] * (height - len(lines)), lines[-1]]
        for lines, slot in zip(drawn, slots, strict=True)
    ]
    return [" " * margin + (" " * GAP).join(row) for row in zip(*padded, strict=True)]


def connect(before: int, after: int, margin: int, width: int) -> list[str]:
    """The lines from a row of `before` boxes to one of `after`: straight on, a fork or a join."""
    sources = [slot.centre for slot in _slots(before, margin, width)]
    goals = [slot.centre for slot in _slots(after, margin, width)]
    if sources == goals:
        return [_put(dict.fromkeys(goals, "│"))]
    left, right = min(sources + goals), max(sources + goals)
    marks = dict.fromkeys(range(left, right + 1), "─")
    for column in (*sources, *goals):
        is_source, is_goal = column in sources, column in goals
        if is_source and is_goal:
            marks[column] = "┼"
        elif column == left:
            marks[column] = "└" if is_source else "┌"
        elif column == right:
            marks[column] = "┘" if is_source else "┐"
        else:
            marks[column] = "┴" if is_source else "┬"
    return [_put(marks)]


def meet(lanes: int, text: str, margin: int, width: int) -> list[str]:
    """Lanes that come together, have something done to them, and part again."""
    if lanes == 1:
        return connect(1, 1, margin, width)
    centre = _slots(1, margin, width)[0].centre
    words = text[: width - margin]
    start = max(margin, centre - len(words) // 2)
    joined, parted = connect(lanes, 1, margin, width), connect(1, lanes, margin, width)
    return [*joined, " " * start + words, *parted]


def _slots(number: int, margin: int, width: int) -> list[_Slot]:
    """Equal widths with a gap between; what does not divide is left at the right."""
    each = (width - margin - GAP * (number - 1)) // number
    return [_Slot(margin + i * (each + GAP), each) for i in range(number)]


def room_inside(number: int, margin: int, width: int) -> int:
    """How many characters a line in one of `number` boxes has."""
    return _slots(number, margin, width)[0].width - 4


def _draw(box: Box, width: int, is_fed: bool) -> list[str]:
    inside = width - 4
    remark = f" {box.remark} " if box.remark else ""
    title = f" {box.title} "
    if len(title) + len(remark) > width - 4:
        remark = ""
    title = title if len(title) <= width - 3 else f"{title[: width - 6]}... "
    top = f"┌─{title}{'─' * (width - 3 - len(title) - len(remark))}{remark}┐"
    centre = width // 2
    if is_fed and top[centre] == "─":
        top = f"{top[:centre]}▼{top[centre + 1 :]}"
    body = [f"│ {line[:inside]:<{inside}} │" for line in box.lines]
    return [top, *body, f"└{'─' * (width - 2)}┘"]


def _put(marks: dict[int, str]) -> str:
    return "".join(marks.get(column, " ") for column in range(max(marks) + 1))
