"""The output of many workers on one console: whole lines, each with its rank.

    worker --Pipes--> Stream --Lines--> Console, log file

Bytes stay bytes: what is not text passes through unchanged. On a terminal the console also has a
`Screen`, whose bottom line says where the run is: `Records` reads that from rank 0.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import select
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, TextIO

from paceline.files import OutputLog
from paceline.launcher.lines import MAX_LINE_BYTES, Lines
from paceline.launcher.plan import STDERR, STDOUT, Route, WorkerSpec
from paceline.telemetry import (
    RunStatus,
    Screen,
    columns_of,
    has_rich,
    read_record,
    read_terminal,
    screen_environment,
    terminal_of,
    wrapped,
    write_bytes,
)

MAX_WAITING_BYTES = 2**20
LAST_WAIT_S = 10.0
"""How long a launcher that has nothing else to do waits until what it has printed is read."""
TERMINAL_PATIENCE_S = 1.0
LOG_PATIENCE_S = 10.0
_COLOURS = (36, 33, 35, 32, 34, 31)


class PipeWriter(io.RawIOBase):
    """Writes to a pipe or a terminal as much as it has room for, so that a reader who is slow, or
    has paused it with Ctrl-S, does not hold the launcher up."""

    def __init__(self, fd: int) -> None:
        self.fd, self.waiting = fd, bytearray()
        self._opened, self._is_given_up = -1, False
        if os.isatty(fd):  # opened once more, to write without waiting: others share this one
            with suppress(OSError):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self.fd = self._opened = os.open(f"/dev/fd/{fd}", flags)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLOUT)

    def write(self, data: Any, wait_s: float = 0.0) -> int:
        """Write what there is room for; the rest waits. With `wait_s` this is the last call: what
        finds no room for so long is lost, which is an error."""
        self.waiting += b"" if self._is_given_up else data
        # A pipe that has room at all has room for so much.
        while self.waiting and self._poll.poll(1000 * wait_s):
            try:
                del self.waiting[: os.write(self.fd, self.waiting[: select.PIPE_BUF])]
            except BlockingIOError:
                if not wait_s:
                    break
            except OSError:
                self.waiting.clear()  # a terminal that is gone takes nothing any more
                raise
        if self.waiting and wait_s:
            self.waiting.clear()
            self._is_given_up = True
            raise TimeoutError(errno.ETIMEDOUT, f"it was not read for {wait_s:g} s")
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        if self._opened >= 0:
            os.close(self._opened)
            self._opened = -1
        super().close()


@dataclass(eq=False)
class Console:
    """Where labelled lines go: the launcher's standard output and standard error."""

    write_by_stream: Mapping[int, Callable[[bytes], object]]
    pipes: Sequence[PipeWriter] = ()
    """Those of the streams that are pipes or terminals."""
    live: frozenset[int] = frozenset({STDOUT, STDERR})
    """Streams that a person watches; the others are logs."""
    coloured: frozenset[int] = frozenset()
    screen: Screen | None = None
    """The terminal's bottom line, where there is a terminal that can have one."""
    on_screen: frozenset[int] = frozenset()
    """Streams that lead to that terminal; whichever a line came from, it is written there."""
    mark: str = field(default_factory=lambda: f"\x1b_{secrets.token_hex(8)}\x1b\\")
    """Begins a line of the whole run. Terminals ignore it, should it ever be shown."""
    terminal: int = -1
    """The descriptor of standard error's terminal, where there is one."""
    log: OutputLog | None = None
    """Where all that is shown is kept too."""
    is_left: bool = False
    """Whether the reader of a pipe is gone."""
    greeting: RunStatus | None = None
    """What the bottom line says until the first word of a worker."""
    _broken: set[str] = field(default_factory=set)
    """What could not be written to, and was said to be so."""

    @property
    def is_waiting(self) -> bool:
        """Whether a pipe has no room for what was shown."""
        return any(pipe.waiting for pipe in self.pipes)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that workers should, too."""
        return any(len(pipe.waiting) > MAX_WAITING_BYTES for pipe in self.pipes)

    def flush(self, wait_s: float = 0.0) -> None:
        """Write what waits, as far as there is room. With `wait_s` this is the end: who has read
        nothing for so long, as behind Ctrl-S, is not waited for any more."""
        for pipe in self.pipes:
            self.try_to_write(partial(pipe.write, wait_s=wait_s), b"", "the console")

    def greet(self, text: str) -> None:
        """Say at the bottom of the screen why nothing is to be seen yet."""
        if self.screen is not None and self.greeting is None and not self.screen.is_drawn:
            self.greeting = RunStatus(None, ((0, text),))
            self.screen.show(self.greeting)

    def show(self, stream: int, lines: Iterable[tuple[int | None, bytes]]) -> None:
        """Write lines at once, each with its rank unless that is None."""
        lines = list(lines)
        if self.log is not None:
            self.log.add(lines)
        if self.screen is not None and self.screen.shows(self.greeting):
            self.screen.clear()
        data = b"".join(self._label(stream, rank) + line + b"\n" for rank, line in lines)
        write = self.write_by_stream[stream]
        if self.screen is not None and self.screen.is_drawn and stream in self.on_screen:
            write = self.screen.write_above
        self.try_to_write(write, data, "standard output" if stream == STDOUT else "standard error")

    def try_to_write(self, write: Callable[[bytes], object], data: bytes, where: str) -> None:
        """A disk that is full does not end a training: what it does not take is lost, and said."""
        try:
            write(data)
        except BrokenPipeError:
            self.is_left = True
        except OSError as error:
            if where not in self._broken:
                self._broken.add(where)
                reason = error.strerror or error
                self.tell(f"{where} cannot be written: {reason}; what it does not take is lost.")

    def say(self, text: str) -> None:
        """Tell the user something of the launcher's own, on standard error and at once.

        On a terminal sentences are broken between words; the lines of a traceback are not.
        """
        columns = columns_of(self.terminal)
        lines = [
            part
            for line in text.splitlines()
            for part in wrapped(line, 0 if line.startswith(" ") else columns)
        ]
        self.show(STDERR, [(None, line.encode("utf-8", "replace")) for line in lines])

    def tell(self, text: str) -> None:
        """A sentence in the launcher's name."""
        self.say(f"paceline: {text}")

    def _label(self, stream: int, rank: int | None) -> bytes:
        if rank is None:
            return b""
        label = f"[worker {rank}] ".encode()
        if stream in self.coloured:
            label = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], label)
        return label


