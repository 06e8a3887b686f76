"""The bar on a real terminal: a pseudo one whose other end the test reads."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator

import pytest

from paceline.telemetry import Progress

pytest.importorskip("rich")


class Terminal:
    """A terminal of so many columns."""

    def __init__(self, columns: int, encoding: str) -> None:
        self.screen, behind = pty.openpty()
        os.set_blocking(self.screen, False)
        self.stream = open(behind, "w", encoding=encoding)  # noqa: SIM115
        self.resize(columns)
        self.now_s = 0.0
        self.text = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> str:
        """What was written since the last time."""
        new = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                new += os.read(self.screen, 2**16)
        self.text += new.decode(self.stream.encoding)
        return new.decode(self.stream.encoding)

    def progress(self, **environ: str) -> Progress:
        def clock() -> float:
            return self.now_s

        return Progress(stream=self.stream, clock=clock, environ={"TERM": "xterm", **environ})

    def close(self) -> None:
        self.stream.close()
        os.close(self.screen)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    found = Terminal(100, "utf-8")
    yield found
    found.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_a_terminal_gets_one_line_that_is_redrawn_and_then_the_summary(terminal: Terminal) -> None:
    with terminal.progress() as progress:
        assert progress.mode == "bar"
        progress.start(name="digits", epochs=1, steps=100)
        for step in range(100):
            terminal.now_s += 0.05
            progress.step(step + 1, epoch=0, samples=8, metrics={"loss": 0.5, "accuracy": 0.9})
        drawn = terminal.read()
        progress.epoch(0, {"loss": 0.5})
    lines = plain(drawn).split("\r")
    assert "\n" not in drawn.partition("100 steps")[2].lstrip("\r\n")
    assert 40 <= len(lines) <= 60, "at most five a second, each erased and drawn, for five seconds"
    lines = [line for line in lines if line]
    assert "97%" in lines[-1]
    assert "loss 0.5000  accuracy 90.0%  160 samples/s" in lines[-1]
    assert re.search(r"\d+ ms left", lines[-1])
    assert "digits finished on 1 worker: 100 steps" in terminal.read()


def test_the_cursor_is_never_hidden(terminal: Terminal) -> None:
    with terminal.progress() as progress:
        progress.start(steps=3)
        progress.step(1, epoch=0, samples=1)
    assert "?25" not in terminal.read(), "somebody may kill the process at any time"


def test_after_an_exception_the_streams_are_back_and_the_line_is_gone(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    out, err = sys.stdout, sys.stderr
    progress = terminal.progress()
    progress.start(name="digits", steps=3)
    assert sys.stdout is not out
    with pytest.raises(ZeroDivisionError), progress:
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == (out, err)
    assert "digits failed" in terminal.read()


def test_a_bar_that_is_dropped_lets_go_of_the_streams(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    out = sys.stdout
    progress = terminal.progress()
    progress.start(steps=3)
    del progress
    assert sys.stdout is out
    assert terminal.read().endswith("\x1b[J")


def test_a_forked_copy_of_the_process_leaves_the_terminal_alone(terminal: Terminal) -> None:
    progress = terminal.progress()
    progress.start(steps=3)
    terminal.read()
    if (child := os.fork()) == 0:
        progress.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert terminal.read() == ""
    progress.close()


def test_what_the_program_prints_appears_above_the_bar(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    with terminal.progress() as progress:
        progress.start(steps=3)
        terminal.read()
        print("hello from the loop")
        progress.message("careful", "warning")
        shown = plain(terminal.read())
    assert "hello from the loop\r\n" in shown
    assert "warning: careful\r\n" in shown


def test_a_resized_terminal_gets_lines_that_fit(terminal: Terminal) -> None:
    with terminal.progress() as progress:
        progress.start(epochs=1, steps=100)
        for step, columns in enumerate((100, 60, 30, 12, 3, 200)):
            terminal.resize(columns)
            terminal.read()
            terminal.now_s += 1.0
            progress.step(step + 1, epoch=0, samples=8, metrics={"loss": 0.5})
            last = plain(terminal.read()).strip("\r\n").split("\r")[-1]
            assert len(last) <= columns


def test_no_colour_and_no_letters_beyond_ascii_where_they_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal(100, "ascii")
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    with terminal.progress(NO_COLOR="1") as progress:
        progress.start(name="é", epochs=1, steps=100)
        terminal.now_s += 1.0
        progress.step(50, epoch=0, samples=8, metrics={"loss": 0.5})
        print("user's own ü")
    shown = terminal.read()
    assert set(re.findall(r"\x1b\[[0-9;]*m", shown)) == {"\x1b[0m"}
    assert "---" in shown
    assert "user's own \\xfc" in shown
    terminal.close()


def test_a_run_without_an_end_shows_how_far_it_is(terminal: Terminal) -> None:
    with terminal.progress() as progress:
        progress.start()
        terminal.now_s += 1.0
        progress.step(1_234, epoch=0, samples=8)
        assert "step 1234" in plain(terminal.read())


def test_a_terminal_that_goes_away_does_not_stop_the_training() -> None:
    terminal = Terminal(80, "utf-8")
    with terminal.progress() as progress:
        progress.start(steps=100)
        os.close(terminal.screen)
        for step in range(20):
            terminal.now_s += 1.0
            progress.step(step + 1, epoch=0, samples=8)
        progress.message("still here")
    with contextlib.suppress(OSError):
        terminal.stream.close()


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"CI": "1"}, {"PACELINE_PROGRESS": "plain"}])
def test_a_terminal_that_cannot_or_should_not_gets_plain_lines(
    terminal: Terminal, environ: dict[str, str]
) -> None:
    with terminal.progress(**environ) as progress:
        assert progress.mode == "plain"
        progress.start(steps=3)
        progress.step(1, epoch=0, samples=1)
    assert "\x1b" not in terminal.read()
