"""A run behind a launcher that owns the terminal: the launcher draws, this process only tells.

What stays on the screen (the opening, messages, the summary) is written to standard output like
anything else the program prints, so it keeps its place among that; a mark in front of each line
tells the launcher that it needs no rank. The live line travels as a few records a second on
a descriptor of its own. A launcher that is slow misses some of them: nobody waits for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import termios
from collections.abc import Sequence
from dataclasses import replace

from paceline.progress import table
from paceline.progress.line import Glance
from paceline.progress.painter import Sheet, printable, said
from paceline.progress.state import Row, State

# More than this unread: whoever should read is busy, and would only draw what is long past.
_MOST_UNREAD_BYTES = 2**12
# Linux's PIPE_BUF: a pipe takes so much at once, or nothing of it.
_MOST_BYTES = 2**12
_STYLES = {"warning": "33", "error": "1;31"}


class Channel:
    """The way to the launcher. Sending never waits and never fails."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._number = os.fstat(fd).st_ino
        # What the user's program starts has nothing to say here.
        os.set_inheritable(fd, False)

    def drawn(self) -> None:
        """This process draws a line itself, which should not outlive it."""
        self._send('{"kind": "drawn"}')

    def step(self, glance: Glance) -> None:
        if self._unread() > _MOST_UNREAD_BYTES:
            return
        record = glance.as_json()
        if len(record.encode()) >= _MOST_BYTES:
            record = replace(glance, parts=()).as_json()
        self._send(record)

    def end(self) -> None:
        """There is no line any more."""
        self._send('{"kind": "end"}')

    def _send(self, record: str) -> None:
        with contextlib.suppress(OSError):  # full, or nobody is there to read
            # A program that closes what it does not know may have a file of its own here now.
            if os.fstat(self.fd).st_ino == self._number:
                os.write(self.fd, f"{record}\n".encode())

    def _unread(self) -> int:
        try:
            size = fcntl.ioctl(self.fd, termios.FIONREAD, struct.pack("i", 0))
        except OSError:  # then a full pipe is the only bound
            return 0
        return int(struct.unpack("i", size)[0])


class SendingPainter:
    """Writes what stays, and sends what does not."""

    interval_s = 0.25

    def __init__(self, sheet: Sheet, fd: int, *, has_colour: bool) -> None:
        self.sheet = sheet
        self.has_colour = has_colour
        self._channel = Channel(fd)
        self._is_drawn = False
        self._sent_s = 0.0

    def start(self, state: State) -> None:
        self.sheet.write(*table.opening(state))
        self._is_drawn = True
        self.step(state)

    def step(self, state: State) -> None:
        self._sent_s = state.now_s
        self._channel.step(Glance.of(state))

    def epoch(self, state: State, row: Row) -> None:
        if state.now_s - self._sent_s >= self.interval_s:
            self.step(state)

    def evaluation(self, state: State, row: Row) -> None:
        """Said in the table at the end."""

    def message(self, state: State | None, text: str, level: str) -> None:
        # Without a mark the line goes to a log file too, where colours are noise.
        style = _STYLES.get(level) if self.has_colour and self.sheet.mark else None
        before, after = (f"\x1b[{style}m", "\x1b[0m") if style else ("", "")
        lines = (f"{before}{printable(line)}{after}\n" for line in said(text, level))
        self.sheet.write_raw("".join(self.sheet.mark + line for line in lines))

    def finish(self, state: State, status: str, lines: Sequence[str]) -> None:
        self.close()
        self.sheet.write(*table.summary(state, status, lines))

    def close(self) -> None:
        if self._is_drawn:
            self._channel.end()
        self._is_drawn = False


def read_record(line: bytes) -> Glance | str | None:
    """One record: where the run is, `drawn`, `end`, or None if it is none of these."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    kind = record.get("kind") if isinstance(record, dict) else None
    return kind if kind in ("drawn", "end") else Glance.from_json(record)
