"""The drawn sections of the report, from whole and from hostile files."""

from __future__ import annotations

import copy
import html
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
from paceline.explain.report import sections
from paceline.explain.report.collect import Rank, Story, collect
from paceline.explain.report.series import read_window
from paceline.explain.report.step import pipeline, shape_of
from paceline.observe.phases import Phase
from paceline.observe.run_folder import RunFolder
from paceline.record.schema import read as read_trace
from paceline.record.stages import Check, Part, Stage, TensorFacts, Trace

TIMES = "\N{MULTIPLICATION SIGN}"


def words_of(markup: str | None) -> str:
    without_data = re.sub(r"<script.*?</script>", " ", markup or "")
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", without_data)))


def drawn(trace: Trace) -> str:
    return pipeline(Story(RunFolder("x"), "x", traces=[trace])) or ""


def study(folder: Path, **keys: Any) -> str | None:
    made = RunFolder(folder)
    made.create()
    made.scaling.write_text(json.dumps({**SCALING, **keys}))
    return sections.scaling(collect(folder))


@pytest.mark.parametrize("workers", [1, 3, 4, 64])
def test_a_row_has_a_box_for_each_worker_or_counts_them_in_the_last(workers: int) -> None:
    parts = [Part(title=f"worker {n}", worker=n) for n in range(workers)]
    stage = Stage(name="forward", title="forward", text="", parts=parts)
    titles = re.findall(r"<b>(.*?)</b>", drawn(replace(synthetic_trace(), stages=[stage])))
    shown = [f"worker {n}" for n in range(workers if workers <= 4 else 3)]
    assert titles[: len(shown) + 1] == shown + (["… 61 more"] if workers == 64 else [])


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("x", [50, 10], f"50 {TIMES} 10"),
        ("x", [1000], "1,000 values"),
        ("own gradients", [385], "385 gradients"),
        ("row numbers", [1], "1 row"),
        ("x", [], "one number"),
    ],
)
def test_shapes_are_said_as_people_say_them(name: str, sizes: list[int], said: str) -> None:
    facts = TensorFacts(name=name, shape=sizes, dtype="float32", device="cpu", bytes=4)
    assert shape_of(facts) == said


def test_a_recorded_file_of_an_engine_is_drawn_with_rows_gradients_and_weights() -> None:
    shown = drawn(read_trace(Path(__file__).parents[1] / "data" / "pipeline-ddp.json"))
    for noun in ("rows", "gradients", "weights"):
        assert re.search(rf"\d+ {noun}<", shown)


@pytest.mark.parametrize("engine", ["DataParallel", "DistributedDataParallel"])
def test_every_stage_of_both_engines_is_drawn_with_its_shapes_and_the_check(engine: Any) -> None:
    trace = synthetic_trace(2, engine=engine)
    words = words_of(drawn(trace))
    for said in (f"1,000 {TIMES} 10", f"50 {TIMES} 10", *(stage.text for stage in trace.stages)):
        assert said in words
    assert "Same as one process on the whole batch: difference 3e-08" in words


def test_the_followed_sample_and_weight_are_told_where_they_are() -> None:
    words = words_of(drawn(synthetic_trace(2)))
    assert "The followed sample (number 417) is row 3 of worker 0: 0.731." in words
    assert "gradient: 0.01 on worker 0 and 0.02 on worker 1" in words
    assert "averaged gradient: 0.015 on worker 0 and 0.015 on worker 1 (the same bits" in words


def test_a_check_that_fails_is_not_called_good() -> None:
    check = Check(how="whole batch", text="differs by 0.3", is_same=False, reason="dropout")
    shown = drawn(replace(synthetic_trace(2), check=check))
    assert 'class="verdict bad"' in shown
    assert "dropout" in shown


def test_the_slow_worker_is_marked_and_waiting_is_a_share_of_the_step(tmp_path: Path) -> None:
    story = collect(synthetic_run(tmp_path / "run", steps=60, epochs=2, slow_rank=2).path)
    words = words_of(sections.workers(story))
    assert "worker 2 slow" in words
    assert words.count("holds the others up") == 1
    assert re.search(r"3 1,920 29\.1 ms .* 16\.6 ms 2\.33 ms 35 % They ran on", words)


def test_of_many_workers_the_slowest_and_the_fastest_are_shown() -> None:
    many = [Rank(n, steps=1, phases={Phase.FORWARD: float(n)}) for n in range(100)]
    assert [rank.rank for rank in sections.extremes(many)] == [*range(16), *range(84, 100)]


