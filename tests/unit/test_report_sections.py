"""The drawn sections of the report: pipeline, workers, timeline, scaling."""

from __future__ import annotations

import copy
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_run import SCALING, synthetic_run, synthetic_trace

from paceline.explain import report
from paceline.explain.report import pipeline, ranks, scaling
from paceline.explain.report.collect import Rank, collect
from paceline.explain.report.picture import WIDTH, draw_row, lay_out, shape
from paceline.explain.report.window import Span, Window, covered, read_window
from paceline.observe.run_folder import RunInfo
from paceline.record.schema import read as read_trace
from paceline.record.schema import to_json
from paceline.record.stages import Check, Part, Stage, TensorFacts, Trace

INFO = RunInfo(name="x", created=1.0, updated=1.0, global_batch=10, workers=3, device="cpu")


def lanes(workers: int) -> Stage:
    parts = [Part(title=f"worker {n}", worker=n) for n in range(workers)]
    return Stage(name="forward", title="forward", text="", parts=parts)


def words_of(markup: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_a_row_has_a_box_for_each_worker_side_by_side(workers: int) -> None:
    boxes = lay_out(lanes(workers), 1)
    assert [box.worker for box in boxes] == list(range(workers))
    assert boxes[0].x == 0
    assert boxes[-1].x + boxes[-1].width == pytest.approx(WIDTH)
    assert all(a.x + a.width < b.x for a, b in itertools.pairwise(boxes))


def test_more_workers_than_lanes_are_counted_in_the_last_box() -> None:
    boxes = lay_out(lanes(64), 1)
    assert [box.title for box in boxes] == ["worker 0", "worker 1", "worker 2", "… 61 more"]


@pytest.mark.parametrize(
    ("before", "after", "lines"), [(0, 2, 0), (1, 4, 4), (4, 1, 4), (3, 3, 3), (2, 3, 6)]
)
def test_rows_are_joined_lane_by_lane_or_all_to_all(before: int, after: int, lines: int) -> None:
    above = lay_out(lanes(before), 1) if before else []
    row = draw_row(lanes(after), lay_out(lanes(after), 1), above)
    assert row.count("join") == lines


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([50, 10], "50 \N{MULTIPLICATION SIGN} 10"),
        ([1000], "1,000 values"),
        ([1], "1 value"),
        ([], "one number"),
    ],
)
def test_shapes_are_said_as_people_say_them(sizes: list[int], said: str) -> None:
    facts = TensorFacts(name="x", shape=sizes, dtype="float32", device="cpu", bytes=4)
    assert shape(facts) == said


def test_boxes_say_what_their_numbers_are() -> None:
    recorded = read_trace(Path(__file__).parents[1] / "data" / "pipeline-ddp.json")
    shown = pipeline.section([recorded], None)
    assert shown is not None
    assert re.search(r"\d+ rows<", shown)
    assert re.search(r"\d+ gradients<", shown)
    assert re.search(r"\d+ weights<", shown)


@pytest.mark.parametrize("engine", ["DataParallel", "DistributedDataParallel"])
def test_every_stage_of_both_engines_is_drawn_with_its_shapes(engine: Any) -> None:
    trace = synthetic_trace(2, engine=engine)
    shown = pipeline.section([trace], INFO)
    assert shown is not None
    words = words_of(shown)
    for stage in trace.stages:
        assert stage.text in words
    assert shown.count('class="stage"') == len(trace.stages)
    for said in ("1,000 \N{MULTIPLICATION SIGN} 10", "50 \N{MULTIPLICATION SIGN} 10"):
        assert said in words
    assert "Same as one process on the whole batch: difference 3e-08" in words


def test_the_followed_sample_and_weight_are_told_where_they_are() -> None:
    words = words_of(pipeline.section([synthetic_trace(2)], INFO) or "")
    assert "The followed sample (number 417) is row 3 of worker 0: 0.731." in words
    assert "gradient: 0.01 on worker 0 and 0.02 on worker 1" in words
    assert "averaged gradient: 0.015 on worker 0 and 0.015 on worker 1 (the same bits" in words


def test_a_check_that_fails_is_not_called_good() -> None:
    check = Check(how="whole batch", text="differs by 0.3", is_same=False, reason="dropout")
    shown = pipeline.section([replace(synthetic_trace(2), check=check)], INFO) or ""
    assert 'class="verdict bad"' in shown
    assert "dropout" in shown


def test_without_a_recorded_batch_the_picture_comes_from_the_settings_and_says_so() -> None:
    words = words_of(pipeline.section([], INFO) or "")
    assert "No batch of this run was recorded" in words
    assert "worker 0: 4 samples" in words
    assert "worker 2: 3 samples" in words


def test_a_run_without_settings_has_no_picture() -> None:
    assert pipeline.section([], None) is None
    assert pipeline.section([], replace(INFO, workers=10**9)) is None


def test_a_damaged_trace_is_said_and_the_others_are_shown(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1, epochs=1, trace=synthetic_trace())
    folder.pipeline_of(3).write_text('{"schema": 1, "stages": 7}')
    folder.pipeline_of(4).write_text("{")
    page = report.write(folder.path).read_text()
    assert "The trace of step 3 cannot be shown." in page
    assert "The trace of step 4 could not be read." in page
    assert "A real step, as it was recorded (step 1)" in page


