"""A run as one live line on a terminal, drawn with `rich`.

`rich` is imported when a bar is made, because it may not be there. It redraws only when told to:
there is no thread, and the line fits whatever width the terminal has at that moment. What the
program prints meanwhile appears above the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, cast

from paceline.progress import table
from paceline.progress.painter import Sheet, printable, said
from paceline.progress.state import Row, State

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable
    from rich.live import Live
    from rich.table import Table

_SHORTEST_BAR, _LONGEST_BAR = 6, 30


def is_possible() -> bool:
    """Whether `rich` is installed."""
    return find_spec("rich") is not None


class BarPainter:
    """Keeps one line at the bottom of the terminal until the run has ended."""

    interval_s = 0.1

    def __init__(self, sheet: Sheet, *, has_colour: bool) -> None:
        from rich.console import Console

        self.sheet = sheet
        self.console: Console = Console(
            file=cast(IO[str], _Ink(sheet)),
            force_terminal=True,
            no_color=not has_colour,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._columns, self._limit, self._bar_columns = 0, table.ALL, _LONGEST_BAR

    def start(self, state: State) -> None:
        from rich.live import Live

        self.sheet.write(*table.opening(state))
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._live.start()
        # A hidden cursor would stay hidden if this process were killed.
        self.console.show_cursor(True)
        self.step(state)

    def step(self, state: State) -> None:
        if self._live is not None:
            self._drawn_s = state.now_s
            # Asked again each time, because people resize their windows.
            columns = self.sheet.columns
            if columns != self._columns:
                self._columns = self.console.width = columns
                self._limit, self._bar_columns = table.ALL, _LONGEST_BAR
            self._live.update(self._line(state), refresh=True)

    def epoch(self, state: State, row: Row) -> None:
        if state.now_s - self._drawn_s >= self.interval_s:
            self.step(state)

    def evaluation(self, state: State, row: Row) -> None:
        """Said in the table at the end."""

    def message(self, state: State | None, text: str, level: str) -> None:
        from rich.text import Text

        style = {"warning": "yellow", "error": "bold red"}.get(level, "")
        for line in said(text, level):
            self.console.print(Text(printable(line), style=style))

    def finish(self, state: State, status: str, lines: Sequence[str]) -> None:
        self.close()
        self.sheet.write(*table.summary(state, status, lines))

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _line(self, state: State) -> Table:
        """The bar and the numbers; on a narrow terminal only what fits."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        facts = state.facts
        percent = f"{state.share or 0.0:4.0%}"
        room = self.console.width - 1
        if facts.steps:
            room -= len(percent) + _SHORTEST_BAR + 2 * len(table.GAP)
        parts, limit = table.fit(table.status(state), room, self._limit)
        left = max(room - len(table.GAP.join(parts)), 0)
        # Once something does not fit it stays away, and the bar short: a line that jumps about
        # cannot be read.
        if limit < self._limit:
            self._limit, self._bar_columns = limit, _LONGEST_BAR
        self._bar_columns = min(self._bar_columns, _SHORTEST_BAR + left)
        grid: list[ConsoleRenderable] = [Text(printable(part)) for part in parts]
        if facts.steps:
            done = min(state.step, facts.steps)
            bar = ProgressBar(facts.steps, done, width=self._bar_columns)
            grid = [bar, Text(percent, style="cyan"), *grid]
        line = Table.grid(padding=(0, len(table.GAP), 0, 0))
        for _ in grid:
            line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*grid)
        return line


class _Ink:
    """The sheet as a file for `rich`, which would end the process when a terminal goes away."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet

    @property
    def encoding(self) -> str:
        return self.sheet.encoding

    def write(self, text: str) -> int:
        self.sheet.write_raw(text)
        return len(text)

    def flush(self) -> None:
        """Everything is flushed as it is written."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.sheet.stream.fileno()
