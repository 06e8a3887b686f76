"""The timeline of all ranks: on one clock, waits apart from transfers, adding up."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import chrome_trace
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paceline.cli import main
from paceline.telemetry import timeline
from paceline.telemetry.spans import SpanRecorder

US = 1000
# By rank: own work and wait of every step, in microseconds. Rank 1 is late; the sum takes 50.
STEP = {
    0: [("data", 100), ("forward", 200), ("backward", 300), ("wait", 450), ("optimizer", 30)],
    1: [("data", 500), ("forward", 200), ("backward", 300), ("wait", 50), ("optimizer", 30)],
}
GAP = 20


def record(folder: Path, rank: int, steps: int = 6, clock_us: int = 0) -> SpanRecorder:
    """A recording as the engine makes it, of a rank whose clock is ahead by `clock_us`."""
    recorder = SpanRecorder(folder, rank, zero_ns=0)
    now = 10**6 + clock_us
    for step in range(steps):
        recorder.add("wait", now * US, (now + 5) * US, {"step": step})  # for buffers, say
        now += 5
        for name, us in STEP[rank]:
            facts = {"step": step} | ({"last": True} if name == "wait" else {})
            recorder.add(name, now * US, (now + us) * US, facts)
            if name == "backward":
                ready = (now + us) * US
                recorder.add("ready", ready, None, {"step": step, "bucket": 0})
            now += us
        now += GAP
    return recorder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in (0, 1):
        record(tmp_path / "timeline", rank).close()
    return tmp_path


def merged(folder: Path, **options: Any) -> list[dict[str, Any]]:
    recordings = [timeline.survey(path) for path in timeline.find_recordings(folder)]
    return list(timeline.merge(recordings, **options))


def spans_of(events: list[dict[str, Any]], rank: int, name: str) -> list[tuple[float, float]]:
    return [
        (event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X" and (event["pid"], event["name"]) == (rank, name)
    ]


def test_every_event_has_what_a_chrome_trace_needs(folder: Path) -> None:
    events = merged(folder)
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} <= set(event)
        assert event["ph"] in "XiM"
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "worker 0"), (1, "worker 1")}
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "communication"}


def test_spans_of_a_lane_never_overlap(folder: Path) -> None:
    for rank in (0, 1):
        lane = sorted(
            (event["ts"], event["dur"])
            for event in merged(folder)
            if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, 1)
        )
        for (begin, length), (after, _) in itertools.pairwise(lane):
            assert begin + length <= after + 0.001


def test_what_the_last_rank_waits_is_transfer_and_the_rest_is_waiting_for_it(folder: Path) -> None:
    events = merged(folder)
    assert [length for _, length in spans_of(events, 0, "wait")] == [5.0, 400.0] * 6
    assert [length for _, length in spans_of(events, 0, "transfer")] == [50.0] * 6
    assert [length for _, length in spans_of(events, 1, "wait")] == [5.0] * 6
    assert spans_of(events, 0, "transfer") == spans_of(events, 1, "transfer")


def test_phases_add_up_to_the_step(folder: Path) -> None:
    recordings = [timeline.survey(path) for path in timeline.find_recordings(folder)]
    quick, slow = timeline.average_steps(recordings).values()
    assert sum(slow.values()) == pytest.approx(1.105)
    assert slow == pytest.approx(
        {
            "data": 0.5,
            "forward": 0.2,
            "backward": 0.3,
            "optimizer": 0.03,
            "other": 0.02,
            "wait": 0.005,
            "transfer": 0.05,
        }
    )
    assert quick["wait"] == pytest.approx(0.405)
    assert quick["transfer"] == slow["transfer"]


def test_the_first_steps_are_left_out_where_there_are_enough() -> None:
    lengths = [len(timeline.after_warm_up(range(n))) for n in (0, 1, 2, 3, 8, 15, 30)]
    assert lengths == [0, 1, 2, 2, 6, 10, 25]


def test_a_bucket_is_under_way_from_the_last_rank_that_is_ready(tmp_path: Path) -> None:
    for rank, ready_us in enumerate((100, 400)):
        recorder = SpanRecorder(tmp_path, rank, zero_ns=0)
        facts = {"step": 0, "bucket": 0}
        recorder.add("ready", ready_us * US, None, facts)
        recorder.add("in flight", ready_us * US, 500 * US, facts)
        recorder.close()
    events = merged(tmp_path)
    assert spans_of(events, 0, "transfer") == spans_of(events, 1, "transfer") == [(300.0, 100.0)]


def test_clocks_of_several_machines_are_brought_together(tmp_path: Path) -> None:
    ahead = 5_000_000
    record(tmp_path, 0).close()
    record(tmp_path, 1, clock_us=ahead).close()
    path = tmp_path / "rank1.trace.json"
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if '"name": "paceline"' in line:
            header = json.loads(line.rstrip(","))
            header["args"]["machine"] = "another"
            header["args"]["zero_unix_ns"] -= ahead * US
            lines[number] = json.dumps(header) + ","
    path.write_text("\n".join(lines))
    events = merged(tmp_path)
    (first, _), (second, _) = (spans_of(events, rank, "data")[0] for rank in (0, 1))
    assert abs(first - second) < 20_000  # the clock of the day was read twice


def test_a_file_that_is_still_written_is_read_up_to_its_last_whole_line(folder: Path) -> None:
    path = folder / "timeline" / "rank0.trace.json"
    whole = len(list(timeline.read_events(path)))
    with open(path, "a") as file:
        file.write('{"name":"forward","ph":"X","ts":12')
    assert len(list(timeline.read_events(path))) == whole


def test_damaged_events_are_left_out(tmp_path: Path) -> None:
    wait = '"name":"wait","ph":"X","tid":1,"args":{"step":0,"last":true}'
    damaged = [
        '{"name":"wait"}',
        '{"name":"wait","ts":5}',
        f'{{{wait},"ts":"5","dur":1}}',
        f'{{{wait},"ts":5,"dur":null}}',
        '{"name":"batch","ph":"i","ts":1,"args":{"step":0,"samples":"8"}}',
        '{"name":"paceline_rank","ph":"M","args":{"size":"2","threads":3}}',
        "[" * 10_000,
        f'{{{wait},"ts":5,"dur":1}}',
    ]
    path = tmp_path / "rank0.trace.json"
    path.write_text("[\n" + ",\n".join(damaged))
    found = timeline.survey(path)
    assert (found.facts, found.steps, found.waits_us) == ({"threads": 3}, {}, {0: 1})


def test_the_time_until_a_rank_is_restarted_is_no_step(tmp_path: Path) -> None:
    record(tmp_path, 0, steps=3).close()
    record(tmp_path, 0, steps=3, clock_us=10**9).close()
    steps = timeline.survey(tmp_path / "rank0.trace.json").steps
    assert {sum(step.us_by_phase.values()) for step in steps.values()} == {1105.0}


def test_some_steps_can_be_chosen(folder: Path) -> None:
    events = merged(folder, steps=range(1, 3))
    assert {e["args"]["step"] for e in events if e["ph"] != "M"} == {1, 2}
    assert min(e["ts"] for e in events if e["ph"] != "M") == 0


def test_the_command_writes_one_trace_and_prints_where_time_went(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = folder / "all.json"
    assert main(["timeline", str(folder), "-o", str(target), "--steps", "0:2"]) == 0
    trace = json.loads(target.read_text())
    assert len([e for e in trace["traceEvents"] if e["name"] == "forward"]) == 4
    printed = capsys.readouterr().out
    assert printed.splitlines()[2].split()[:3] == ["0", "0.10", "0.20"]


def test_chosen_steps_restrict_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = SpanRecorder(folder / "timeline", 2, zero_ns=0)
    for step in range(1, 6):
        begin = step * 1000 * US
        slow.add(
            "wait", begin, begin + (100 if step == 3 else 10) * US, {"step": step, "last": True}
        )
    slow.close()
    assert main(["timeline", str(folder), "--steps", "3:4"]) == 0
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith("from step 3 up to, not including, 4")
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert [row.split()[5] for row in rows] == ["0.05", "0.05", "0.05"]  # the shortest wait
    assert main(["timeline", str(folder), "--steps", "900:"]) == 2
    assert "Choose from 0:6." in capsys.readouterr().err


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@example(key="dur", value=None, line=9)  # of an event that has no duration
@given(
    key=st.sampled_from(["name", "ph", "ts", "dur", "tid", "pid", "cat", "s", "step", "last"]),
    value=st.sampled_from([None, True, -1, 2**64, 1e300, "", "M", "X", [], [1], {}, {"a": 1}]),
    line=st.integers(0, 60),
)
def test_a_value_of_the_wrong_kind_anywhere_is_survived(
    key: str, value: Any, line: int, folder: Path
) -> None:
    path = folder / "timeline" / "rank0.trace.json"
    before = path.read_text()
    lines = before.splitlines()
    event = json.loads(lines[1 + line % (len(lines) - 2)].rstrip(","))
    place = event.setdefault("args", {}) if key in ("step", "last") else event
    place[key] = value
    path.write_text("\n".join([*lines[:-1], json.dumps(event)]))
    assert main(["timeline", str(folder), "-o", str(folder / "all.json")]) == 0
    json.loads((folder / "all.json").read_text())
    path.write_text(before)


@pytest.mark.parametrize("number", ["9" * 400, "1e999", "-" + "9" * 5000, "[[" * 5000])
def test_numbers_of_any_length_are_left_out(
    folder: Path, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(folder)]) == 0
    as_before = capsys.readouterr().out
    with open(folder / "timeline" / "rank0.trace.json", "a") as file:
        for key in ("ts", "dur", "tid"):
            times = {"ts": 1, "dur": 1, "tid": 1} | {key: 0}
            wait = json.dumps({"name": "wait", "ph": "X", **times, "args": {"step": 3}})
            file.write(wait.replace(f'"{key}": 0', f'"{key}": {number}') + ",\n")
        for facts in ('"samples":%s', '"step":%s', '"bytes":%s,"step":3', '"zero_unix_ns":%s'):
            args = facts % number
            file.write(f'{{"name":"ready","ph":"i","ts":1,"tid":2,"args":{{{args}}}}},\n')
            file.write(f'{{"name":"paceline_rank","ph":"M","args":{{{args}}}}},\n')
    assert main(["timeline", str(folder), "-o", str(folder / "all.json")]) == 0
    assert capsys.readouterr().out.startswith(as_before)


def test_a_folder_without_recordings_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(tmp_path)]) == 2
    assert "paceline run --timeline" in capsys.readouterr().err
    (tmp_path / "rank0.trace.json").symlink_to("/etc/passwd")
    assert main(["timeline", str(tmp_path)]) == 2


@pytest.mark.parametrize("steps", ["x", "1", "1:2:3", "-1:2"])
def test_an_impossible_choice_of_steps_is_refused(folder: Path, steps: str) -> None:
    assert main(["timeline", str(folder), f"--steps={steps}"]) == 2


def test_a_span_that_is_written_last_but_began_first_is_not_before_all_time(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path / "timeline", 0, zero_ns=0)
    recorder.add("data", 5_000, 6_000, {"step": 0})
    recorder.add_user_span("epoch", 1_000, 9_000)
    recorder.close()
    assert [event["ts"] for event in merged(tmp_path) if event["ph"] == "X"] == [4.0, 0.0]


def test_a_written_trace_is_what_perfetto_takes_however_it_rounds(
    folder: Path, tmp_path: Path
) -> None:
    # Odd nanoseconds are what truncation makes overlap.
    recorder = SpanRecorder(folder / "timeline", 2, zero_ns=0)
    edges = itertools.accumulate((317 + 13 * n for n in range(400)), initial=10**9 + 7)
    for begin, end in itertools.pairwise(edges):
        recorder.add("data", begin, end, {"step": 0})
    recorder.close()
    path = tmp_path / "trace.json"
    assert main(["timeline", str(folder), "-o", str(path)]) == 0
    assert chrome_trace.violations(chrome_trace.load(path)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dur": 20.5}, "begins inside first and ends"),
        ({"ts": -1.0}, "ts is -1.0"),
        ({"ts": "5"}, "ts is '5'"),
        ({"pid": None}, "pid is None"),
        ({"tid": 9}, "has no name"),
        ({"ph": "Z"}, "lacks"),
        ({"name": ""}, "name is no text"),
    ],
)
def test_the_rules_of_a_chrome_trace_can_be_broken(change: dict[str, Any], said: str) -> None:
    span = {"ph": "X", "cat": "c", "pid": 0, "tid": 1, "ts": 0.0, "dur": 10.0}
    names = [
        {"ph": "M", "pid": 0, "tid": 1, "name": name, "args": {"name": "x"}}
        for name in ("process_name", "thread_name")
    ]
    good = [*names, span | {"name": "first"}, span | {"name": "second", "ts": 5.0, "dur": 5.0}]
    assert chrome_trace.violations(good) == []
    assert said in chrome_trace.violations([*good[:-1], good[-1] | change])[0]