def open_console(environ: Mapping[str, str]) -> Console:
    """Python's own streams. In a notebook they are not files, and encode what they are given."""
    streams = {STDOUT: sys.stdout, STDERR: sys.stderr}
    writes: dict[int, Callable[[bytes], object]]
    writes = {number: partial(write_bytes, stream) for number, stream in streams.items()}
    pipes: dict[int, PipeWriter] = {}
    for number, stream in streams.items():
        fd, is_pipe = _file_of(stream)
        if is_pipe:
            pipes[number] = PipeWriter(fd)
            writes[number] = pipes[number].write
        elif fd >= 0:
            writes[number] = partial(_write_all, fd)
    terminals = {n: fd for n, stream in streams.items() if (fd := terminal_of(stream)) >= 0}
    for number, fd in terminals.items():
        streams[number].flush()
        same = [pipes[n] for n, other in terminals.items() if n in pipes and _are_same(other, fd)]
        pipes[number] = same[0] if same else PipeWriter(fd)
        writes[number] = pipes[number].write
    notebook = {n for n, stream in streams.items() if not isinstance(stream, io.TextIOWrapper)}
    settings = read_terminal(environ)
    fd, has_colour = terminals.get(STDOUT, -1), settings.has_colour
    screen = None
    # Whether there shall be a bar is for the run to decide; here it is whether there can be one.
    if fd >= 0 and has_rich() and not settings.is_dumb:
        file = io.BufferedWriter(pipes[STDOUT])
        drawn = io.TextIOWrapper(file, sys.stdout.encoding, "backslashreplace")
        screen = Screen(drawn, has_colour=has_colour)
    return Console(
        writes,
        list(dict.fromkeys(pipes.values())),
        live=frozenset(terminals) | notebook,
        coloured=frozenset(terminals) if has_colour else frozenset(),
        screen=screen,
        on_screen=frozenset(n for n, other in terminals.items() if _are_same(other, fd)),
        terminal=terminals.get(STDERR, -1),
    )


