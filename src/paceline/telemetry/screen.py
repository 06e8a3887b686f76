"""The status line at the bottom of a terminal, and other output above it.

    a worker that has the terminal      Progress ──RunStatus──▶ Screen
    a worker behind a launcher          Progress ──RunStatus──▶ ScreenPipe ──▶ the launcher's Screen

`rich` draws the bar; it is imported when a line is drawn.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, cast

from paceline.telemetry import text
from paceline.telemetry.text import Part, ProgressState
from paceline.telemetry.units import printable

if TYPE_CHECKING:
    from rich.console import Console

SCREEN_VARIABLE = "PACELINE_SCREEN"
_BAR_COLUMNS = 30
# Small enough for a record to fit into Linux's PIPE_BUF, up to which a write to a pipe is atomic.
_MOST_PARTS, _MOST_LETTERS = 12, 56
_ERASE = b"\r\x1b[0m\x1b[J"
# Escape sequences that move the cursor, clear or scroll would damage the line; colours may stay.
_MOVES = re.compile(rb"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-ln-~]|[78DMEc])")


@dataclass(frozen=True, slots=True)
class TerminalSettings:
    """The environment's settings for output on a terminal."""

    progress: str = ""
    """How to show a run, from PACELINE_PROGRESS; empty if it is not set."""
    is_ci: bool = False
    is_dumb: bool = False
    """The terminal cannot move its cursor."""
    has_colour: bool = True


def read_terminal(environ: Mapping[str, str] = os.environ) -> TerminalSettings:
    """Read PACELINE_PROGRESS, CI, TERM and NO_COLOR."""
    return TerminalSettings(
        progress=environ.get("PACELINE_PROGRESS", "").strip().lower(),
        is_ci=environ.get("CI", "").lower() not in ("", "0", "false"),
        is_dumb=environ.get("TERM") == "dumb",
        has_colour=not environ.get("NO_COLOR") and environ.get("TERM") != "dumb",
    )


@dataclass(frozen=True, slots=True)
class ScreenOffer:
    """What a launcher offers to rank 0, whose standard output it reads."""

    fd: int
    """Where to send the run's status; -1 if the launcher does not draw."""
    mark: str
    """The prefix of a line on standard output that should be shown without its rank."""
    columns: int
    """How wide the launcher's terminal is; 0 if it has none."""


def screen_environment(fd: int, stdout: int, mark: str, columns: int = 0) -> dict[str, str]:
    """The variable with which rank 0, whose standard output is `stdout`, can `read_screen`."""
    known = [os.fstat(one) for one in (fd, stdout) if one >= 0]
    identity = ",".join(f"{status.st_dev}.{status.st_ino}" for status in known)
    return {SCREEN_VARIABLE: f"{fd}:{identity}:{columns}:{mark}"}


def read_screen(stdout: int, environ: Mapping[str, str] = os.environ) -> ScreenOffer | None:
    """The launcher's offer, if it is meant for this process and its stream `stdout`.

    Processes that a worker starts inherit the variable but not the descriptors it names: the
    numbers mean something else there, or nothing.
    """
    try:
        fd, _, columns, mark = environ.get(SCREEN_VARIABLE, "").split(":", 3)
        offer = screen_environment(int(fd), stdout, mark, int(columns))
    except (OSError, ValueError, OverflowError):
        return None
    is_ours = stdout >= 0 and offer[SCREEN_VARIABLE] == environ[SCREEN_VARIABLE]
    return ScreenOffer(int(fd), mark, int(columns)) if is_ours else None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run is: the share that is done, None where unknown, and the parts of the line."""

    done: float | None
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, state: ProgressState) -> RunStatus:
        parts = text.status(state)[:_MOST_PARTS]
        short = tuple((rank, printable(part)[:_MOST_LETTERS]) for rank, part in parts)
        return cls(min(state.step / state.steps, 1.0) if state.steps else None, short)

    def to_json(self) -> str:
        return json.dumps({"done": self.done, "parts": self.parts}, ensure_ascii=False)


def read_record(line: bytes) -> RunStatus | Literal["end"] | None:
    """One record of rank 0: the run's status, "end" when its line goes, None if malformed."""
    try:
        match json.loads(line):
            case "end":
                return "end"
            case {"done": int() | float() | None as done, "parts": list(parts)}:
                pairs = [(int(rank), str(part)[:_MOST_LETTERS]) for rank, part in parts]
                is_share = done is None or 0 <= done <= 1
                return RunStatus(done, tuple(pairs[:_MOST_PARTS])) if is_share else None
    except (ValueError, TypeError, OverflowError, RecursionError):
        pass
    return None


def terminal_of(stream: TextIO | None) -> int:
    """The descriptor of the terminal that the stream writes to, or -1.

    A notebook's stream reports the descriptor of a terminal that it does not write to.
    """
    fd = descriptor(stream)
    try:
        is_one = stream is not None and stream.isatty() and os.isatty(fd)
        return fd if is_one and os.get_terminal_size(fd) else -1
    except (OSError, ValueError):  # closed, or without a size
        return -1


def columns_of(terminal: int) -> int:
    """How wide the terminal with this descriptor is; 0 where there is none."""
    try:
        return os.get_terminal_size(terminal).columns or 80
    except (OSError, ValueError, OverflowError):
        return 0


def descriptor(stream: TextIO | None) -> int:
    """The stream's descriptor, or -1 where it has none."""
    try:
        return -1 if stream is None else stream.fileno()
    except (OSError, ValueError, AttributeError):
        return -1


def has_rich() -> bool:
    return find_spec("rich") is not None


