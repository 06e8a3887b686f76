"""Ways of showing a run without a live line: silence, plain lines, JSON lines.

A painter writes to a `LineStream`, a text stream that never breaks a training: letters that the
terminal does not have are escaped, and a reader that left is no reason to stop.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any, TextIO

from paceline.comm.documents import plain_json
from paceline.observe.units import printable
from paceline.progress import text
from paceline.progress.text import ProgressState

SILENCE_S = 10.0
"""After so long without a line, a step is worth one."""
NEWS_S = 1.0
"""Between the ends of two epochs: quick ones are read in the table at the end."""


class LineStream:
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

    def write(self, *lines: str) -> None:
        """Write whole lines at once; control characters in them stay text."""
        self.write_raw("".join(f"{self.mark}{printable(line)}\n" for line in lines))

    def write_raw(self, data: str) -> None:
        """Write as far as the encoding can say it, and control characters as they are."""
        if self.is_gone or not data:
            return
        try:
            self.stream.write(text.encodable(data, self.encoding))
            self.stream.flush()
        except (OSError, ValueError):
            self.is_gone = True


class Painter:
    """Shows nothing but warnings and errors, and without a stream not even those.

    The base of the other painters. Calls come one at a time.
    """

    interval_s = math.inf
    """The shortest time between two steps that are shown."""

    def __init__(self, out: LineStream | None) -> None:
        self.out = out

    def show(self, state: ProgressState, kind: str, facts: Mapping[str, Any]) -> None:
        """Show what happened: `start`, `step`, `epoch`, `evaluation`, `message` or `finish`."""
        if kind == "message" and facts["level"] != "info":
            self.write(*text.message_lines(**facts))

    def close(self) -> None:
        """Leave the terminal as it was; called once at the end, however that came."""

    def write(self, *lines: str) -> None:
        if self.out is not None:
            self.out.write(*lines)


class PlainPainter(Painter):
    """A line when there is news: the end of an epoch, or some seconds of silence.

    A run of a second is its opening and its summary.
    """

    interval_s = NEWS_S

    def __init__(self, out: LineStream) -> None:
        super().__init__(out)
        self._last_s = 0.0

    def show(self, state: ProgressState, kind: str, facts: Mapping[str, Any]) -> None:
        match kind:
            case "start":
                self._last_s = state.now_s
                self.write(*text.opening(state))
            case "step" | "epoch":
                if state.now_s - self._last_s >= (SILENCE_S if kind == "step" else NEWS_S):
                    self._last_s = state.now_s
                    self.write(text.status_line(state))
            case "message":
                self.write(*text.message_lines(**facts))
            case "finish":
                self.write(*text.summary(state, facts["status"], facts["lines"]))


class JsonPainter(Painter):
    """Objects with a `kind` and the time `t`, one per line, for programs.

    Steps are thinned out, everything else is complete. Numbers that JSON cannot say are the
    strings "nan", "inf" and "-inf".
    """

    interval_s = 1.0

    def show(self, state: ProgressState, kind: str, facts: Mapping[str, Any]) -> None:
        self.write(json.dumps(plain_json({"kind": kind, "t": time.time(), **facts})))


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
