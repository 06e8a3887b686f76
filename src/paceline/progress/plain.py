"""A run as plain lines, for logs, pipes, CI and terminals that cannot do more.

A line is written when there is news: the end of an epoch, or some seconds of silence. A run of
a second is its opening and its summary.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.progress import table
from paceline.progress.painter import Sheet, said
from paceline.progress.state import Row, State

SILENCE_S = 10.0
"""After so long without a line, a step is worth one."""
NEWS_S = 1.0
"""Between the ends of two epochs: quick ones are read in the table at the end."""


class PlainPainter:
    """Writes to a sheet, a line at a time."""

    interval_s = NEWS_S

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._last_s = 0.0

    def start(self, state: State) -> None:
        self._last_s = state.now_s
        self.sheet.write(*table.opening(state))

    def step(self, state: State) -> None:
        if state.now_s - self._last_s >= SILENCE_S:
            self._write_status(state)

    def epoch(self, state: State, row: Row) -> None:
        if state.now_s - self._last_s >= NEWS_S:
            self._write_status(state)

    def evaluation(self, state: State, row: Row) -> None:
        """Said in the table at the end, and by whoever asked for the evaluation."""

    def message(self, state: State | None, text: str, level: str) -> None:
        self.sheet.write(*said(text, level))

    def finish(self, state: State, status: str, lines: Sequence[str]) -> None:
        self.sheet.write(*table.summary(state, status, lines))

    def close(self) -> None:
        """A line is whole as soon as it is written."""

    def _write_status(self, state: State) -> None:
        self._last_s = state.now_s
        self.sheet.write(table.status_line(state))
