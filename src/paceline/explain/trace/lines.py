"""Lines of text with a style beside them, and the few ways in which text is made to fit."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Literal

WIDTH = 80

Style = Literal["", "title", "quiet", "good", "bad", "sample", "weight"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line, and what it is."""

    text: str
    style: Style = ""


def paragraph(text: str, width: int, indent: str, style: Style = "", mark: str = "") -> list[Line]:
    """Text wrapped to a width; a mark takes the place of the first line's indent."""
    head = f"{mark} " if mark else indent
    room = width - 1 if mark else width  # in ASCII some marks take two characters
    wrapped = textwrap.wrap(
        text, room, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False
    )
    return [Line(line, style) for line in wrapped]


def short_number(number: float) -> str:
    """Three digits, in as few characters as that takes."""
    if number == 0:
        return "0"
    size = abs(number)
    if size >= 1e5 or size < 1e-3:
        return f"{number:.1e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{number:.3g}" if size < 1000 else f"{number:.0f}"


def cut(text: str, room: int) -> str:
    """The text, or its beginning and dots."""
    return text if len(text) <= room else f"{text[: max(0, room - 3)]}..."
