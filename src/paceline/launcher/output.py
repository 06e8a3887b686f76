"""The output of many workers on one console: whole lines, each with its rank.

`Lines` cuts a stream into lines without knowing where they go, so a test can feed it bytes and a
clock. Bytes stay bytes: what is no text passes through unchanged. On a terminal the console also
has a `Screen`, whose bottom line says where the run is: `Records` reads that from rank 0.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import BinaryIO, Protocol, TextIO

from paceline.progress.line import Glance
from paceline.progress.painter import terminal_of
from paceline.progress.screen import Screen, can_draw
from paceline.progress.sending import read_record

MAX_LINE_BYTES = 64 * 2**10
TERMINAL_PATIENCE_S = 1.0
LOG_PATIENCE_S = 10.0
_COLOURS = (36, 33, 35, 32, 34, 31)


class Lines:
    """Cuts the bytes of one stream into lines worth showing.

    A progress bar rewrites its line after a carriage return: only what it says last is shown, at
    most once in `patience_s`. A line that is not finished by then is shown as far as it is.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.rest = b""
        self.shown = b""
        self.due_s: float | None = None
        """When to call `overdue`; None while there is nothing to show."""

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        *whole, self.rest = (self.rest + data).split(b"\n")
        lines = [text for text in map(self._finish, whole) if text is not None]
        visible = _last_rewrite(self.rest)
        if b"\r" in self.rest:
            self.rest = b"\r" + visible
        if len(self.rest) > MAX_LINE_BYTES:
            lines.append(visible)
            self.rest = b""
        if not self.rest or visible == self.shown:
            self.due_s = None
        elif self.due_s is None:
            self.due_s = now_s + self.patience_s
        return lines

    def overdue(self, now_s: float) -> list[bytes]:
        """The unfinished line, if it has waited long enough."""
        if self.due_s is None or now_s < self.due_s:
            return []
        visible = _last_rewrite(self.rest)
        if b"\r" in self.rest:
            self.shown = visible
        else:
            self.rest = b""
        self.due_s = None
        return [visible]

    def close(self) -> list[bytes]:
        """What is left at the end of the stream."""
        text, self.rest, self.due_s = self._finish(self.rest), b"", None
        return [text] if text else []

    def _finish(self, line: bytes) -> bytes | None:
        """A whole line as it would look; None if it looks like what was shown before it ended."""
        visible = _last_rewrite(line)
        repeats = bool(self.shown) and visible == self.shown
        self.shown = b""
        return None if repeats else visible


def _last_rewrite(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns in it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Console:
    """Where labelled lines go: two files, or a notebook's `sys.stdout` and `sys.stderr`."""

    def __init__(
        self,
        write_by_stream: Mapping[int, Callable[[bytes], object]],
        colours: Mapping[int, bool],
        screen: Screen | None = None,
        streams_on_screen: frozenset[int] = frozenset(),
    ) -> None:
        self.write_by_stream = write_by_stream
        self.colours = colours
        self.screen = screen
        """The terminal's bottom line, where there is a terminal that can have one."""
        self.streams_on_screen = streams_on_screen
        """Those that lead to the same terminal; whichever a line came from, it is written there."""
        # Terminals ignore a string of this kind, should one ever be shown.
        self.mark = f"\x1b_{secrets.token_hex(8)}\x1b\\"

    def show(self, stream: int, rank: int | None, line: bytes) -> None:
        """Write one line, with its rank unless `rank` is None."""
        self.show_all(stream, [(rank, line)])

    def show_all(self, stream: int, lines: Sequence[tuple[int | None, bytes]]) -> None:
        """Write lines, each with its rank, at once."""
        data = b"".join(self._label(stream, rank) + line + b"\n" for rank, line in lines)
        screen = self.screen if stream in self.streams_on_screen else None
        if screen is not None and screen.is_drawn:
            screen.write_above(data)
        else:
            self.write_by_stream[stream](data)

    def _label(self, stream: int, rank: int | None) -> bytes:
        if rank is None:
            return b""
        label = f"[rank {rank}] ".encode()
        if self.colours[stream]:
            label = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], label)
        return label


def file_console(environ: Mapping[str, str]) -> Console:
    """The launcher's own standard streams, coloured where they are terminals."""
    colours = {fd: wants_colour(os.isatty(fd), environ) for fd in (1, 2)}
    writes = {fd: partial(write_all, fd) for fd in (1, 2)}
    screen = None
    if can_draw(1, environ):
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        screen = Screen(writes[1], fd=1, encoding=encoding, has_colour=colours[1])
    return Console(writes, colours, screen, frozenset(fd for fd in (1, 2) if _are_same(fd, 1)))


