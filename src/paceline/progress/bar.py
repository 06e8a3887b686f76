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
            self.console.width = self.sheet.columns
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
        grid: list[ConsoleRenderable] = []
        room = self.console.width - 1
        if facts.steps:
            percent = f"{state.share or 0.0:4.0%}"
            room -= len(percent) + _SHORTEST_BAR + 2 * len(table.GAP)
            left = room - len(table.GAP.join(table.status_parts(state, room)))
            length = min(_SHORTEST_BAR + max(left, 0), _LONGEST_BAR)
            bar = ProgressBar(facts.steps, min(state.step, facts.steps), width=length)
            grid = [bar, Text(percent, style="cyan")]
        grid += [Text(printable(part)) for part in table.status_parts(state, room)]
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
