"""A run behind a launcher: rank 0 tells, the launcher draws, and lines go above what it draws."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.launcher.output import Console, Records, Stream
from paceline.telemetry import Progress, text
from paceline.telemetry.screen import (
    SCREEN_VARIABLE,
    RunStatus,
    Screen,
    read_record,
    read_screen,
    screen_environment,
    write_bytes,
)
from paceline.telemetry.text import ProgressState
from tests.terminals import Glass

pytest.importorskip("rich")

HALF = RunStatus(0.5, ((2, "epoch 1/2"), (5, "step 50/100"), (0, "loss 0.5000")))


class Desk(io.TextIOWrapper):
    """A terminal of so many columns with a screen on it, and a glass to look at it through."""

    def __init__(
        self, columns: int = 100, encoding: str = "utf-8", has_colour: bool = True
    ) -> None:
        self.keyboard, self.fd = pty.openpty()
        self.glass = Glass(columns)
        self.written: list[bytes] = []
        super().__init__(Keeper(self), encoding=encoding)
        self.resize(columns)
        self.screen = Screen(self, has_colour=has_colour)

    def fileno(self) -> int:
        return self.fd

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.glass.resize(columns)

    def console(self) -> Console:
        write = partial(write_bytes, self)
        on_screen = frozenset({1, 2})
        return Console(
            {1: write, 2: write}, screen=self.screen, on_screen=on_screen, terminal=self.fd
        )

    def close(self) -> None:
        super().close()
        os.close(self.keyboard)
        os.close(self.fd)


class Keeper(io.BytesIO):
    def __init__(self, desk: Desk) -> None:
        super().__init__()
        self.desk = desk

    def write(self, data: Any) -> int:
        self.desk.written.append(data)
        self.desk.glass.feed(bytes(data).decode(self.desk.encoding).replace("\n", "\r\n"))
        return len(data)


@pytest.fixture
def desk() -> Iterator[Desk]:
    found = Desk()
    yield found
    found.close()


def test_what_the_launcher_says_stands_above_the_line_and_breaks_between_words(desk: Desk) -> None:
    desk.resize(60)
    desk.screen.show(HALF)
    console = desk.console()
    console.tell("worker 1 was killed by signal 9 in step 40, and 2 others continue.")
    console.say("paceline: rank 1 failed:\n  File \"train.py\", line 3\nKeyError: 'lost'\n")
    assert desk.glass.lines[:-1] == [
        "paceline: worker 1 was killed by signal 9 in step 40, and 2",
        "  others continue.",
        "paceline: rank 1 failed:",
        '  File "train.py", line 3',
        "KeyError: 'lost'",
    ]
    assert "50%" in desk.glass.bottom


def test_a_run_on_a_narrow_terminal_breaks_no_word_and_no_row_of_its_table() -> None:
    state = ProgressState(name="digits", workers=3, samples=8000, step=668, now_s=33.0)
    for epoch in range(2):
        names = ("loss", "accuracy", "eval loss", "eval accuracy")
        state.add_row(epoch, dict.fromkeys(names, 0.5), 17.5, 4000)
    lines = text.summary(state, "finished", ["To see more: paceline report runs/digits"], 60)
    assert max(map(len, lines)) <= 60
    assert [line.split()[0] for line in lines if "50.0%" in line] == ["1", "2"]


class Worker:
    """Rank 0's end: its standard output and the pipe of its records, neither of which it waits
    for."""

    def __init__(self) -> None:
        self.reader, stdout = os.pipe()
        self.records, self.writer = os.pipe()
        for fd in (self.reader, self.records, self.writer):
            os.set_blocking(fd, False)
        self.stdout = open(stdout, "w")  # noqa: SIM115
        self.now_s = 0.0
        self.environ = screen_environment(self.writer, stdout, "<mark>")

    def progress(self, mode: str = "auto", **environ: str) -> Progress:
        known = {"TERM": "xterm", **self.environ, **environ}
        return Progress(mode, stream=self.stdout, clock=lambda: self.now_s, environ=known)

    def said(self) -> str:
        return _all_of(self.reader).decode()

    def sent(self) -> list[RunStatus | str | None]:
        return [read_record(line) for line in _all_of(self.records).splitlines()]

    def close(self) -> None:
        self.stdout.close()
        for fd in (self.reader, self.records, self.writer):
            os.close(fd)


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker()
    yield found
    found.close()


def _all_of(fd: int) -> bytes:
    data = b""
    try:
        while new := os.read(fd, 2**16):
            data += new
    except BlockingIOError:
        pass
    return data


def test_the_line_is_drawn_in_place_and_cleared_without_a_trace(desk: Desk) -> None:
    desk.screen.show(RunStatus(0.0, ()))
    desk.screen.show(HALF)
    assert desk.glass.lines == [desk.glass.bottom]
    assert re.fullmatch("━+[╺╸]?━+ +50%  epoch 1/2  step 50/100  loss 0.5000", desk.glass.bottom), (
        desk.glass.bottom
    )
    desk.screen.clear()
    assert desk.glass.lines == []
    assert desk.glass.column == 0
    desk.screen.clear()
    assert b"?25" not in b"".join(desk.written), "the cursor is never hidden"


def test_what_is_written_above_the_line_is_whole_and_in_order(desk: Desk) -> None:
    console = desk.console()
    console.show(1, [(0, b"before")])
    desk.screen.show(HALF)
    for number in range(100):
        console.show(1 + number % 2, [(number % 3, b"line %d" % number)])
    *above, line = desk.glass.lines
    assert above == ["[worker 0] before", *(f"[worker {n % 3}] line {n}" for n in range(100))]
    assert line.endswith("loss 0.5000")
    desk.screen.clear()
    console.show(1, [(0, b"after")])
    assert desk.glass.lines == [*above, "[worker 0] after"]


def test_lines_longer_than_the_terminal_wrap_above_the_line(desk: Desk) -> None:
    desk.screen.show(HALF)
    desk.console().show(1, [(None, b"x" * 250)])
    assert [len(row) for row in desk.glass.lines[:-1]] == [100, 100, 50]
    assert desk.glass.bottom.endswith("loss 0.5000")


def test_a_flood_costs_one_write_for_all_that_comes_at_once(desk: Desk) -> None:
    reader, writer = os.pipe()
    stream = Stream(reader, 1, desk.console(), rank=1)
    desk.screen.show(HALF)
    desk.written.clear()
    os.write(writer, b"".join(b"%d\n" % number for number in range(5_000)))
    os.close(writer)
    assert stream.read(0.0)
    assert len(desk.written) == 1
    assert desk.glass.lines[:-1] == [f"[worker 1] {number}" for number in range(5_000)]
    stream.close()


def test_output_that_would_move_the_cursor_moves_nothing_while_there_is_a_line(desk: Desk) -> None:
    console = desk.console()
    console.show(1, [(None, b"first")])
    desk.screen.show(HALF)
    console.show(1, [(None, b"\x1b[1A\x1b[2Ksecond \x1b[31mred\x1b[0m\x1b[K\x1b[?25l\x1b[H")])
    assert desk.glass.lines[:-1] == ["first", "second red"]
    assert b"\x1b[31mred" in desk.written[-1], "colours stay"
    assert desk.glass.has_cursor


def test_a_colour_that_is_left_on_does_not_reach_the_line(desk: Desk) -> None:
    desk.screen.show(HALF)
    desk.console().show(1, [(None, b"\x1b[31mred for ever")])
    desk.screen.show(HALF)
    assert desk.written[-1].startswith(b"\r\x1b[0m")


def test_a_stream_that_is_not_on_the_screen_is_left_alone(desk: Desk) -> None:
    other: list[bytes] = []
    writes = {1: partial(write_bytes, desk), 2: other.append}
    console = Console(writes, screen=desk.screen, on_screen=frozenset({1}))
    desk.screen.show(HALF)
    before = list(desk.written)
    console.show(2, [(0, b"\x1b[2Kto a file")])
    assert other == [b"[worker 0] \x1b[2Kto a file\n"]
    assert desk.written == before


@pytest.mark.parametrize("columns", [200, 60, 30, 12, 3, 1])
def test_the_line_fits_into_any_width_as_soon_as_somebody_looks(desk: Desk, columns: int) -> None:
    desk.screen.show(HALF)
    desk.screen.clear()
    desk.screen.show(HALF)
    desk.resize(columns)
    desk.screen.refresh()
    assert len(desk.glass.bottom) <= max(columns - 1, 1)
    drawn = len(desk.written)
    desk.screen.refresh()
    assert len(desk.written) == drawn, "nothing has changed"


def test_a_note_is_said_at_once_and_is_the_last_to_give_way(desk: Desk) -> None:
    desk.screen.note("stopping")
    assert desk.written == [], "there is no line yet"
    desk.screen.show(HALF)
    assert desk.glass.bottom.endswith("loss 0.5000  stopping")
    desk.resize(30)
    desk.screen.refresh()
    assert desk.glass.bottom.endswith("stopping")


def test_a_line_that_a_killed_process_has_drawn_itself_is_removed(desk: Desk) -> None:
    desk.screen.expect_line_of_worker(True)
    write_bytes(desk, b"50% of somebody")
    desk.screen.clear()
    assert desk.glass.lines == []


def test_a_line_that_a_process_has_removed_itself_is_not_removed_again(desk: Desk) -> None:
    desk.screen.expect_line_of_worker(True)
    desk.screen.expect_line_of_worker(False)
    write_bytes(desk, b"a prompt> ")
    desk.screen.clear()
    assert desk.glass.bottom == "a prompt>"


def test_letters_and_colours_that_the_terminal_does_not_have_are_not_sent() -> None:
    desk = Desk(encoding="ascii", has_colour=False)
    desk.screen.show(RunStatus(0.5, ((0, "loss é 0.5"),)))
    assert "---" in desk.glass.bottom
    assert desk.glass.bottom.endswith(r"loss \xe9 0.5")
    assert set(re.findall(rb"\x1b\[[0-9;]*m", desk.written[-1])) == {b"\x1b[0m"}
    desk.close()


def test_a_terminal_that_is_gone_is_no_error() -> None:
    desk = Desk()
    desk.close()
    screen = Screen(desk, has_colour=True)
    screen.show(HALF)
    screen.note("stopping")
    screen.clear()


@pytest.mark.parametrize("columns", [99, 50, 20, 7])
def test_a_terminal_that_breaks_the_line_when_it_narrows_keeps_nothing_of_it(
    desk: Desk, columns: int
) -> None:
    console = desk.console()
    console.show(1, [(None, b"above")])
    desk.screen.show(HALF)
    desk.resize(columns)
    desk.screen.show(HALF)
    assert desk.glass.lines == ["above", desk.glass.bottom]
    console.show(1, [(None, b"more")])
    desk.screen.clear()
    assert desk.glass.lines == ["above", "more"]


def test_behind_a_launcher_a_run_writes_what_stays_and_sends_what_does_not(worker: Worker) -> None:
    with worker.progress() as progress:
        assert progress.mode == "bar"
        progress.start(name="digits", epochs=1, steps=100)
        for step in range(100):
            worker.now_s += 0.05
            progress.step(step + 1, epoch=0, samples=8, metrics={"loss": 0.5, "accuracy": 0.9})
        print("hello", file=worker.stdout, flush=True)
        progress.message("careful", "warning")
        progress.epoch(0, {"loss": 0.5})
    said = worker.said().splitlines()
    assert said[:3] == [
        "<mark>digits: 1 worker, 1 epoch, 100 steps",
        "hello",
        "<mark>\x1b[33mwarning: careful\x1b[0m",
    ]
    assert said[3].startswith("<mark>digits finished on 1 worker: 100 steps, 800 samples (160/s)")
    assert all(line.startswith("<mark>") for line in said[3:])
    sent = worker.sent()
    assert sent[-1] == "end"
    glances = [record for record in sent if isinstance(record, RunStatus)]
    assert len(glances) == len(sent) - 1
    assert 20 <= len(glances) <= 28, "a few a second, for five seconds"
    assert glances[0].done == 0
    assert 0.9 < (glances[-1].done or 0) <= 1
    words = [text for _, text in glances[-1].parts]
    assert words[2:5] == ["loss 0.5000", "accuracy 90.0%", "160 samples/s"]


def test_a_launcher_that_does_not_read_never_makes_the_run_wait(worker: Worker) -> None:
    progress = worker.progress()
    progress.start(steps=100_000)
    for step in range(2_000):
        worker.now_s += 1.0
        progress.step(step, epoch=0, samples=1, metrics={"loss": 0.5})
    worker.sent()
    worker.now_s += 1.0
    progress.step(6_000, epoch=0, samples=1)
    (newest,) = worker.sent()
    assert isinstance(newest, RunStatus)
    assert newest.done == 0.06
    progress.close()
    assert worker.sent() == ["end"]


def test_a_launcher_that_has_gone_is_no_error(worker: Worker) -> None:
    progress = worker.progress()
    progress.start(steps=3)
    os.close(worker.records)
    worker.now_s += 1.0
    progress.step(1, epoch=0, samples=1)
    progress.finish()
    worker.records = os.open(os.devnull, os.O_RDONLY)


def test_a_file_that_takes_the_place_of_a_closed_pipe_gets_nothing(
    worker: Worker, tmp_path: Path
) -> None:
    progress = worker.progress()
    progress.start(steps=3)
    with open(tmp_path / "weights", "wb") as mine:
        os.dup2(mine.fileno(), worker.writer)
    worker.now_s += 1.0
    progress.step(1, epoch=0, samples=1)
    progress.finish()
    assert (tmp_path / "weights").read_bytes() == b""


def test_a_stream_that_keeps_a_log_gets_no_marks(worker: Worker) -> None:
    class Log:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def __getattr__(self, name: str) -> Any:
            return getattr(worker.stdout, name)

    log = Log()
    with Progress(stream=log, environ={"TERM": "xterm", **worker.environ}) as progress:  # type: ignore[arg-type]
        assert progress.mode == "bar"
        progress.start(name="toy", steps=3)
        progress.message("careful", "warning")
    assert log.text.startswith("toy: 1 worker, 3 steps\nwarning: careful\ntoy finished")
    assert worker.sent()[-1] == "end"


def test_names_of_any_letters_and_length_fit_into_a_record(worker: Worker) -> None:
    progress = worker.progress()
    progress.start(steps=3)
    worker.now_s += 1.0
    worker.sent()
    progress.step(1, epoch=0, samples=1, metrics={f"\ud800\x01é{n}" * 500: 0.5 for n in range(500)})
    (record,) = worker.sent()
    assert isinstance(record, RunStatus)
    assert record.done == pytest.approx(1 / 3)
    progress.close()


@pytest.mark.parametrize(
    ("mode", "environ"),
    [
        ("plain", {}),
        ("quiet", {}),
        ("json", {}),
        ("auto", {"CI": "true"}),
        ("auto", {"TERM": "dumb"}),
        ("auto", {"PACELINE_PROGRESS": "plain"}),
    ],
)
def test_a_run_that_shall_not_draw_sends_nothing(
    worker: Worker, mode: str, environ: dict[str, str]
) -> None:
    with worker.progress(mode, **environ) as progress:
        progress.start(steps=3)
        worker.now_s += 1.0
        progress.step(1, epoch=0, samples=1)
    assert worker.sent() == []
    said = worker.said()
    assert all(line.startswith("<mark>") for line in said.splitlines()), "it speaks for all"
    assert ('<mark>{"kind": ' in said) == (mode == "json")


def test_a_bar_in_ci_is_for_a_run_that_asks_for_it(worker: Worker) -> None:
    assert worker.progress("bar", CI="true").mode == "bar"


def test_an_offer_counts_only_for_the_process_and_the_stream_it_was_made_to(
    worker: Worker, tmp_path: Path
) -> None:
    stdout = worker.stdout.fileno()
    offer = read_screen(stdout, worker.environ)
    assert offer is not None
    assert (offer.fd, offer.mark) == (worker.writer, "<mark>")
    with open(tmp_path / "log", "w") as log:
        assert read_screen(log.fileno(), worker.environ) is None, "another stream"
    assert read_screen(-1, worker.environ) is None
    text = worker.environ[SCREEN_VARIABLE]
    elsewhere = text.replace(f"{worker.writer}:", f"{worker.records}:", 1)
    assert read_screen(stdout, {SCREEN_VARIABLE: elsewhere}) is not None, "the same pipe"
    elsewhere = text.replace(f"{worker.writer}:", f"{worker.reader}:", 1)
    assert read_screen(stdout, {SCREEN_VARIABLE: elsewhere}) is None, "another descriptor"
    elsewhere = text.replace(f"{worker.writer}:", "987654:", 1)
    assert read_screen(stdout, {SCREEN_VARIABLE: elsewhere}) is None, "a closed one"
    for wrong in ("", "7", "a:b:c:d", "1:2:3", "99999999999999999999:1:1:x"):
        assert read_screen(stdout, {SCREEN_VARIABLE: wrong}) is None


def test_a_launcher_that_does_not_draw_still_offers_its_mark(worker: Worker) -> None:
    stdout = worker.stdout.fileno()
    worker.environ = screen_environment(-1, stdout, "<mark>")
    assert worker.progress().mode == "plain"
    assert worker.progress("bar").mode == "plain"
    with worker.progress("json") as progress:
        progress.start(steps=1)
    assert worker.said().startswith('<mark>{"kind": "start"')


def test_marked_lines_lose_their_rank_and_end_what_was_not_ended(desk: Desk) -> None:
    reader, writer = os.pipe()
    stream = Stream(reader, 1, desk.console(), rank=0, mark="<mark>")
    os.write(writer, b"one\nhalf<mark>of the run\n<mark>\nthree\n")
    stream.read(0.0)
    assert desk.glass.lines == [
        "[worker 0] one",
        "[worker 0] half",
        "of the run",
        "",
        "[worker 0] three",
    ]
    os.close(writer)
    stream.close()


def test_records_are_drawn_as_they_come_and_the_end_of_rank_0_removes_the_line(desk: Desk) -> None:
    reader, writer = os.pipe()
    records = Records(reader, desk.screen, draws=True)
    os.write(writer, HALF.to_json().encode()[:20])
    records.read(0.0)
    assert desk.glass.lines == []
    os.write(writer, HALF.to_json().encode()[20:] + b"\n" + RunStatus(0.6, ()).to_json().encode())
    os.write(writer, b"\n")
    records.read(0.0)
    assert "60%" in desk.glass.bottom
    assert len(desk.written) == 1, "only the newest is worth drawing"
    os.close(writer)
    assert not records.read(0.0)
    records.close()
    assert desk.glass.lines == []


@given(st.binary(max_size=200))
def test_no_record_breaks_the_launcher(data: bytes) -> None:
    desk = Desk()
    reader, writer = os.pipe()
    records = Records(reader, desk.screen, draws=True)
    os.write(writer, data + b"\n")
    records.read(0.0)
    os.close(writer)
    records.close()
    desk.close()


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"null",
        b"[]",
        b'{"kind": []}',
        b'{"done": -1, "parts": []}',
        b'{"done": NaN, "parts": []}',
        b'{"done": 1e400, "parts": []}',
        b'{"done": "3", "parts": []}',
        b'{"done": 0.5, "parts": {}}',
        b'{"done": 0.5, "parts": [[1]]}',
        b'{"done": 0.5, "parts": [["a", 1]]}',
        b'{"done": 9' + b"9" * 400 + b', "parts": []}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_record_is_nothing(record: bytes) -> None:
    assert read_record(record) is None


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.none() | st.floats(0, 1),
    st.lists(st.tuples(st.integers(-5, 99), st.text(max_size=56)), max_size=12),
)
def test_a_status_line_travels_unchanged(done: float | None, parts: list[tuple[int, str]]) -> None:
    glance = RunStatus(done, tuple(parts))
    assert read_record(glance.to_json().encode("utf-8", "surrogatepass")) in (glance, None)


@pytest.mark.parametrize("repeats", [1, 4, 8])
def test_letters_that_take_two_columns_do_not_squeeze_the_rest(repeats: int) -> None:
    desk = Desk(80)
    parts = ((2, "epoch 1"), (0, "損失" * repeats + " 0.5"), (4, "20 samples/s"), (1, "3 s left"))
    desk.screen.show(RunStatus(0.25, parts))
    assert re.search(r"━ +25%  ", desk.glass.bottom)
    assert desk.glass.bottom.split("  ")[-1] in {text for _, text in parts}
    desk.close()


def test_control_characters_in_a_metrics_name_stay_text(desk: Desk) -> None:
    desk.screen.show(RunStatus(0.5, ((0, "loss\x1b[2J\n"),)))
    assert desk.glass.bottom.endswith(r"loss\x1b[2J\n")
