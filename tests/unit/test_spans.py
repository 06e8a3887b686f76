"""Spans: what the file holds, and that recording never gets in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import chrome_trace
import pytest

from paceline.errors import UsageError
from paceline.telemetry import spans
from paceline.telemetry.spans import SpanRecorder


def events(path: Path, kinds: str = "Xi") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] in kinds]


def test_spans_are_off_unless_started() -> None:
    assert not spans.is_on()
    with spans.span("forward"):
        spans.add("data", 1, 2)
        spans.mark("ready")
    spans.stop()


def test_a_block_becomes_one_event_with_its_time_and_facts(tmp_path: Path) -> None:
    spans.start(tmp_path, rank=3)
    before = spans.now_ns()
    with spans.span("forward", step=7):
        pass
    after = spans.now_ns()
    spans.stop()
    (event,) = events(tmp_path / "rank3.trace.json")
    assert (event["name"], event["ph"], event["pid"]) == ("forward", "X", 3)
    assert event["args"] == {"step": 7}
    assert event["dur"] * 1000 <= after - before + 1


def test_spans_added_by_hand_keep_their_nanoseconds(tmp_path: Path) -> None:
    spans.start(tmp_path / "one.json", rank=0)
    now = spans.now_ns()
    spans.add("data", now, now + 1_000_001, n=1)
    spans.mark("ready", now + 5_000, bucket=2)
    spans.stop()
    data, ready = events(tmp_path / "one.json")
    assert (round(data["dur"], 3), data["args"]) == (1000.001, {"n": 1})
    assert (ready["ph"], round(ready["ts"] - data["ts"], 3)) == ("i", 5.0)
    assert ready["args"] == {"bucket": 2}


@pytest.mark.parametrize("uptime_s", [8_689, 17_378, 200 * 86_400])
def test_spans_nest_to_the_nanosecond_however_long_the_machine_is_up(
    tmp_path: Path, uptime_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importers multiply floats of microseconds by 1000, and round or cut the product off."""
    begin = uptime_s * 10**9 + 123_456_789
    monkeypatch.setattr(spans, "now_ns", lambda: begin)
    recorder = SpanRecorder(tmp_path, 0)
    for number in range(2000):
        end = begin + 317 + 13 * number
        recorder.add("data", begin, end)
        recorder.add_user_span("outer", begin, end)
        recorder.add_user_span("inner", begin + 100, end)
        begin = end
    recorder.close()
    assert chrome_trace.violations(chrome_trace.load(recorder.path)) == []


def test_a_file_without_its_end_is_one_line_per_event(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path, 0)
    recorder.add("data", 1, 2)
    recorder._drain()
    first, *lines = recorder.path.read_text().splitlines()
    recorder.close()
    assert first == "["
    assert json.loads(lines[-1].removesuffix(","))["name"] == "data"


@pytest.mark.parametrize("ending", ["", ',\n{"name":"half', "\n]\n", "\n"])
def test_a_restarted_rank_goes_on_behind_what_is_there(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "rank0.trace.json"
    path.write_text('[\n{"name":"old","ph":"X","ts":1,"dur":1,"pid":0,"tid":1}' + ending)
    spans.start(tmp_path, rank=0)
    spans.add("new", 1, 2)
    spans.stop()
    assert [event["name"] for event in events(path)] == ["old", "new"]


def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    spans.start(tmp_path / "timeline", rank=0)
    spans.stop()
    assert (tmp_path / "timeline").stat().st_mode & 0o077 == 0
    assert (tmp_path / "timeline" / "rank0.trace.json").stat().st_mode & 0o077 == 0
    (tmp_path / "rank1.trace.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be recorded"):
        spans.start(tmp_path, rank=1)
    assert not spans.is_on()


def test_a_second_start_is_refused(tmp_path: Path) -> None:
    spans.start(tmp_path, rank=0)
    try:
        with pytest.raises(UsageError, match="already"):
            spans.start(tmp_path / "other", rank=0)
    finally:
        spans.stop()


def test_memory_is_bounded_and_what_is_missing_is_counted(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path, 0, queue_limit=3)
    recorder._done.set()
    recorder._writer.join()
    for begin in range(10):
        recorder.add("data", begin, begin + 1)
    recorder.close()
    assert len(events(recorder.path)) == 3
    assert json.loads(recorder.path.read_text())[-1]["args"]["dropped"] == 7


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = SpanRecorder(tmp_path, 0)
    recorder._done.set()
    recorder._writer.join()
    full = os.open("/dev/full", os.O_WRONLY)
    assert recorder._file is not None
    os.dup2(full, recorder._file)
    os.close(full)
    recorder.add("data", 1, 2)
    recorder.close()
    recorder.add("data", 1, 2)
    assert capsys.readouterr().err.count(str(tmp_path)) == 1


def test_other_threads_have_lanes_of_their_own(tmp_path: Path) -> None:
    spans.start(tmp_path, rank=0)
    spans.add("mine", 1, 2)
    thread = threading.Thread(target=lambda: spans.add("theirs", 1, 2), name="loader")
    thread.start()
    thread.join()
    spans.stop()
    mine, theirs = events(tmp_path / "rank0.trace.json")
    names = {
        event["tid"]: event["args"]["name"]
        for event in events(tmp_path / "rank0.trace.json", "M")
        if event["name"] == "thread_name"
    }
    assert (names[mine["tid"]], names[theirs["tid"]]) == ("own spans", "loader")


def test_facts_that_json_cannot_say_are_written_as_text(tmp_path: Path) -> None:
    spans.start(tmp_path, rank=0)
    spans.mark("loss", value=float("nan"), where=Path("x"))
    spans.stop()
    (event,) = events(tmp_path / "rank0.trace.json")
    assert event["args"] == {"value": "nan", "where": "x"}


def test_a_forked_child_writes_nothing_into_its_parents_file(tmp_path: Path) -> None:
    spans.start(tmp_path, rank=0)
    child = os.fork()
    if child == 0:
        os._exit(0 if not spans.is_on() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert spans.is_on()
    spans.stop()


def test_spans_need_no_torch_and_are_closed_at_exit(tmp_path: Path) -> None:
    code = (
        "import sys; from paceline import spans; spans.start(sys.argv[1], 0); "
        "spans.add('data', 1, 2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert len(events(tmp_path / "rank0.trace.json")) == 1


def test_a_restarted_rank_counts_on_from_where_its_file_begins(tmp_path: Path) -> None:
    begun = spans.now_ns()
    for seconds in (0, 3600):
        now = begun + seconds * 10**9
        spans.start(tmp_path, rank=0)
        spans.add("data", now, now + 1000)
        spans.stop()
    first, second = events(tmp_path / "rank0.trace.json")
    assert second["ts"] - first["ts"] == pytest.approx(3600e6, abs=1e6)
