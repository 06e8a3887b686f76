"""The run folder: written by one, read by others while it grows."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

from paceline.errors import UsageError, WireError
from paceline.files.run_folder import (
    EventTail,
    EventWriter,
    RunFolder,
    RunInfo,
    parse_event,
    read_events,
    read_info,
    write_info,
    write_output,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "digits")
    made.create()
    return made


def test_a_file_that_is_mostly_holes_is_read_as_far_as_there_is_something(
    folder: RunFolder,
) -> None:
    """Reading a tebibyte of zeros would take hours."""
    with EventWriter(folder, 0) as writer:
        writer.write("start")
        os.truncate(folder.events_of(0), 2**40)
        writer.write("step")  # is appended
    with open(folder.events_of(0), "ab") as file:
        file.write(b"\n")
    with EventWriter(folder, 0) as writer:
        writer.write("stop")
        os.truncate(folder.events_of(0), 2**41)
    found = [each and each["kind"] for each in EventTail(folder.events_of(0)).read()]
    assert found == ["start", None, "stop"]


def test_the_folder_and_its_files_are_for_this_user_alone(folder: RunFolder) -> None:
    with EventWriter(folder, 0) as writer:
        writer.write("start")
    write_info(folder, RunInfo(name="digits", created=0.0, updated=0.0))
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.path.rglob("*")}
    assert modes == {"events": 0o700, "rank0.jsonl": 0o600, "run.json": 0o600}
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_what_run_json_says_is_read_back(folder: RunFolder) -> None:
    info = RunInfo(name="digits", created=1.5, updated=2.5, step=7, policy=["128 globally"])
    write_info(folder, info)
    assert read_info(folder) == info
    assert list(folder.path.iterdir()) == [folder.info]


def test_the_name_of_a_file_that_is_not_utf8_can_be_read_back(folder: RunFolder) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    reason = f"worker 1 failed in step 6: FileNotFoundError: {name}, de l'été"
    info = RunInfo(name="digits", created=1.5, updated=2.5, reason=reason, settings={name: name})
    write_info(folder, info)
    read = read_info(folder)
    assert read is not None
    assert read.reason == reason.replace(name, r"caf\udce9.jpg")
    assert read.settings == {r"caf\udce9.jpg": r"caf\udce9.jpg"}
    with EventWriter(folder, 0) as writer:
        writer.write("message", text=reason)
    (event,) = read_events(folder)
    assert event["text"] == read.reason


def test_a_folder_without_run_json_has_no_info(folder: RunFolder) -> None:
    assert read_info(folder) is None
    assert read_info(RunFolder(folder.path / "nothing")) is None


def test_unknown_keys_of_run_json_are_ignored(folder: RunFolder) -> None:
    text = json.dumps({"schema": 1, "name": "x", "created": 0, "updated": 0, "mood": "good"})
    folder.info.write_text(text)
    info = read_info(folder)
    assert info is not None
    assert info.name == "x"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1}', "[" * 100_000, "\x00"]
)
def test_a_malformed_run_json_is_a_typed_error(folder: RunFolder, text: str) -> None:
    folder.info.write_text(text)
    with pytest.raises(WireError):
        read_info(folder)


def test_a_fifo_in_place_of_a_file_does_not_block_a_reader(folder: RunFolder) -> None:
    os.mkfifo(folder.info)
    with pytest.raises(WireError, match="not a plain file"):
        read_info(folder)


def test_events_are_read_while_they_are_written(folder: RunFolder) -> None:
    assert read_events(folder) == []
    with EventWriter(folder, 2) as writer:
        writer.write("step", step=1, metrics={"loss": [3.0, 4]})
        (first,) = read_events(folder)
        assert (first["kind"], first["rank"], first["metrics"]) == ("step", 2, {"loss": [3.0, 4]})
        writer.write("step", step=2)
        assert [event["step"] for event in read_events(folder)] == [1, 2]


def test_events_are_streamed_with_a_gap_for_every_line_that_is_not_one(folder: RunFolder) -> None:
    folder.events.mkdir()
    event, long = b'{"kind":"step","t":1,"rank":0}\n', b"x" * 2**21 + b"\n"
    folder.events_of(0).write_bytes(event + b"nonsense\n\n" + long + event + b'{"kind":"st')
    found = [each and each["kind"] for each in EventTail(folder.events_of(0)).read()]
    assert found == ["step", None, None, "step"]


def test_after_half_a_line_of_a_killed_writer_the_next_event_is_whole(folder: RunFolder) -> None:
    folder.events.mkdir()
    folder.events_of(0).write_text('{"kind":"step","t":1,"rank":0}\n{"kind":"st')
    writer = EventWriter(folder, 0)
    writer.write("start", step=1)
    writer.close()
    assert [event["kind"] for event in read_events(folder)] == ["step", "start"]


def test_numbers_that_json_has_no_word_for_survive(folder: RunFolder) -> None:
    writer = EventWriter(folder, 0)
    writer.write("step", metrics={"loss": [math.nan, 1], "norm": [-math.inf, math.inf]}, text="nan")
    writer.close()
    assert "NaN" not in folder.events_of(0).read_text()
    (event,) = read_events(folder)
    assert math.isnan(event["metrics"]["loss"][0])
    assert event["metrics"]["norm"] == [-math.inf, math.inf]
    assert event["text"] == "nan"


@pytest.mark.parametrize(
    "line", [b"", b"3", b"{}", b'{"kind":"x","rank":"0","t":1}', b'{"kind":1}', b"[" * 90_000]
)
def test_foreign_lines_are_no_events(line: bytes) -> None:
    assert parse_event(line) is None


def test_a_name_that_no_page_could_carry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be named"):
        RunFolder(tmp_path / "my run").create()


def test_links_are_not_followed(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    folder.events.mkdir()
    folder.events_of(0).symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="cannot be written"):
        EventWriter(folder, 0).write("start")
    assert (tmp_path / "elsewhere").read_text() == ""
    assert folder.event_ranks() == []


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.write_text("a file in its place")
    writer = EventWriter(folder, 0)
    with pytest.warns(UserWarning, match="cannot be written"):
        writer.write("start")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.write("step")


def test_events_have_a_time_that_clocks_agree_on(folder: RunFolder) -> None:
    writer = EventWriter(folder, 0)
    begin = time.time()
    writer.write("start")
    writer.close()
    assert begin <= read_events(folder)[0]["t"] <= time.time()


def test_it_is_read_without_torch() -> None:
    code = "import sys, paceline.files.run_folder; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("steps", ["9" * 400, '"many"', "1e400", "true", "[]"])
def test_a_number_that_is_none_makes_run_json_a_typed_error(folder: RunFolder, steps: str) -> None:
    folder.info.write_text(
        f'{{"schema": 1, "name": "x", "created": 0, "updated": 0, "steps": {steps}}}'
    )
    with pytest.raises(WireError):
        read_info(folder)


@pytest.mark.parametrize(
    "value", ["9" * 400, "9" * 5000, "1e999", '"\\ud800"', "[" * 99 + "]" * 99]
)
def test_an_event_with_an_absurd_value_is_left_out(value: str) -> None:
    assert parse_event(f'{{"kind": "step", "rank": 0, "t": 0, "x": {value}}}'.encode()) is None


@pytest.mark.parametrize(
    "odd",
    [
        b'{"kind":"step","t":1,"rank":0,"x":"nan"}',
        b'{"kind":"step","t":1,"rank":0,"x":1e999}',
        b'{"kind":"step","t":1,"rank":0},{"kind":"step","t":1,"rank":0}',
        b'{"kind":"step","t":1,"rank":0,"x":[1}',
        b'{"kind":"step","t":1,"rank":0,"x":"]["}',
        b'{"kind":"step","t":1,"rank":0,"x":"\\u00e9"}',
        b'{"kind":"step","t":1,"rank":0,"x":' + b"9" * 40 + b"}",
        b'{"kind":"step","t":1,"rank":0,"x":' + b"[" * 70 + b"]" * 70 + b"}",
        b"] [",
        b"3",
        b" ",
    ],
)
def test_many_lines_at_once_say_what_each_says_alone(odd: bytes, folder: RunFolder) -> None:
    folder.events.mkdir()
    usual = b'{"kind":"step","t":1.5,"rank":0,"metrics":{"loss":[0.00016023700000000014,1]}}'
    lines = [usual] * 3 + [odd] + [usual] * 3
    folder.events_of(0).write_bytes(b"\n".join(lines) + b"\n")
    assert list(EventTail(folder.events_of(0)).read()) == [
        parse_event(line) for line in lines if line.strip()
    ]


def test_events_of_a_folder_that_is_deleted_go_on_in_a_new_one_with_a_word(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with EventWriter(folder, 0) as writer:
        for step in (1, 2):
            writer.write("step", step=step)
        for again in (True, False):
            shutil.rmtree(folder.path)
            with pytest.warns(UserWarning, match="was deleted") if again else nullcontext():
                writer.write("step", step=3)
            writer.write("step", step=4)
    assert [event["step"] for event in read_events(folder)] == [3, 4]


def test_an_output_goes_into_a_pipe_or_device_instead_of_replacing_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, ["a", "b"])
    assert os.read(reader, 10) == b"ab"
    os.close(reader)