def _file_of(stream: TextIO) -> tuple[int, bool]:
    """The descriptor of a stream that is not a terminal, or -1; and whether it is a pipe, which
    may make its writer wait."""
    try:
        mode = os.fstat(fd := stream.fileno()).st_mode
        stream.flush()  # what was printed before comes first
    except (OSError, ValueError, AttributeError):
        return -1, False
    is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    return (fd, is_pipe) if is_pipe or not stream.isatty() else (-1, False)


def _write_all(fd: int, data: bytes) -> None:
    """Past Python's buffer, which would try again at exit what a full disk has refused."""
    while data:
        data = data[os.write(fd, data) :]


def _are_same(fd: int, other: int) -> bool:
    """Whether both lead to the same terminal."""
    try:
        # /dev/tty is another name for it; tcgetpgrp fails for any terminal but the one in control.
        return os.path.sameopenfile(fd, other) or os.tcgetpgrp(fd) == os.tcgetpgrp(other)
    except OSError:
        return False


class Source:
    """Something of a worker's that the launcher reads until it ends."""

    due_s: float | None = None
    """When `tick` has something to do, if ever."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, now_s: float) -> bool:
        """Take what there is; False at the end."""
        try:
            data = os.read(self.fd, 2**16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.take(data, now_s)
        return bool(data)

    def take(self, data: bytes, now_s: float) -> None:
        raise NotImplementedError

    def tick(self, now_s: float) -> None:
        """Do what is due."""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Records(Source):
    """What rank 0 says about the bottom line of the screen."""

    def __init__(self, fd: int, screen: Screen, *, draws: bool) -> None:
        """`draws` is False where rank 0 has the terminal, and draws itself."""
        super().__init__(fd)
        self.screen, self.draws = screen, draws
        self.rest = b""

    def take(self, data: bytes, now_s: float) -> None:
        """Draw what is new."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > MAX_LINE_BYTES:  # not written by a worker of ours
            self.rest = b""
        records = [record for line in whole if (record := read_record(line)) is not None]
        if not records:
            return
        newest = records[-1]  # only that is worth drawing
        if not self.draws:
            self.screen.expect_line_of_worker(isinstance(newest, RunStatus))
        elif isinstance(newest, RunStatus):
            self.screen.show(newest)
        else:
            self.screen.clear()

    def tick(self, now_s: float) -> None:
        self.screen.refresh()

    def close(self) -> None:
        """Rank 0 is gone, and its line with it."""
        self.screen.clear()
        super().close()


