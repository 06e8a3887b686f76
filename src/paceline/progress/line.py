"""The live line: what it says, and how much of that fits.

A `Glance` is plain data, so that whoever trains can say where the run is and whoever owns the
terminal can draw it, be that one process or two. `rich` is imported when a line is drawn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeGuard

from paceline.progress import numbers, table
from paceline.progress.painter import printable
from paceline.progress.state import State

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable
    from rich.table import Table

_SHORTEST_BAR, _LONGEST_BAR = 6, 30
# A terminal shows `^C` where its cursor is; at the edge it would go on in the next row, and what
# is on this one would stay.
_SPARE_COLUMNS = 5
_MOST_PARTS, _MOST_LETTERS, _LARGEST = 16, 56, 2**53


def is_possible() -> bool:
    """Whether `rich` is installed."""
    return find_spec("rich") is not None


@dataclass(frozen=True, slots=True)
class Glance:
    """Where a run is: how far, and in words, each with how dispensable it is."""

    step: int
    steps: int | None
    """In all; None or 0 where nobody knows, and then there is no bar."""
    parts: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, state: State) -> Glance:
        status = table.status(state)[:_MOST_PARTS]
        parts = ((dispensable, printable(text)[:_MOST_LETTERS]) for dispensable, text in status)
        return cls(state.step, state.facts.steps, tuple(parts))

    @classmethod
    def from_json(cls, record: object) -> Glance | None:
        """What `as_json` gave, or None: it comes from another process."""
        if not isinstance(record, dict):
            return None
        step, steps, parts = record.get("step"), record.get("steps"), record.get("parts")
        if not _is_count(step) or not (steps is None or _is_count(steps)):
            return None
        if not isinstance(parts, list) or len(parts) > _MOST_PARTS:
            return None
        for part in parts:
            if not isinstance(part, list) or list(map(type, part)) != [int, str]:
                return None
        return cls(step, steps, tuple((part[0], part[1][:_MOST_LETTERS]) for part in parts))

    def as_json(self) -> str:
        facts = {"kind": "step", "step": self.step, "steps": self.steps, "parts": self.parts}
        return json.dumps(facts, ensure_ascii=False)


class Layout:
    """Fits a glance into a width, again and again.

    Once something does not fit it stays away, and the bar short, until the width changes: a line
    that jumps about cannot be read.
    """

    def __init__(self) -> None:
        self._columns, self._limit, self._bar_columns = 0, table.ALL, _LONGEST_BAR

    def draw(self, glance: Glance, columns: int) -> Table:
        """The bar and the words; on a narrow terminal only what fits."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if columns != self._columns:
            self._columns, self._limit, self._bar_columns = columns, table.ALL, _LONGEST_BAR
        done = min(glance.step, glance.steps or 0)
        percent = f"{done / glance.steps if glance.steps else 0.0:4.0%}"
        room = columns - _SPARE_COLUMNS
        if glance.steps:
            room -= len(percent) + _SHORTEST_BAR + 2 * len(table.GAP)
        parts, limit = table.fit(glance.parts, room, self._limit)
        left = max(room - numbers.columns(table.GAP.join(parts)), 0)
        if limit < self._limit:
            self._limit, self._bar_columns = limit, _LONGEST_BAR
        self._bar_columns = min(self._bar_columns, _SHORTEST_BAR + left)
        grid: list[ConsoleRenderable] = [Text(printable(part)) for part in parts]
        if glance.steps:
            bar = ProgressBar(glance.steps, done, width=self._bar_columns)
            grid = [bar, Text(percent, style="cyan"), *grid]
        line = Table.grid(padding=(0, len(table.GAP), 0, 0))
        for _ in grid:
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*grid)
        return line


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST
