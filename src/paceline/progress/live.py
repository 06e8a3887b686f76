"""The line at the bottom of a terminal that says where the run is.

    trains and owns the terminal      LivePainter: `rich` draws the line, prints appear above it
    trains behind a launcher          SendingPainter --StatusLine, a pipe--> the launcher's Screen

What stays on the screen (opening, messages, summary) is written to standard output like anything
else; a mark in front tells a launcher that the line needs no rank. Nobody waits for a launcher
that is slow: it misses some status lines. `rich` is imported when a line is drawn.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import struct
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, cast

from paceline.env import TerminalSettings, read_terminal
from paceline.errors import SettingError
from paceline.observe.units import printable
from paceline.progress import text
from paceline.progress.painters import LineStream, Painter, is_terminal
from paceline.progress.text import ProgressState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

MODES = ("auto", "bar", "plain", "json", "quiet")

_BAR_COLUMNS = 30
# A terminal shows `^C` where its cursor is; at the edge it would go on in the next row, and what
# is on this one would stay.
_SPARE_COLUMNS = 5
_MOST_PARTS, _MOST_LETTERS, _LARGEST = 16, 56, 2**53
# Linux's PIPE_BUF: a pipe takes so much at once, or nothing of it. With as much unread, whoever
# should read is busy and would only draw what is long past.
_PIPE_BYTES = 2**12
_STYLES = {"warning": "33", "error": "1;31"}
_ERASE = b"\r\x1b[0m\x1b[2K"
# What moves the cursor, clears or scrolls would hit the line; colours may stay.
_MOVES = re.compile(rb"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-ln-~]|[78DMEc])")


def choose_mode(
    wanted: str, *, is_terminal: bool, settings: TerminalSettings, has_rich: bool
) -> str:
    """`bar`, `plain`, `json` or `quiet`.

    What was asked for comes first, then the environment; a bar needs a terminal that can move its
    cursor and somebody who looks at it, and CI is neither.
    """
    chosen, source = wanted, "progress"
    if wanted == "auto" and settings.progress:
        chosen, source = settings.progress, "PACELINE_PROGRESS"
    if chosen not in MODES:
        raise SettingError(f"{source} is {chosen!r}.", advice=f"Choose one of {', '.join(MODES)}.")
    if chosen in ("plain", "json", "quiet"):
        return chosen
    is_able = is_terminal and not settings.is_dumb and has_rich
    return "bar" if is_able and (chosen == "bar" or not settings.is_ci) else "plain"


def has_rich() -> bool:
    return find_spec("rich") is not None


def can_draw(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether a line can be kept at the bottom of what `fd` is open for.

    Whether it should is for the run to decide, which may have been asked for something else.
    """
    return is_terminal(fd) and has_rich() and not read_terminal(environ).is_dumb