@pytest.mark.parametrize(("steps", "shown"), [(40, (17, 26)), (1500, (304, 313))])
def test_the_timeline_is_a_window_of_ten_whole_steps_on_one_clock(
    steps: int, shown: tuple[int, int], tmp_path: Path
) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=3, epochs=1, timeline_steps=steps)
    window = read_window(folder)
    assert window is not None
    assert window.steps == shown
    assert window.end - window.begin == pytest.approx(10 * 42_800)
    for spans in window.spans.values():
        assert sum(span.name == Phase.FORWARD for span in spans) == 10
    assert sorted(window.spans) == [0, 1, 2]


def test_a_worker_of_another_machine_is_shifted_to_the_first_ones_clock(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=2, epochs=1, timeline_steps=20)
    path = folder.timeline_of(1)
    events = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:]]
    clock = {"unix_minus_monotonic_ns": 10**9, "zero_unix_ns": 10**9}
    events[0]["args"] |= {"machine": "elsewhere", **clock}
    for event in events[1:]:
        event["ts"] -= 1_000_000
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)))
    window = read_window(folder)
    assert window is not None
    assert all(len(spans) > 50 for spans in window.spans.values())
    assert any("clocks were not compared" in each for each in window.notes)


@pytest.mark.parametrize("content", ["", "[\n]", "{}", "nonsense", '{"name": 1}\n[[[[', "[" * 9000])
def test_a_timeline_without_a_span_is_not_a_timeline(content: str, tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=1, epochs=1, timeline_steps=1)
    folder.timeline_of(0).write_text(content)
    assert read_window(folder) is None


def test_measured_and_predicted_sizes_are_told_apart_and_losses_add_up(tmp_path: Path) -> None:
    shown = study(tmp_path / "run") or ""
    words = words_of(shown)
    assert "4 workers are 3.33 times as fast as one: 83 % of the ideal." in words
    assert "Strong scaling" in words
    assert "64 predicted, 100 Gb/s 39 61 %" in words
    assert shown.count('"look":"look-predicted"') == 2
    assert "Use a batch of 256: predicted gain 12 %." in words
    lost = re.findall(r"([\d.]+).%", words.partition("Shares of the lost time")[2].split("One")[0])
    assert sum(map(float, lost)) == pytest.approx(100, abs=1.5)


@pytest.mark.parametrize("sizes", [[], [{"workers": 0, "speedup": 1}], 3, [None]])
def test_a_study_without_a_measurement_is_left_out(sizes: Any, tmp_path: Path) -> None:
    assert study(tmp_path / "run", sizes=sizes) is None


def test_a_single_size_is_shown_without_a_comparison(tmp_path: Path) -> None:
    words = words_of(study(tmp_path / "run", sizes=[{"workers": 1, "speedup": 1}], predicted=[]))
    assert "Only one worker was measured" in words


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


def mutate_lines(path: Path, place: list[int], value: Any) -> None:
    """Replace one value in every line of a file of JSON lines."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.dumps(mutated(json.loads(line.rstrip(",")), place, value)) + ",")
        except ValueError:
            lines.append(line)
    path.write_text("\n".join(line.rstrip(",") for line in lines) + "\n")


HOSTILE_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.just(10**400),
    st.floats(),
    st.sampled_from([1.7e308, -1.7e308, 5e-324, 1e300, "nan", "-inf", [], {}, [[]], {"a": {}}]),
    st.text(max_size=5),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    place=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    value=HOSTILE_VALUES,
    where=st.sampled_from(["run", "events", "trace", "study", "timeline"]),
)
def test_no_value_in_any_file_keeps_the_page_from_being_written(
    place: list[int], value: Any, where: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = synthetic_run(
        tmp_path_factory.mktemp("run"),
        steps=4,
        ranks=2,
        epochs=2,
        messages=["hello"],
        timeline_steps=4,
        trace=synthetic_trace(),
        scaling=SCALING,
    )
    if where == "events":
        mutate_lines(folder.events_of(0), place, value)
    elif where == "timeline":
        mutate_lines(folder.timeline_of(0), place, value)
    else:
        path = {"run": folder.info, "trace": folder.pipeline_of(1), "study": folder.scaling}[where]
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), place, value)))
    page = report.write(folder.path).read_text()
    assert page.startswith("<!doctype html>")
