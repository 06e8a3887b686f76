"""What a run looks like as plain lines, as JSON and in silence, and how often it speaks."""

from __future__ import annotations

import io
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import SettingError
from paceline.telemetry import Progress, text
from paceline.telemetry.display import choose_mode
from paceline.telemetry.screen import TerminalSettings, read_terminal
from paceline.telemetry.text import WINDOW_S, ProgressState
from paceline.telemetry.units import metric_text

# A busy machine is no reason to fail.
unhurried = settings(deadline=None, max_examples=60)


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Show:
    """A progress on a stream that can be read back."""

    def __init__(self, mode: str = "plain", stream: io.TextIOBase | None = None) -> None:
        self.clock = Clock()
        self.stream = io.StringIO() if stream is None else stream
        self.progress = Progress(mode, stream=self.stream, clock=self.clock, environ={})  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        assert isinstance(self.stream, io.StringIO)
        return self.stream.getvalue()

    def run(self, *, epochs: int = 3, steps_per_epoch: int = 10, step_s: float = 0.5) -> None:
        """A whole training whose loss falls."""
        steps = epochs * steps_per_epoch
        self.progress.start(
            name="digits",
            workers=2,
            epochs=epochs,
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            global_batch=100,
        )
        for step in range(steps):
            self.clock.now_s += step_s
            epoch = step // steps_per_epoch
            metrics = {"loss": 1.0 / (step + 1), "accuracy": 0.5}
            self.progress.step(step + 1, epoch=epoch, samples=100, metrics=metrics)
            if (step + 1) % steps_per_epoch == 0:
                seconds = steps_per_epoch * step_s
                self.progress.epoch(epoch, metrics, seconds=seconds, samples=100 * steps_per_epoch)
        self.progress.finish(lines=["best checkpoint: step 30"])


def test_a_run_is_an_opening_some_lines_a_table_and_a_summary() -> None:
    show = Show()
    show.run()
    assert show.text == (
        "digits: 2 workers, 3 epochs, 30 steps, global batch 100\n"
        "epoch 1/3  loss 0.1000  accuracy 50.0%  200 samples/s  10 s left\n"
        "epoch 2/3  loss 0.0500  accuracy 50.0%  200 samples/s  5.00 s left\n"
        "epoch 3/3  step 30/30  loss 0.0333  accuracy 50.0%  200 samples/s\n"
        "digits finished on 2 workers: 30 steps, 3,000 samples (200/s), 15 s\n"
        "\n"
        "  epoch     loss   accuracy   seconds   samples/s\n"
        "      1   0.1000      50.0%     5.000         200\n"
        "      2   0.0500      50.0%     5.000         200\n"
        "      3   0.0333      50.0%     5.000         200\n"
        "\n"
        "  best checkpoint: step 30\n"
    )


def test_a_run_of_a_moment_is_its_opening_and_its_summary() -> None:
    show = Show()
    show.run(step_s=0.001)
    assert "samples/s\n" not in show.text.partition("digits finished on")[0]


def test_a_long_epoch_speaks_up_every_ten_seconds() -> None:
    show = Show()
    show.progress.start(steps=1_000, epochs=1)
    for step in range(600):
        show.clock.now_s += 0.1
        show.progress.step(step + 1, epoch=0, samples=8)
    lines = show.text.splitlines()[1:]
    assert len(lines) == 5
    assert lines[-1].endswith("left")


def test_what_nobody_sees_is_not_computed() -> None:
    show = Show()
    show.progress.start(steps=1_000, epochs=1)
    asked = []

    def metrics() -> dict[str, float]:
        asked.append(show.clock.now_s)
        return {"loss": 0.5}

    for step in range(1_000):
        show.clock.now_s += 0.01
        show.progress.step(step + 1, epoch=0, samples=8, metrics=metrics)
    assert len(asked) <= 10


