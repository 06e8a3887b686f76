"""Output of many workers: whole lines, each with its rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sentences import says

from paceline.launcher.lines import MAX_LINE_BYTES, Lines
from paceline.launcher.output import Console, PipeWriter, Stream
from paceline.launcher.plan import Route


def test_lines_come_out_whole_however_the_bytes_arrive() -> None:
    lines = Lines(1.0)
    assert lines.feed(b"one\ntw", 0.0) == [b"one"]
    assert lines.feed(b"o\n\nthree\r\n", 0.0) == [b"two", b"", b"three"]
    assert lines.close() == []


def test_the_last_line_needs_no_newline() -> None:
    lines = Lines(1.0)
    lines.feed(b"end", 0.0)
    assert lines.close() == [b"end"]


def test_a_progress_bar_shows_its_last_state_once_per_interval() -> None:
    lines = Lines(1.0)
    assert lines.feed(b"\r10%", 0.0) == []
    assert lines.feed(b"\r20%\r30%", 0.5) == []
    assert lines.due_s == 1.0
    assert lines.overdue(0.9) == []
    assert lines.overdue(1.0) == [b"30%"]
    assert lines.overdue(9.0) == []
    assert lines.feed(b"\r100%\n", 2.0) == [b"100%"]


def test_a_progress_bar_that_ends_as_it_was_shown_is_not_shown_twice() -> None:
    lines = Lines(1.0)
    lines.feed(b"\r100%", 0.0)
    assert lines.overdue(1.0) == [b"100%"]
    assert lines.feed(b"\nnext\n", 1.5) == [b"next"]


def test_an_unfinished_line_is_shown_after_a_while_and_continued_on_the_next() -> None:
    lines = Lines(1.0)
    lines.feed(b"loading...", 0.0)
    assert lines.overdue(1.0) == [b"loading..."]
    assert lines.due_s is None
    assert lines.feed(b" done\n", 5.0) == [b" done"]


def test_binary_garbage_and_endless_lines_pass_in_bounded_memory() -> None:
    lines = Lines(1.0)
    garbage = bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"")
    assert lines.feed(garbage + b"\n", 0.0) == [garbage]
    shown = [line for _ in range(10) for line in lines.feed(b"x" * MAX_LINE_BYTES, 0.0)]
    assert len(b"".join(shown) + lines.rest) == 10 * MAX_LINE_BYTES
    assert len(lines.rest) <= MAX_LINE_BYTES


def test_labels_carry_the_rank_and_colour_only_the_label() -> None:
    written: list[bytes] = []
    writes = {1: written.append, 2: written.append}
    console = Console(writes, coloured=frozenset({2}))
    console.show(1, [(3, b"text"), (None, b"bare")])
    console.show(2, [(3, b"text")])
    assert written[0] == b"[worker 3] text\nbare\n"
    assert written[1].startswith(b"\x1b[")
    assert written[1].endswith(b"[worker 3] \x1b[0mtext\n")


@pytest.mark.parametrize("refused", ["log_file", "filtered_file"])
def test_a_full_disk_under_a_log_file_ends_nobody_and_is_said_once(refused: str) -> None:
    written: list[bytes] = []
    console = Console({1: written.append, 2: written.append})
    reader, writer = os.pipe()
    route = Route(words=(b"o",), **{refused: "/dev/full"})
    stream = Stream(reader, 1, console, route, rank=0)
    for text in (b"one\n", b"two\n"):
        os.write(writer, text)
        assert stream.read(0.0)
    os.close(writer)
    stream.close()
    said = [line for line in written if b"/dev/full cannot be written" in line]
    assert len(said) == 1
    assert [line for line in written if line not in said] == [
        b"[worker 0] one\n",
        b"[worker 0] two\n",
    ]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_under_the_output_of_a_run_ends_nobody(stream: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint('a')\nprint('b', file=sys.stderr)\n")
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "script.py"]
    streams: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, cwd=tmp_path, **{**streams, stream: full})  # type: ignore[call-overload]
    assert ended.returncode == 0
    other = ended.stdout if stream == "stderr" else ended.stderr
    assert other.count(b"] a" if stream == "stderr" else b"] b") == 2
    if stream == "stdout":
        assert other.count(b"standard output cannot be written: No space left on device") == 1


def test_a_pipe_that_nobody_reads_is_not_waited_for_in_the_end_and_that_is_said() -> None:
    (reader, writer), (heard, speaks) = os.pipe(), os.pipe()
    pipes = [PipeWriter(writer), PipeWriter(speaks)]
    kept: list[tuple[int | None, bytes]] = []
    console = Console({1: pipes[0].write, 2: pipes[1].write}, pipes)
    console.log = SimpleNamespace(add=kept.extend)  # type: ignore[assignment]
    console.show(1, [(0, b"x" * 2**17), (0, b"last")])
    assert console.is_waiting
    console.flush(0.01)
    assert not console.is_waiting
    console.show(1, [(0, b"after it")])
    assert not console.is_waiting
    said = os.read(heard, 2**16).decode()
    assert (said.count("\n"), says(said, "0.01 s")) == (1, True)
    assert kept[1:] == [(0, b"last"), (None, said.strip().encode()), (0, b"after it")]
    for fd in (reader, writer, heard, speaks):
        os.close(fd)