def mutated(document: Any, path: list[int], value: Any) -> Any:
    """The document with one value somewhere inside replaced."""
    document = copy.deepcopy(document)
    at = document
    for number in path:
        keys: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = keys[number % len(keys)]
        if not isinstance(at[key], dict | list) or not at[key]:
            at[key] = value
            return document
        at = at[key]
    return document


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    value=st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.just([])
    | st.just({}),
)
def test_no_value_in_a_trace_or_a_scaling_study_keeps_the_page_from_being_written(
    path: list[int], value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = synthetic_run(tmp_path_factory.mktemp("run"), steps=1, ranks=1, epochs=1)
    folder.pipeline.mkdir()
    trace: Trace = synthetic_trace()
    folder.pipeline_of(1).write_text(json.dumps(mutated(to_json(trace), path, value)))
    folder.scaling.write_text(json.dumps(mutated(SCALING, path, value)))
    assert report.write(folder.path).read_text().startswith("<!doctype html>")


def test_the_slow_worker_is_marked_and_waiting_is_a_share_of_the_step(tmp_path: Path) -> None:
    story = collect(synthetic_run(tmp_path / "run", steps=60, epochs=2, slow_rank=2).path)
    words = words_of(ranks.section(story) or "")
    assert "worker 2 slow" in words
    assert words.count("holds the others up") == 2
    assert re.search(r"35 % +waits", words)


def test_of_many_workers_the_slowest_and_the_fastest_are_shown() -> None:
    many = [Rank(n, steps=1, phases={"forward": float(n)}) for n in range(100)]
    shown = [rank.rank for rank in ranks.pick(many)]
    assert shown == [*range(16), *range(84, 100)]


def test_the_timeline_is_a_window_of_whole_steps_on_one_clock(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=3, epochs=1, timeline_steps=40)
    window = read_window(folder)
    assert window is not None
    assert sorted(window.spans) == [0, 1, 2]
    assert window.steps == (4, 13)
    assert window.end - window.begin == pytest.approx(10 * 42_800)
    for spans in window.spans.values():
        assert sum(span.name == "forward" for span in spans) == 10


def test_of_a_long_timeline_only_the_middle_is_read(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=2, epochs=1, timeline_steps=1500)
    window = read_window(folder)
    assert window is not None
    assert window.steps is not None
    assert 600 < window.steps[0] < 900
    assert window.steps[1] - window.steps[0] == 9
    assert {len([s for s in each if s.name == "backward"]) for each in window.spans.values()} == {
        10
    }


def test_a_worker_with_another_clock_is_shifted_to_the_first_ones(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=2, epochs=1, timeline_steps=20)
    path = folder.timeline_of(1)
    lines = path.read_text().splitlines()
    events = [json.loads(line.rstrip(",")) for line in lines[1:]]
    for event in events:
        event["ts"] = event["ts"] - 1_000_000 if event["ph"] != "M" else 0
    clock = {"name": "paceline_clock", "ph": "M", "ts": 0, "pid": 1, "tid": 0}
    events.insert(1, {**clock, "args": {"offset_ns": 10**9, "error_ns": 5}})
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)))
    window = read_window(folder)
    assert window is not None
    assert all(len(spans) > 50 for spans in window.spans.values())


@pytest.mark.parametrize(
    "content",
    ["", "[", "[\n]", "{}", '{"traceEvents": [', "nonsense", '[{"name": 1}, 2, null, "x"', "[[[[["],
)
def test_a_timeline_without_a_span_is_no_timeline(content: str, tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=1, epochs=1, timeline_steps=1)
    folder.timeline_of(0).write_text(content)
    assert read_window(folder) is None


def test_a_timeline_in_chromes_other_format_is_read_too(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=1, epochs=1, timeline_steps=4)
    events = json.loads(folder.timeline_of(0).read_text().rstrip().removesuffix(",") + "]")
    folder.timeline_of(0).write_text(json.dumps({"traceEvents": events, "other": 1}))
    window = read_window(folder)
    assert window is not None
    assert window.spans[0]


def test_spans_that_overlap_are_counted_once() -> None:
    window = Window(10, 110, {})
    spans = [Span("wait", 2, b, n) for b, n in ((0, 20), (15, 10), (16, 2), (50, 10), (100, 99))]
    assert covered(spans, window) == 15 + 10 + 10


def test_measured_and_predicted_sizes_are_told_apart() -> None:
    shown = scaling.section(SCALING) or ""
    words = words_of(shown)
    assert "4 workers are 3.33 times as fast as one: 83 % of the ideal." in words
    assert "Strong scaling" in words
    assert "64 predicted, 100 Gb/s 39 61 %" in words
    assert shown.count("line predicted") == 2
    assert "Use a batch of 256: predicted gain 12 %." in words


def test_the_parts_of_the_lost_time_add_up_to_all_of_it() -> None:
    words = words_of(scaling.section(SCALING) or "")
    row = words.partition("together")[2].split("One thing")[0].split("%")
    *parts, whole = [float(each.split()[-1]) for each in row[:-1]]
    assert whole == 100
    assert sum(parts) == pytest.approx(100, abs=1.5)


@pytest.mark.parametrize(
    "study",
    [{}, {"sizes": []}, {"sizes": [{"workers": 0, "speedup": 1}]}, {"sizes": 3}, {"sizes": [None]}],
)
def test_a_study_without_a_measurement_is_left_out(study: dict[str, Any]) -> None:
    assert scaling.section(study) is None


def test_a_single_size_is_shown_without_a_comparison() -> None:
    words = words_of(scaling.section({"sizes": [{"workers": 1, "speedup": 1}]}) or "")
    assert "Only one worker was measured" in words
