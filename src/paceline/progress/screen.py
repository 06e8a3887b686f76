"""The bottom line of a terminal, kept by the process that owns it.

Others say what the line should be; whatever is written meanwhile goes above it, in whole lines.
There is no thread, no hidden cursor and no mode to restore: one that is killed leaves a line of
text behind, nothing else.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from paceline.env import read_terminal
from paceline.progress.line import Glance, Layout, is_possible
from paceline.progress.mode import choose_mode
from paceline.progress.painter import columns_of, is_terminal, spelled

if TYPE_CHECKING:
    from rich.console import Console

Write = Callable[[bytes], object]

_ERASE = b"\r\x1b[0m\x1b[2K"
# What moves the cursor, clears or scrolls would hit the line; colours may stay.
_MOVES = re.compile(rb"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-ln-~]|[78DMEc])")


def can_draw(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a line can be kept at the bottom of what `fd` is open for.

    Whether it should is for the run to decide, which may have been asked for something else.
    """
    settings = read_terminal(environ)
    best = choose_mode(
        "bar", is_terminal=is_terminal(fd), settings=settings, has_rich=is_possible()
    )
    return best == "bar"


class Screen:
    """At most one line at the bottom, and everything else above it.

        empty --show--> drawn --show, write_above, refresh--> drawn --clear--> empty

    Invariant: between two calls the cursor stands behind the drawn line, or nothing is drawn.
    """

    def __init__(self, write: Write, *, fd: int, encoding: str, has_colour: bool) -> None:
        """A screen that `write` writes to and that `fd` is open for."""
        self.write = write
        self._fd = fd
        self._encoding = encoding
        self._has_colour = has_colour
        self._glance: Glance | None = None
        self._note = ""
        self._line = b""
        """As it stands on the terminal; empty if it does not."""
        self._drawn_columns = 0
        self._is_foreign = False
        self._layout = Layout()

    @property
    def is_drawn(self) -> bool:
        return bool(self._line)

    def receive(self, record: Glance | str | None) -> None:
        """What `read_record` made of a record."""
        if isinstance(record, Glance):
            self.show(record)
        elif record == "drawn":
            self._is_foreign = True
        elif record == "end":
            self._is_foreign = False
            self.clear()

    def show(self, glance: Glance) -> None:
        """Draw the line, in place of the last one."""
        self._glance = glance
        self._draw()

    def note(self, text: str) -> None:
        """Something that the line should say from now on, whatever else it says."""
        self._note = text
        self.refresh(must=True)

    def refresh(self, *, must: bool = False) -> None:
        """Draw again if the terminal has another width now."""
        if self._line and (must or columns_of(self._fd) != self._drawn_columns):
            self._draw()

    def write_above(self, data: bytes) -> None:
        """Write whole lines; the line at the bottom is never missing in between."""
        if self._line:
            data = _ERASE + _MOVES.sub(b"", data) + self._line
        self.write(data)

    def clear(self) -> None:
        """Remove the line, also one that a process drew which is no more."""
        if self._line or self._is_foreign:
            self._put(_ERASE)
        self._glance, self._line, self._is_foreign = None, b"", False

    def _draw(self) -> None:
        assert self._glance is not None
        glance = self._glance
        if self._note:
            glance = Glance(glance.step, glance.steps, (*glance.parts, (-1, self._note)))
        columns = self._drawn_columns = columns_of(self._fd)
        # In the last column a terminal would wrap, sooner or later.
        console = self._console(max(columns - 1, 1))
        with console.capture() as capture:
            console.print(self._layout.draw(glance, columns), end="")
        text = spelled(capture.get().rstrip("\n"), self._encoding)
        self._line = text.encode(self._encoding, "replace")
        self._put(_ERASE + self._line)

    def _console(self, columns: int) -> Console:
        from rich.console import Console

        return Console(
            file=_Encoded(self._encoding),
            force_terminal=True,
            no_color=not self._has_colour,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
            width=columns,
        )

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # no line is worth a training
            self.write(data)


class _Encoded(io.TextIOWrapper):
    """Tells `rich` which letters the terminal has. It stays empty: what is drawn is captured."""

    def __init__(self, encoding: str) -> None:
        super().__init__(io.BytesIO(), encoding=encoding)