def test_json_is_one_strict_object_per_line_and_complete_but_for_steps() -> None:
    show = Show("json")
    show.run(step_s=0.25)
    seen = [
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
        for line in show.text.splitlines()
    ]
    kinds = [line["kind"] for line in seen]
    assert kinds[0] == "start"
    assert kinds[-1] == "finish"
    assert kinds.count("epoch") == 3
    assert kinds.count("step") == 7
    assert all(isinstance(line["t"], float) for line in seen)
    assert seen[0]["steps"] == 30
    assert seen[-1]["status"] == "finished"


def test_json_says_numbers_that_are_none_in_words() -> None:
    show = Show("json")
    show.progress.start(steps=2, epochs=1)
    show.progress.epoch(0, {"loss": math.nan, "gap": -math.inf})
    assert json.loads(show.text.splitlines()[-1])["metrics"] == {"loss": "nan", "gap": "-inf"}


def test_quiet_speaks_up_only_when_something_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    show = Show("quiet")
    show.run()
    show.progress.message("saved")
    show.progress.message("the disk is full", "warning")
    assert show.text == ""
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "warning: the disk is full\n")


@pytest.mark.parametrize("mode", ["plain", "json", "quiet", "bar"])
def test_only_one_process_draws(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(mode, draws=False, stream=sys.stdout, environ={})
    progress.start(steps=3)
    progress.step(1, epoch=0, samples=1)
    progress.message("lost", "error")
    progress.finish()
    assert capsys.readouterr() == ("", "")


def test_a_program_without_standard_streams_trains_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    for mode in ("auto", "quiet"):
        progress = Progress(mode, environ={})
        progress.start(steps=1)
        progress.message("lost", "error")
        progress.finish()


def test_an_exception_ends_the_run_as_failed_and_is_not_swallowed() -> None:
    show = Show()
    show.progress.start(name="digits", steps=3)
    with pytest.raises(ZeroDivisionError), show.progress:
        raise ZeroDivisionError
    assert "digits failed on 1 worker: 0 steps" in show.text


def test_calls_before_the_start_and_after_the_end_do_nothing() -> None:
    show = Show()
    show.progress.step(1, epoch=0, samples=1)
    show.progress.epoch(0, {})
    show.progress.evaluation(0, {})
    show.progress.finish()
    assert show.text == ""
    show.run()
    before = show.text
    show.progress.step(1, epoch=0, samples=1)
    show.progress.finish("stopped")
    show.progress.close()
    assert show.text == before


def test_a_resumed_run_counts_only_what_it_did_itself() -> None:
    show = Show()
    show.progress.start(steps=30, steps_per_epoch=10, step=20)
    show.clock.now_s += 2
    show.progress.step(21, epoch=2, samples=100)
    show.progress.finish("stopped")
    assert "continues after step 20" in show.text
    assert "run stopped on 1 worker: 1 step, 100 samples (50/s), 2.00 s" in show.text


def test_an_evaluation_tells_after_which_step_it_was() -> None:
    show = Show(mode="json")
    show.progress.start(steps=4)
    show.progress.step(1, epoch=0, samples=1)
    show.progress.evaluation(0, {"accuracy": 0.5})
    show.progress.evaluation(0, {"accuracy": 0.5}, step=2)  # before step 2's numbers have arrived
    lines = [json.loads(line) for line in show.text.splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [1, 2]
    show.progress.finish()


def test_an_evaluation_gets_columns_of_its_own_behind_the_trainings() -> None:
    show = Show()
    show.progress.start(steps=2)
    show.progress.evaluation(0, {"accuracy": 0.75})  # at the end of an epoch, before its numbers
    show.progress.epoch(0, {"loss": 0.5})
    show.progress.epoch(1, {"loss": 0.4})
    show.progress.finish()
    assert "epoch     loss   eval accuracy\n" in show.text
    assert "1   0.5000           75.0%\n" in show.text
    assert "2   0.4000               -\n" in show.text


class Gone(io.StringIO):
    """A reader that left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_left_does_not_stop_the_training() -> None:
    show = Show(stream=Gone())
    show.run()
    closed = io.StringIO()
    closed.close()
    Show(stream=closed).run()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_any_encoding_can_say_any_name(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding)
    show = Show(stream=stream)
    show.progress.start(name="模型 é", steps=1)
    show.progress.message("\u2764 loss \u221e", "warning")
    show.progress.finish()
    text = raw.getvalue().decode(encoding)
    assert "warning: " in text
    assert ("模型" in text) == (encoding == "utf-8")
    stream.close()


def test_control_characters_in_a_name_stay_text() -> None:
    show = Show()
    show.progress.start(name="\x1b[2Jevil\r", steps=1)
    show.progress.message("one\ntwo\tthree")
    show.progress.finish()
    assert "\x1b" not in show.text
    assert "\r" not in show.text
    assert "one\ntwo\\tthree\n" in show.text


def test_threads_may_speak_while_another_draws() -> None:
    show = Show()
    show.progress.start(steps=10)
    threads = [
        threading.Thread(target=show.progress.message, args=(f"thread {number}",))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(show.text.splitlines()[1:]) == [f"thread {number}" for number in range(8)]


class Interrupting(io.StringIO):
    """Speaks up in the middle of a write, as a signal handler may."""

    speak: Callable[[], None] | None = None

    def write(self, text: str) -> int:
        speak, self.speak = self.speak, None
        if speak is not None:
            speak()
        return super().write(text)


def test_a_signal_handler_may_speak_while_a_print_waits_for_its_reader() -> None:
    reader, writer = os.pipe()
    stream = io.TextIOWrapper(io.BufferedWriter(io.FileIO(writer, "w")))
    progress, read, has_spoken = Progress("plain", stream=stream), bytearray(), threading.Event()

    def speak(*_: object) -> None:
        if not has_spoken.is_set():
            progress.message("asked to stop")
            has_spoken.set()

    def interrupt_and_read() -> None:
        while select.select([], [writer], [], 0)[1]:
            pass  # until the pipe is full
        while not has_spoken.wait(0.02):
            signal.pthread_kill(main, signal.SIGUSR1)
        while data := os.read(reader, 2**16):
            read.extend(data)

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, speak)
    other = threading.Thread(target=interrupt_and_read)
    other.start()
    try:
        print("x" * 2**20, file=stream, flush=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    progress.message("later")
    stream.close()
    other.join()
    os.close(reader)
    assert bytes(read).split() == [b"x" * 2**20, b"asked", b"to", b"stop", b"later"]


def test_a_signal_handler_may_speak_in_the_middle_of_a_line() -> None:
    stream = Interrupting()
    show = Show(stream=stream)
    stream.speak = lambda: show.progress.message("finishing this step")
    show.progress.start(name="digits", steps=10)
    assert show.text.splitlines() == ["digits: 1 worker, 10 steps", "finishing this step"]


@pytest.mark.parametrize(
    ("wanted", "can_draw", "settings", "chosen"),
    [
        ("auto", True, TerminalSettings(), "bar"),
        ("auto", False, TerminalSettings(), "plain"),
        ("auto", True, TerminalSettings(is_ci=True), "plain"),
        ("bar", True, TerminalSettings(is_ci=True), "bar"),
        ("bar", False, TerminalSettings(), "plain"),
        ("auto", True, TerminalSettings(is_dumb=True), "plain"),
        ("auto", True, TerminalSettings(progress="json"), "json"),
        ("quiet", True, TerminalSettings(progress="json"), "quiet"),
        ("plain", True, TerminalSettings(), "plain"),
    ],
)
def test_how_a_run_is_shown_depends_on_the_wish_then_on_the_terminal(
    wanted: str, can_draw: bool, settings: TerminalSettings, chosen: str
) -> None:
    assert choose_mode(wanted, settings, can_draw=can_draw) == chosen


def test_an_unknown_way_of_showing_is_refused_with_its_source() -> None:
    with pytest.raises(SettingError, match=r"progress.* 'loud'"):
        Progress("loud", environ={})
    with pytest.raises(SettingError, match=r"PACELINE_PROGRESS.* 'loud'"):
        Progress(environ={"PACELINE_PROGRESS": "Loud"})


def test_the_environment_is_read_as_people_set_it() -> None:
    assert read_terminal({}) == TerminalSettings()
    assert read_terminal({"CI": "true", "NO_COLOR": "1", "TERM": "dumb"}) == TerminalSettings(
        is_ci=True, is_dumb=True, has_colour=False
    )
    assert not read_terminal({"CI": "false"}).is_ci
    assert read_terminal({"NO_COLOR": ""}).has_colour


def test_speed_is_that_of_the_recent_past() -> None:
    state = ProgressState(steps=99 + 5 * 39 + 50)
    assert state.samples_per_s is None
    assert state.time_left_s is None
    for second in range(100):
        state.step, state.samples = second, 10 * second
        state.mark(float(second))
    for second in range(1, 2 * int(WINDOW_S)):
        state.step, state.samples = 99 + 5 * second, 990 + 50 * second
        state.mark(99.0 + second)
    assert state.samples_per_s == pytest.approx(50.0)
    assert state.time_left_s == pytest.approx(10.0)
    state.steps = None
    assert state.time_left_s is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", 0.12345, "0.1235"),
        ("loss", 0.0, "0.0000"),
        ("loss", 0.0000123, "1.23e-05"),
        ("loss", 1234.5, "1234.5"),
        ("loss", 1e9, "1.00e+09"),
        ("loss", math.nan, "nan"),
        ("accuracy", 0.9312, "93.1%"),
        ("top 5 accuracy", 1.0, "100.0%"),
        ("accuracy", 93.12, "93.1200"),
        ("", 1.0, "1.0000"),
    ],
)
def test_metrics_read_well(name: str, value: float, text: str) -> None:
    assert metric_text(name, value) == text


metric_names = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=12)
metric_values = st.floats(allow_nan=True, allow_infinity=True)


@unhurried
@given(
    st.lists(st.dictionaries(metric_names, metric_values, max_size=6), max_size=60),
    st.integers(1, 10**6),
    st.floats(0, 1e6),
)
def test_no_line_is_wider_than_can_be_pasted(
    epochs: list[dict[str, float]], samples: int, elapsed_s: float
) -> None:
    metrics: dict[str, Any] = epochs[0] if epochs else {}
    state = ProgressState(name="digits", workers=128, epochs=100, steps=10**6, epoch=7)
    for number, values in enumerate(epochs):
        state.add_row(number, values, 1.5, samples)
        state.add_row(number, {f"eval {name}": value for name, value in values.items()}, None, None)
    state.metrics, more = metrics, ("a word " * 30,)
    state.mark(0.0)
    state.step, state.samples = 10**5, samples
    state.mark(elapsed_s)
    lines = [*text.summary(state, "finished", more), *text.opening(state, more)]
    assert max(map(len, lines)) <= text.WIDTH
    assert len(text.fit(text.status(state), text.WIDTH)) <= text.WIDTH
    assert len(text.table(state.rows)) <= 26


def test_a_long_table_shows_the_newest_epochs_and_says_so() -> None:
    lines = text.table({number: {"loss": "0.5"} for number in range(100)})
    assert lines[1] == "  ... 76 epochs before ..."
    assert lines[2].split()[0] == "77"
    assert lines[-1].split()[0] == "100"


def test_progress_needs_neither_torch_nor_rich() -> None:
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from paceline.telemetry import Progress\n"
        "with Progress() as progress:\n"
        "    progress.start(name='x', steps=1)\n"
        "print(progress.mode, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1] == "plain False", done.stderr


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_terminal_of_hardly_any_columns_ends_no_training(width: int) -> None:
    state = ProgressState(name="digits", rows={0: {"loss": "0.5"}})
    for lines in (text.opening(state, ["a line"], width), text.summary(state, "", ["it"], width)):
        assert "".join(lines).split()