def text_console(stdout: TextIO, stderr: TextIO, environ: Mapping[str, str]) -> Console:
    """Python's own streams, which in a notebook are no files."""

    def writer(stream: TextIO) -> Callable[[bytes], object]:
        def write(data: bytes) -> None:
            stream.write(data.decode("utf-8", "replace"))
            stream.flush()

        return write

    writes = {1: writer(stdout), 2: writer(stderr)}
    fds = {1: terminal_of(stdout), 2: terminal_of(stderr)}
    screen = None
    if can_draw(fds[1], environ):
        has_colour = wants_colour(True, environ)
        # The stream itself encodes what it is given.
        screen = Screen(writes[1], fd=fds[1], encoding="utf-8", has_colour=has_colour)
    on_screen = frozenset(number for number in (1, 2) if _are_same(fds[number], fds[1]))
    return Console(writes, {1: False, 2: False}, screen, on_screen)


def _are_same(fd: int, other: int) -> bool:
    """Whether both lead to the same terminal."""
    try:
        if os.path.sameopenfile(fd, other):
            return True
        # /dev/tty is another name for it; these fail for any terminal but the one in control.
        return os.tcgetpgrp(fd) == os.tcgetpgrp(other)
    except OSError:
        return False


def wants_colour(is_terminal: bool, environ: Mapping[str, str]) -> bool:
    return is_terminal and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class Source(Protocol):
    """Something of a worker's that the launcher reads until it ends."""

    fd: int

    @property
    def due_s(self) -> float | None:
        """When `tick` has something to do, if ever."""

    def read(self, now_s: float) -> bool: ...

    def tick(self, now_s: float) -> None: ...

    def close(self) -> None: ...


class Collector:
    """Keeps everything a pipe says."""

    due_s: float | None = None

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.data = bytearray()

    def read(self, now_s: float) -> bool:
        try:
            data = os.read(self.fd, 2**20)
        except BlockingIOError:
            return True
        self.data += data
        return bool(data)

    def tick(self, now_s: float) -> None:
        """Nothing is ever overdue."""

    def close(self) -> None:
        os.close(self.fd)


class Records:
    """What rank 0 says about the bottom line of the screen."""

    due_s: float | None = None

    def __init__(self, fd: int, screen: Screen) -> None:
        self.fd = fd
        self.screen = screen
        self.rest = b""

    def read(self, now_s: float) -> bool:
        """Draw what is new; False at the end of the pipe."""
        try:
            data = os.read(self.fd, 2**16)
        except BlockingIOError:
            return True
        *whole, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > MAX_LINE_BYTES:  # somebody else writes here
            self.rest = b""
        newest: Glance | None = None
        for record in map(read_record, whole):
            if isinstance(record, Glance):
                newest = record
            elif record is not None:
                newest = None
                self.screen.receive(record)
        if newest is not None:
            self.screen.show(newest)
        return bool(data)

    def tick(self, now_s: float) -> None:
        self.screen.refresh()

    def close(self) -> None:
        """Rank 0 is gone, and its line with it."""
        self.screen.clear()
        os.close(self.fd)


def open_records(screen: Screen) -> tuple[Records, int]:
    """A pipe for the screen's bottom line: our end, and rank 0's, which never makes it wait."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    return Records(reader, screen), writer


class Stream:
    """One stream of one worker, from its pipe to the console, a log file, or both."""

    def __init__(
        self,
        fd: int,
        number: int,
        *,
        rank: int | None,
        console: Console | None,
        log: BinaryIO | None = None,
        filters: tuple[bytes, ...] = (),
        filtered: BinaryIO | None = None,
        patience_s: float = LOG_PATIENCE_S,
        mark: str = "",
    ) -> None:
        """Lines that begin with `mark` are shown without the rank: they speak for all."""
        self.mark = mark.encode()
        self.fd = fd
        self.number = number
        self.rank = rank
        self.console = console
        self.log = log
        self.filters = filters
        self.filtered = filtered
        self.lines = Lines(patience_s)

    @property
    def due_s(self) -> float | None:
        return self.lines.due_s

    def read(self, now_s: float) -> bool:
        """Pass on what there is; False at the end of the stream."""
        try:
            data = os.read(self.fd, 2**16)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            return False
        if self.log is not None:
            self.log.write(data)
        self._show(self.lines.feed(data, now_s))
        return True

    def tick(self, now_s: float) -> None:
        self._show(self.lines.overdue(now_s))

    def close(self) -> None:
        self._show(self.lines.close())
        os.close(self.fd)
        if self.log is not None:
            self.log.close()

    def _show(self, lines: list[bytes]) -> None:
        if not lines:
            return
        ranked = [pair for line in lines for pair in self._unmarked(line)]
        if self.console is not None:
            self.console.show_all(self.number, ranked)
        if self.filtered is not None:
            for _, line in ranked:
                if any(word in line for word in self.filters):
                    self.filtered.write(line + b"\n")

    def _unmarked(self, line: bytes) -> list[tuple[int | None, bytes]]:
        """The line with its rank, or without it behind a mark; what had not ended is a line."""
        if not self.mark or self.mark not in line:
            return [(self.rank, line)]
        before, *marked = line.split(self.mark)
        return [*([(self.rank, before)] if before else []), *((None, part) for part in marked)]