@dataclass(frozen=True, slots=True)
class StatusLine:
    """Where a run is: how far, and in words, each with how dispensable it is."""

    step: int
    steps: int | None
    """In all; None or 0 where nobody knows, and then there is no bar."""
    parts: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, state: ProgressState) -> StatusLine:
        parts = text.status(state)[:_MOST_PARTS]
        short = tuple((rank, printable(part)[:_MOST_LETTERS]) for rank, part in parts)
        return cls(state.step, state.steps, short)

    def to_json(self) -> str:
        facts = {"kind": "step", "step": self.step, "steps": self.steps, "parts": self.parts}
        return json.dumps(facts, ensure_ascii=False)

    def draw(self, columns: int) -> Table:
        """The bar and the words; on a narrow terminal only what fits."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        cells: list[Any] = []
        room = columns - _SPARE_COLUMNS
        if self.steps:
            done = min(self.step, self.steps)
            bar = min(_BAR_COLUMNS, max(room // 8, 6))
            percent = f"{done / self.steps:4.0%}"
            room -= bar + len(percent) + 2 * len(text.GAP)
            cells = [ProgressBar(self.steps, done, width=bar), Text(percent, style="cyan")]
        line = Table.grid(*[""] * (len(cells) + 1), padding=(0, len(text.GAP), 0, 0))
        for column in line.columns:
            column.no_wrap, column.overflow = True, "crop"
        line.add_row(*cells, Text(printable(text.fit(self.parts, room))))
        return line


def read_record(line: bytes) -> StatusLine | str | None:
    """One record of rank 0: where the run is, `drawn`, `end`, or None if it is none of these."""
    try:
        match json.loads(line):
            case {"kind": "drawn" | "end" as kind}:
                return str(kind)
            case {"step": int(step), "steps": int() | None as steps, "parts": list(parts)}:
                if len(parts) > _MOST_PARTS or not all(
                    type(n) is int and 0 <= n <= _LARGEST for n in (step, steps or 0)
                ):
                    return None
                pairs = [(rank, part[:_MOST_LETTERS]) for rank, part in parts]
                is_good = all(type(rank) is int and type(part) is str for rank, part in pairs)
                return StatusLine(step, steps, tuple(pairs)) if is_good else None
    except (ValueError, TypeError, RecursionError):
        pass
    return None


class Screen:
    """At most one line at the bottom of a terminal, and everything else above it.

        empty --show--> drawn --show, write_above, refresh--> drawn --clear--> empty

    Invariant: between two calls the cursor stands behind the drawn line, or nothing is drawn.
    There is no thread and no mode to restore: a killed process leaves a line of text behind.
    """

    def __init__(
        self, write: Callable[[bytes], object], *, fd: int, encoding: str, has_colour: bool
    ) -> None:
        """A screen that `write` writes to and that `fd` is open for."""
        self.write = write
        self._fd, self._encoding, self._has_colour = fd, encoding, has_colour
        self._status: StatusLine | None = None
        self._note = ""
        self._line = b""
        """As it stands on the terminal; empty if it does not."""
        self._drawn_columns = 0
        self._is_foreign = False

    @property
    def is_drawn(self) -> bool:
        return bool(self._line)

    def receive(self, record: StatusLine | str | None) -> None:
        """What `read_record` made of a record."""
        if isinstance(record, StatusLine):
            self._status = record
            self._draw()
        elif record == "drawn":
            self._is_foreign = True
        elif record == "end":
            self._is_foreign = False
            self.clear()

    def note(self, said: str) -> None:
        """Something that the line should say from now on, whatever else it says."""
        self._note = said
        self.refresh(must=True)

    def refresh(self, *, must: bool = False) -> None:
        """Draw again if the terminal has another width now."""
        if self._line and (must or columns_of_terminal(self._fd) != self._drawn_columns):
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
        self._status, self._line, self._is_foreign = None, b"", False

    def _draw(self) -> None:
        status = self._status
        if status is None:
            return
        if self._note:
            status = replace(status, parts=(*status.parts, (-1, self._note)))
        columns = self._drawn_columns = columns_of_terminal(self._fd)
        # rich asks the file which letters it has; it stays empty, because drawing is captured.
        file = io.TextIOWrapper(io.BytesIO(), encoding=self._encoding)
        # In the last column a terminal would wrap, sooner or later.
        console = _console(file, has_colour=self._has_colour, width=max(columns - 1, 1))
        with console.capture() as capture:
            console.print(status.draw(columns), end="")
        drawn = text.encodable(capture.get().rstrip("\n"), self._encoding)
        self._line = drawn.encode(self._encoding, "replace")
        self._put(_ERASE + self._line)

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # no line is worth a training
            self.write(data)


class ScreenPipe:
    """Rank 0's way to the launcher's screen. Sending never waits and never fails."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._number = os.fstat(fd).st_ino
        # What the user's program starts has nothing to say here.
        os.set_inheritable(fd, False)

    def status(self, status: StatusLine) -> None:
        if self._unread_bytes() <= _PIPE_BYTES:
            record = status.to_json()
            is_short = len(record.encode()) < _PIPE_BYTES
            self.send(record if is_short else replace(status, parts=()).to_json())

    def send(self, record: str) -> None:
        with contextlib.suppress(OSError):  # full, or nobody is there to read
            # A program that closes what it does not know may have a file of its own here now.
            if os.fstat(self.fd).st_ino == self._number:
                os.write(self.fd, f"{record}\n".encode())

    def _unread_bytes(self) -> int:
        try:
            size = fcntl.ioctl(self.fd, termios.FIONREAD, struct.pack("i", 0))
        except OSError:  # then a full pipe is the only bound
            return 0
        return int(struct.unpack("i", size)[0])


