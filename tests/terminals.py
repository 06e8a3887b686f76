"""A terminal for tests: a program behind a pseudo terminal, and what a person would see on it.

`Glass` understands as much of a terminal's language as our own programs speak, and fails at
anything else. `Session` runs a program on one, with the terminal as its controlling one, so that
Ctrl-C is a key.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PATIENCE_S = 50.0
_SEQUENCE = re.compile(r"\x1b(?:\[([0-9;?]*)([A-Za-z])|_[^\x1b]*\x1b\\)")
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Glass:
    """What a terminal shows: its rows from the very first one, as if it were endlessly high."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = [""]
        self.row, self.column = 0, 0
        self.has_cursor = True
        self._rest = ""

    def feed(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                match = _SEQUENCE.match(text, at)
                if match is None:  # the rest of it comes later
                    self._rest = text[at:]
                    assert len(self._rest) < 40, f"no terminal command: {self._rest!r}"
                    return
                self._obey(match[2], match[1] or "")
                at = match.end()
                continue
            self._type(text[at])
            at += 1

    @property
    def lines(self) -> list[str]:
        """The rows, without blanks at their ends and without empty rows below."""
        lines = [row.rstrip() for row in self.rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def bottom(self) -> str:
        """The row with the cursor."""
        return self.rows[self.row].rstrip()

    def resize(self, columns: int) -> None:
        """As most terminals do: break rows that are too long; the cursor stays on its letter."""
        rows, before = self.rows, self.row
        self.rows = []
        for number, row in enumerate(rows):
            if number == before:
                self.row = len(self.rows) + self.column // columns
                self.column %= columns
            cuts = range(0, max(len(row), 1), columns)
            self.rows += [row[start : start + columns] for start in cuts]
        self.columns = columns

    def _type(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self._go_to(self.row + 1)
        elif letter == "\b":
            self.column = max(self.column - 1, 0)
        elif letter != "\x07":
            if self.column >= self.columns:
                self._go_to(self.row + 1)
                self.column = 0
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + letter + row[self.column + 1 :]
            self.column += 1

    def _go_to(self, row: int) -> None:
        self.row = max(row, 0)
        self.rows += [""] * (self.row + 1 - len(self.rows))

    def _obey(self, command: str | None, numbers: str) -> None:
        if command is None or command == "m":
            return
        if command == "K":
            row = self.rows[self.row]
            kept = {"2": "", "": row[: self.column], "0": row[: self.column]}
            self.rows[self.row] = kept[numbers]
        elif command == "J" and numbers in ("", "0"):
            self.rows = [*self.rows[: self.row], self.rows[self.row][: self.column]]
        elif command == "A":
            self._go_to(self.row - int(numbers or 1))
        elif (command, numbers) in {("h", "?25"), ("l", "?25")}:
            self.has_cursor = command == "h"
        else:
            raise AssertionError(f"a terminal command that nobody should send: {numbers}{command}")


class Session:
    """A Python program with a terminal of its own."""

    def __init__(
        self, folder: Path, *arguments: object, columns: int = 100, environ: Mapping[str, str]
    ) -> None:
        self.keyboard, behind = pty.openpty()
        self.glass = Glass(columns)
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.resize(columns)
        inherited = {name: value for name, value in os.environ.items() if name not in _OWN}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *map(str, arguments)],
            cwd=folder,
            env={**inherited, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environ},
            stdin=behind,
            stdout=behind,
            stderr=behind,
            start_new_session=True,
        )
        os.close(behind)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.keyboard)

    def resize(self, columns: int) -> None:
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self.keyboard, termios.TIOCSWINSZ, size)
        self.glass.resize(columns)

    def press(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C once the program sleeps, as it does soon after it has asked something.

        Python loses it between asking and reading, which is too short for a person.
        """
        stat = Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + PATIENCE_S
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "the program does not come to rest"
            time.sleep(0.01)
        self.press("\x03")

    def read(self, wait_s: float = 0.05) -> bool:
        """Show what has come; False once the program has left the terminal."""
        if not select.select([self.keyboard], [], [], wait_s)[0]:
            return True
        try:
            data = os.read(self.keyboard, 2**16)
        except OSError:  # Linux says so when nobody has the other end any more
            return False
        text = self._decoder.decode(data)
        self.raw += text
        self.glass.feed(text)
        return bool(data)

    def until(self, claim: Callable[[Glass], bool], what: str = "it") -> None:
        """Read until what is on the terminal fulfils the claim."""
        deadline = time.monotonic() + PATIENCE_S
        while not claim(self.glass):
            is_there = self.read()
            seen = "\n".join(self.glass.lines[-40:])
            assert time.monotonic() < deadline, f"{what} did not come:\n{seen}"
            assert is_there or claim(self.glass), f"the program ended before {what}:\n{seen}"

    def finish(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read():
            assert time.monotonic() < deadline, "\n".join(self.glass.lines[-40:])
            if self.process.poll() is not None:
                with contextlib.suppress(OSError):
                    while select.select([self.keyboard], [], [], 0)[0] and self.read(0):
                        pass
                break
        return self.process.wait(timeout=PATIENCE_S)


_OWN = {"CI", "NO_COLOR", "PACELINE_PROGRESS", "PACELINE_SCREEN", "COLUMNS", "LINES"}
