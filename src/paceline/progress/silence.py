"""A run that only speaks up when something is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.progress.painter import Sheet, said
from paceline.progress.state import Row, State


class SilentPainter:
    """Writes warnings and errors, and with no sheet not even those."""

    interval_s = float("inf")

    def __init__(self, sheet: Sheet | None) -> None:
        self.sheet = sheet

    def start(self, state: State) -> None: ...

    def step(self, state: State) -> None: ...

    def epoch(self, state: State, row: Row) -> None: ...

    def evaluation(self, state: State, row: Row) -> None: ...

    def message(self, state: State | None, text: str, level: str) -> None:
        if self.sheet is not None and level != "info":
            self.sheet.write(*said(text, level))

    def finish(self, state: State, status: str, lines: Sequence[str]) -> None: ...

    def close(self) -> None: ...
