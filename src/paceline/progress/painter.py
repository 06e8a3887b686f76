"""What every way of showing a run has in common, and the sheet that it is shown on.

A sheet is a text stream that never breaks a training: a terminal that cannot spell a letter gets
an escape for it, control characters in somebody's text stay text, and a reader that left is no
reason to stop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, TextIO

from paceline.progress.state import Row, State

_USUAL_COLUMNS = 80


class Painter(Protocol):
    """Shows a run as it goes on. Calls come one at a time."""

    interval_s: float
    """The shortest time between two calls of `step`."""

    def start(self, state: State) -> None: ...

    def step(self, state: State) -> None: ...

    def epoch(self, state: State, row: Row) -> None: ...

    def evaluation(self, state: State, row: Row) -> None: ...

    def message(self, state: State | None, text: str, level: str) -> None: ...

    def finish(self, state: State, status: str, lines: Sequence[str]) -> None: ...

    def close(self) -> None:
        """Leave the terminal as it was; called once at the end, however that came."""


class Sheet:
    """A stream to write lines to, whatever it is connected to."""

    def __init__(self, stream: TextIO, mark: str = "") -> None:
        """Lines begin with `mark`, which only a launcher ever sees."""
        self.stream = stream
        self.mark = mark
        self.is_gone = False
        """The reader has left, or the stream was closed: nothing is written any more."""

    @property
    def encoding(self) -> str:
        return getattr(self.stream, "encoding", None) or "utf-8"

    @property
    def columns(self) -> int:
        """How wide the terminal is at this moment."""
        return columns_of(descriptor(self.stream))

    def write(self, *lines: str) -> None:
        """Write whole lines at once; control characters in them stay text."""
        self.write_raw("".join(f"{self.mark}{printable(line)}\n" for line in lines))

    def write_raw(self, text: str) -> None:
        """Write as far as the encoding can say it, and control characters as they are."""
        if self.is_gone or not text:
            return
        try:
            self.stream.write(spelled(text, self.encoding))
            self.stream.flush()
        except (OSError, ValueError):
            self.is_gone = True


def descriptor(stream: TextIO | None) -> int:
    """The stream's descriptor, or -1 where it has none."""
    try:
        return -1 if stream is None else stream.fileno()
    except (OSError, ValueError, AttributeError):
        return -1


def terminal_of(stream: TextIO | None) -> int:
    """The descriptor of the terminal that the stream writes to, or -1.

    A notebook's stream has the descriptor of a terminal it does not write to.
    """
    fd = descriptor(stream)
    try:
        return fd if stream is not None and stream.isatty() and is_terminal(fd) else -1
    except ValueError:  # closed
        return -1


def is_terminal(fd: int) -> bool:
    """Whether it is a terminal that has a size."""
    try:
        return os.isatty(fd) and bool(os.get_terminal_size(fd))
    except OSError:
        return False


def columns_of(fd: int) -> int:
    """How wide the terminal is at this moment."""
    try:
        return os.get_terminal_size(fd).columns or _USUAL_COLUMNS
    except (OSError, ValueError):
        return _USUAL_COLUMNS


def printable(text: str) -> str:
    """The text with escapes for what would move a cursor or change a colour."""
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def spelled(text: str, encoding: str) -> str:
    """The text with escapes for letters that the encoding does not have."""
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return text.encode("ascii", "backslashreplace").decode()


def said(text: str, level: str) -> list[str]:
    """The lines of a message, with its level in front if that is worth saying."""
    return (text if level == "info" else f"{level}: {text}").splitlines()


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
