"""A run as one live line on a terminal, drawn with `rich`.

`rich` is imported when a bar is made, because it may not be there. It redraws only when told to:
there is no thread, and the line fits whatever width the terminal has at that moment. What the
program prints meanwhile appears above the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, cast

from paceline.progress import table
from paceline.progress.line import Glance, Layout
from paceline.progress.painter import Sheet, printable, said
from paceline.progress.sending import Channel
from paceline.progress.state import Row, State

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live


class BarPainter:
    """Keeps one line at the bottom of the terminal until the run has ended."""

    interval_s = 0.1

    def __init__(self, sheet: Sheet, *, has_colour: bool, channel: Channel | None = None) -> None:
        """A launcher at the end of `channel` removes the line if this process is killed."""
        from rich.console import Console

        self.sheet = sheet
        self._channel = channel
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
        self._layout = Layout()

    def start(self, state: State) -> None:
        from rich.live import Live

        self.sheet.write(*table.opening(state))
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._live.start()
        if self._channel is not None:
            self._channel.drawn()
        # A hidden cursor would stay hidden if this process were killed.
        self.console.show_cursor(True)
        self.step(state)

    def step(self, state: State) -> None:
        if self._live is not None:
            self._drawn_s = state.now_s
            # Asked again each time, because people resize their windows.
            columns = self.console.width = self.sheet.columns
            self._live.update(self._layout.draw(Glance.of(state), columns), refresh=True)

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
            if self._channel is not None:
                self._channel.end()


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