def write_bytes(stream: TextIO, data: bytes) -> None:
    """Write to one of Python's streams; in a notebook they are not files and accept only text."""
    if isinstance(stream, io.TextIOWrapper):
        stream.flush()  # what the caller has printed before must come first
        stream.buffer.write(data)
    else:
        stream.write(data.decode(_encoding(stream), "replace"))
    stream.flush()


def encode(stream: TextIO, data: str) -> bytes:
    """The text in the stream's encoding; letters that it lacks are escaped."""
    return data.encode(_encoding(stream), "backslashreplace")


def _encoding(stream: TextIO) -> str:
    return getattr(stream, "encoding", None) or "utf-8"


class Screen:
    """At most one line at the bottom of a terminal.

        empty --show--> drawn --show, write_above, refresh--> drawn --clear--> empty

    Invariant: between two calls the cursor stands on the first letter of the drawn line. A terminal
    that becomes narrower may break the line into several; the cursor stays on its first letter, so
    erasing from there on leaves nothing behind. There is no thread and no mode to restore: a killed
    process leaves a line of text behind.
    """

    def __init__(self, stream: TextIO, *, has_colour: bool, redirects_prints: bool = False) -> None:
        """`redirects_prints`: show what this process prints above the line, too."""
        self._stream, self._has_colour = stream, has_colour
        self._redirects_prints = redirects_prints
        self._status: RunStatus | None = None
        self._note = ""
        self._line = b""
        """The line as drawn on the terminal; empty if none is."""
        self._columns = 0
        self._worker_draws = False
        self._replaced: dict[str, tuple[Any, Any]] = {}

    @property
    def is_drawn(self) -> bool:
        return bool(self._line)

    @property
    def columns(self) -> int:
        """How wide the terminal is now."""
        return columns_of(descriptor(self._stream)) or 80

    def shows(self, status: RunStatus | None) -> bool:
        return status is not None and status is self._status

    def show(self, status: RunStatus) -> None:
        self._status = status
        if self._redirects_prints and not self._replaced:
            self._redirect_prints()
        self._draw()

    def expect_line_of_worker(self, is_there: bool) -> None:
        """Whether a worker draws on this terminal itself: if it dies, `clear` removes its line."""
        self._worker_draws = is_there

    def note(self, words: str) -> None:
        """Append `words` to the line from now on."""
        self._note = words
        if self._line:
            self._draw()

    def refresh(self) -> None:
        """Draw again if the terminal's width has changed."""
        if self._line and self.columns != self._columns:
            self._draw()

    def write_above(self, data: bytes) -> None:
        """Write whole lines above the line at the bottom."""
        if self._line:
            # One write: the line at the bottom must not flicker.
            data = _ERASE + _MOVES.sub(b"", data) + self._line
        write_bytes(self._stream, data)

    def clear(self) -> None:
        """Remove the line, also one left behind by a worker that has died."""
        if self._line or self._worker_draws:
            self._put(_ERASE)
        self._status, self._line, self._worker_draws = None, b"", False
        for name, (proxy, stream) in self._replaced.items():
            if getattr(sys, name) is proxy:
                proxy.flush()
                setattr(sys, name, stream)
        self._replaced = {}

    def _redirect_prints(self) -> None:
        from rich.file_proxy import FileProxy

        console = self._console(cast(IO[str], _AboveLine(self, self._stream)))
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if terminal_of(stream) >= 0:
                proxy = FileProxy(console, stream)
                self._replaced[name] = proxy, stream
                setattr(sys, name, proxy)

    def _draw(self) -> None:
        from rich.cells import cell_len
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        if self._status is None:
            return
        self._columns = self.columns
        # A letter in the last column makes some terminals wrap.
        room = max(self._columns - 1, 1)
        canvas = io.TextIOWrapper(
            drawn := io.BytesIO(), _encoding(self._stream), "backslashreplace"
        )
        console, cells = self._console(canvas, room), []
        if (done := self._status.done) is not None:
            bar, percent = min(_BAR_COLUMNS, max(room // 8, 6)), f" {done:4.0%}{text.GAP}"
            cells = [ProgressBar(1.0, done, width=bar), Text(percent, style="cyan")]
            room -= bar + len(percent)
        parts = (*self._status.parts, *([(-1, self._note)] if self._note else []))
        cells.append(Text(printable(text.fit(parts, room, cell_len))))
        console.print(*cells, sep="", end="", no_wrap=True, crop=True, soft_wrap=False)
        self._line = drawn.getvalue() + b"\r"
        self._put(_ERASE + self._line)

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that fails is no reason to stop
            write_bytes(self._stream, data)

    def _console(self, file: IO[str], width: int | None = None) -> Console:
        from rich.console import Console

        return Console(
            file=file,
            force_terminal=True,
            no_color=not self._has_colour,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
            width=width,
        )


class _AboveLine:
    """A file for `rich` that writes above the line; a terminal that is gone is not an error."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self._screen, self._stream = screen, stream
        self.encoding = _encoding(stream)

    def write(self, data: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._screen.write_above(encode(self._stream, data))

    def flush(self) -> None:
        """Everything is flushed as it is written."""


class ScreenPipe:
    """Sends rank 0's status to the launcher's screen. Sending never blocks and never raises."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        # Processes that the user's script starts must not write here.
        os.set_inheritable(fd, False)

    def show(self, status: RunStatus) -> None:
        self.send(status.to_json())

    def clear(self) -> None:
        self.send('"end"')

    def send(self, record: str) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, or the launcher is gone
            # A script that closes descriptors it does not know may have a file of its own at this
            # number now.
            if os.fstat(self._fd).st_ino == self._inode:
                os.write(self._fd, f"{record}\n".encode())