class SendingPainter(Painter):
    """Writes what stays, and sends the status line to the launcher."""

    interval_s = 0.25

    def __init__(self, out: LineStream, *, has_colour: bool, fd: int = -1) -> None:
        super().__init__(out)
        self._has_colour = has_colour
        self._channel = ScreenPipe(fd) if fd >= 0 else None
        self._is_live = False
        self._drawn_s = 0.0

    def show(self, state: ProgressState, kind: str, facts: Mapping[str, Any]) -> None:
        match kind:
            case "start":
                self.write(*text.opening(state))
                self._is_live = True
                self.begin()
                self._step(state)
            case "step":
                self._step(state)
            case "epoch" if state.now_s - self._drawn_s >= self.interval_s:
                self._step(state)
            case "message":
                for line in text.message_lines(**facts):
                    self.say(printable(line), facts["level"])
            case "finish":
                self.close()
                self.write(*text.summary(state, facts["status"], facts["lines"]))

    def _step(self, state: ProgressState) -> None:
        if self._is_live:
            self._drawn_s = state.now_s
            self.draw(StatusLine.of(state))

    def close(self) -> None:
        if self._is_live:
            self._is_live = False
            self.erase()
            if self._channel is not None:
                self._channel.send('{"kind": "end"}')

    def begin(self) -> None:
        """The line is about to be drawn for the first time."""

    def draw(self, status: StatusLine) -> None:
        if self._channel is not None:
            self._channel.status(status)

    def erase(self) -> None:
        """The line goes away."""

    def say(self, line: str, level: str) -> None:
        """Write one line of a message."""
        assert self.out is not None
        # Without a mark the line goes to a log file too, where colours are noise.
        if self._has_colour and self.out.mark and level in _STYLES:
            line = f"\x1b[{_STYLES[level]}m{line}\x1b[0m"
        self.out.write_raw(f"{self.out.mark}{line}\n")


class LivePainter(SendingPainter):
    """Keeps the line in this process; a launcher is told, to remove it after a kill."""

    interval_s = 0.1

    def __init__(self, out: LineStream, *, has_colour: bool, fd: int = -1) -> None:
        super().__init__(out, has_colour=has_colour, fd=fd)
        self.console = _console(cast(IO[str], _LineStreamFile(out)), has_colour=has_colour)
        self._live: Live | None = None

    def begin(self) -> None:
        from rich.live import Live

        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._live.start()
        if self._channel is not None:
            self._channel.send('{"kind": "drawn"}')
        # A hidden cursor would stay hidden if this process were killed.
        self.console.show_cursor(True)

    def draw(self, status: StatusLine) -> None:
        if self._live is not None and self.out is not None:
            # Asked again each time, because people resize their windows.
            self.console.width = columns_of_terminal(self.out.stream.fileno())
            self._live.update(status.draw(self.console.width), refresh=True)

    def say(self, line: str, level: str) -> None:
        from rich.text import Text

        style = {"warning": "yellow", "error": "bold red"}.get(level, "")
        self.console.print(Text(line, style=style))

    def erase(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def columns_of_terminal(fd: int) -> int:
    """How wide the terminal is at this moment."""
    try:
        return os.get_terminal_size(fd).columns or 80
    except (OSError, ValueError):
        return 80


def _console(file: IO[str], *, has_colour: bool, width: int | None = None) -> Console:
    from rich.console import Console

    return Console(
        file=file,
        force_terminal=True,
        no_color=not has_colour,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
        width=width,
    )


class _LineStreamFile:
    """The stream as a file for `rich`, which would end the process when a terminal goes away."""

    def __init__(self, out: LineStream) -> None:
        self.encoding = out.encoding
        self.fileno = out.stream.fileno
        self.write = out.write_raw

    def flush(self) -> None:
        """Everything is flushed as it is written."""

    def isatty(self) -> bool:
        return True