class Stream(Source):
    """One stream of one worker, from its pipe to where its route leads."""

    def __init__(
        self,
        fd: int,
        number: int,
        console: Console,
        route: Route = Route(),  # noqa: B008  it is frozen
        *,
        rank: int | None,
        mark: str = "",
    ) -> None:
        """Lines that begin with `mark` are shown without the rank: they speak for all."""
        super().__init__(fd)
        self.number = number
        self.console = console
        self.route = route
        self.rank = rank
        self.mark = mark.encode()
        self.lines = Lines(TERMINAL_PATIENCE_S if number in console.live else LOG_PATIENCE_S)
        self.files = ExitStack()
        self.log = self._open(route.log_file, "wb")
        self.filtered = self._open(route.filtered_file, "ab")
        """Shared with the other workers."""

    def _open(self, path: str, mode: str) -> IO[bytes] | None:
        return self.files.enter_context(open(path, mode, buffering=0)) if path else None

    @property
    def due_s(self) -> float | None:  # type: ignore[override]
        return self.lines.due_s

    def take(self, data: bytes, now_s: float) -> None:
        if self.log is not None:
            self.console.try_to_write(self.log.write, data, self.route.log_file)
        self._show(self.lines.feed(data, now_s))

    def tick(self, now_s: float) -> None:
        self._show(self.lines.overdue(now_s))

    def close(self) -> None:
        self._show(self.lines.close())
        super().close()
        self.files.close()

    def _show(self, lines: list[bytes]) -> None:
        ranked = [pair for line in lines for pair in self._unmarked(line)]
        if ranked and self.route.on_console:
            self.console.show(self.number, ranked)
        if self.filtered is not None:
            for _, line in ranked:
                if any(word in line for word in self.route.words):
                    write, where = self.filtered.write, self.route.filtered_file
                    self.console.try_to_write(write, line + b"\n", where)

    def _unmarked(self, line: bytes) -> list[tuple[int | None, bytes]]:
        """The line with its rank, or without it behind a mark; what had not ended is a line."""
        if not self.mark or self.mark not in line:
            return [(self.rank, line)]
        before, *marked = line.split(self.mark)
        return [*([(self.rank, before)] if before else []), *((None, part) for part in marked)]


class Pipes:
    """Everything between the launcher and one worker: our ends to read from, its ends to pass on.

    A worker that takes the terminal inherits the launcher's streams instead, which are None here.
    """

    def __init__(self, spec: WorkerSpec, console: Console) -> None:
        self.status_fd, self.status_writer = os.pipe()
        self.theirs = [self.status_writer]
        self.sources: list[Source] = []
        self.streams: dict[int, int | None] = {STDOUT: None, STDERR: None}
        self.variables: dict[str, str] = {}
        try:
            if not spec.takes_terminal:
                marks = {STDOUT: console.mark if spec.marks_lines else "", STDERR: ""}
                for number, mark in marks.items():
                    self.streams[number] = self._open(spec, number, console, mark)
            if spec.speaks_for_all:
                self._offer_screen(spec, console, console.mark if spec.marks_lines else "")
        except BaseException:
            self.close()
            raise

    def _open(self, spec: WorkerSpec, number: int, console: Console, mark: str) -> int:
        """The worker's end of one stream."""
        route = spec.routes[number]
        if route.on_console or route.filtered_file:
            reader, writer = os.pipe()
            self.theirs.append(writer)
            try:
                stream = Stream(reader, number, console, route, rank=spec.label, mark=mark)
            except OSError:
                os.close(reader)
                raise
            self.sources.append(stream)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            writer = os.open(route.log_file or os.devnull, flags, 0o600)
            self.theirs.append(writer)
        return writer

    def _offer_screen(self, spec: WorkerSpec, console: Console, mark: str) -> None:
        """Let rank 0 say what the bottom line of the screen should be, if there is one."""
        writer = -1
        if console.screen is not None:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)  # a slow launcher never makes it wait
            self.sources.append(Records(reader, console.screen, draws=not spec.takes_terminal))
            self.theirs.append(writer)
        stdout = self.streams[STDOUT]
        columns = 0 if console.screen is None else console.screen.columns
        fd = STDOUT if stdout is None else stdout
        self.variables = screen_environment(writer, fd, mark, columns)

    @property
    def ours(self) -> list[int]:
        return [self.status_fd, *(source.fd for source in self.sources)]

    def close_theirs(self) -> None:
        """Let go of what the worker has now."""
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        """Give up: there is no worker at the other end."""
        self.close_theirs()
        os.close(self.status_fd)
        for source in self.sources:
            source.close()
