"""The document of the report: what the page is drawn from, out of whole and of hostile files."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentences import says
from synthetic_run import GENERATIONS, SCALING, synthetic_run, synthetic_trace

from paceline.files.run_folder import EventWriter, RunFolder, read_info, write_info
from paceline.record.stages import Layer, Part, Stage
from paceline.show import report
from paceline.show.report import document
from paceline.show.report.collect import collect
from paceline.show.report.document import build
from paceline.show.report.run_data import RankTotals, RunData
from paceline.show.report.sentences import time_by_phase, waiting_verdict
from paceline.show.report.window import read_window
from paceline.telemetry.phases import Phase

SECTIONS = (
    *("learning", "pipeline", "workers", "timeline", "scaling", "checkpoints"),
    "details",
)


def built(folder: RunFolder) -> Any:
    """The document as a browser reads it: through JSON."""
    return json.loads(report.page.embedded(build(collect(folder.path))))


def study(path: Path, **keys: Any) -> Any:
    folder = RunFolder(path)
    folder.create()
    folder.scaling.write_text(json.dumps({**SCALING, **keys}))
    return built(folder)["scaling"]


def test_every_section_is_there_when_everything_was_recorded(tmp_path: Path) -> None:
    whole = {"timeline_steps": 15, "trace": synthetic_trace(), "scaling": SCALING}
    found = built(synthetic_run(tmp_path / "run", steps=20, messages=["hello"], **whole))
    assert all(found[name] for name in SECTIONS)
    assert (found["name"], found["status"], found["missing"]) == ("run", "finished", [])


def test_a_bare_run_has_no_section_for_what_it_did_not_record(tmp_path: Path) -> None:
    found = built(synthetic_run(tmp_path / "run", steps=4, epochs=1))
    absent = [name for name in SECTIONS if not found[name]]
    assert absent == ["pipeline", "timeline", "scaling"]


def test_curves_are_columns_of_as_many_points_and_metrics_are_in_order(tmp_path: Path) -> None:
    learning = built(synthetic_run(tmp_path / "run", steps=40, epochs=2))["learning"]
    charts = learning["charts"]
    names = ["loss", "accuracy", "learning rate", "gradient noise scale", "samples per second"]
    assert [each["name"] for each in charts] == names
    assert [each.get("is_share") for each in charts] == [False, True, None, None, None]
    assert charts[2]["curves"][0]["columns"][1][::13] == [0.1, 0.05, 0.025, 0.00625]
    for chart in charts:
        for curve in chart["curves"]:
            assert len({len(column) for column in curve["columns"]}) == 1
    assert [len(curve["columns"][0]) for curve in charts[0]["curves"]] == [40, 2]
    assert [event["epoch"] for event in learning["epochs"]] == [0, 1]
    assert [event["metrics"]["accuracy"] > 0.5 for event in learning["evaluations"]] == [True] * 2


def test_a_metric_that_only_evaluations_and_epochs_have_gets_a_curve(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with EventWriter(folder, 0) as writer:
        for epoch in range(3):
            facts = {"epoch": epoch, "step": 10 * epoch + 10}
            writer.write("epoch", **facts, metrics={"loss": 1.0, "f1": 0.2 + epoch / 10})
            writer.write("evaluation", **facts, metrics={"accuracy": 0.5 + epoch / 10})
    charts = built(folder)["learning"]["charts"]
    assert [each["name"] for each in charts] == ["loss", "accuracy", "f1"]
    (held_out,) = charts[1]["curves"]
    assert held_out["columns"][:2] == [[10, 20, 30], [0.5, 0.6, 0.7]]


def with_generations(path: Path) -> RunFolder:
    folder = synthetic_run(path, steps=20)
    with EventWriter(folder, 0) as events:
        for event in GENERATIONS:
            events.write("generation", **event)
    return folder


def test_deaths_and_replacements_are_on_the_time_axis(tmp_path: Path) -> None:
    found = built(with_generations(tmp_path / "run"))["generations"]
    assert says(found["verdict"], "1 worker died", "1 joined", "No step")
    times, sizes, *_ = found["columns"]
    assert times == sorted(times)
    assert sizes == [4, 4, 3, 3, 4, 4]
    rows = [(row["step"], row["what"], row["workers"]) for row in found["events"]]
    assert rows == [(8, "worker 1 was killed by signal 9", 3), (9, "worker 1 joined", 4)]


def test_rounds_between_islands_have_a_section_and_are_no_learning(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=1, ranks=1)
    for rank in range(2):
        folder.events_of(rank).unlink(missing_ok=True)
        with EventWriter(folder, rank) as events:
            events.write("start", step=0, size=2)
            for step in range(1, 9):
                values = {"drift": step, "bytes": 1000, "round_s": 0.25} if step % 4 == 0 else {}
                # As all workers of an island say the same, each counts as its part of one.
                metrics = {f"island_{name}": [0.5 * each, 0.5] for name, each in values.items()}
                metrics["loss"] = [1.0, 1.0]
                facts: dict[str, Any] = {"epoch": 0, "samples": 5, "seconds": 1.0, "phases": {}}
                events.write("step", step=step, metrics=metrics, **facts)
    found = built(folder)
    islands = found["islands"]
    assert says(islands["verdict"], "2.0 kB", "2 rounds", "1.0 kB", "250 ms", 8)
    assert islands["verdict"] in found["sentences"]
    drawn = {each["name"]: each["curves"][0]["columns"][:2] for each in islands["charts"]}
    assert drawn["island_drift"] == [[4, 8], [4, 8]]
    assert list(drawn) == ["island_drift", "island_bytes", "island_round_s"]
    names = [each["name"] for each in found["learning"]["charts"]]
    assert not [name for name in names if name.startswith("island")]


def test_what_all_wait_for_one_that_dies_is_no_transfer(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=1, ranks=1)
    for rank in range(2):
        folder.events_of(rank).unlink(missing_ok=True)
        with EventWriter(folder, rank) as events:
            events.write("start", step=0, size=3)
            for step, wait_s in ((1, 0.5), (2, 8.0)):
                facts: dict[str, Any] = {"epoch": 0, "samples": 5, "seconds": wait_s + 1}
                phases = {"forward": 1.0, "wait": wait_s}
                events.write("step", step=step, phases=phases, metrics={}, **facts)
            if rank == 0:
                died = [{"worker": 2, "how": "was hanging", "step": 2}]
                events.write("generation", step=1, generation=1, workers=2, died=died, joined=[])
    for totals in collect(folder.path).ranks.values():
        assert totals.phases[Phase.TRANSFER] == pytest.approx(0.5)
        assert totals.phases[Phase.WAIT] == pytest.approx(8.0)


@pytest.mark.parametrize("hostile", [{}, {"died": 3, "joined": [None]}, {"died": [4]}])
def test_generations_that_make_no_sense_are_drawn_as_far_as_they_do(
    hostile: dict[str, Any], tmp_path: Path
) -> None:
    folder = synthetic_run(tmp_path / "run", steps=5)
    with EventWriter(folder, 0) as events:
        events.write("generation", step=3, **hostile)
    assert len(built(folder)["generations"]["events"]) == 1


def test_of_many_workers_the_slowest_and_the_fastest_are_shown() -> None:
    many = [RankTotals(n, steps=1, phases={Phase.FORWARD: float(n)}) for n in range(100)]
    assert [rank.rank for rank in document.extremes(many)] == [*range(16), *range(84, 100)]


def test_the_phases_of_a_worker_add_up_and_the_slow_one_is_named(tmp_path: Path) -> None:
    found = built(synthetic_run(tmp_path / "run", steps=60, epochs=2, slow_rank=2))["workers"]
    assert found["slow_ranks"] == [2]
    assert found["verdict"].startswith("Worker 2 held ")
    wholes = [sum(rank["phases_s"].values()) for rank in found["ranks"]]
    assert wholes == pytest.approx([0.048] * 4, rel=0.02)
    assert found["ranks"][3]["phases_s"]["wait"] == pytest.approx(0.0166, rel=0.05)


@pytest.mark.parametrize("workers", [1, 3, 64])
def test_parts_and_layers_beyond_the_limit_are_counted(workers: int) -> None:
    parts = [Part(title=f"worker {n}", worker=n) for n in range(workers)]
    stage = Stage(name="forward", title="forward", text="", parts=parts)
    trace = synthetic_trace()
    assert trace.prediction is not None
    layers = [Layer(name="x", kind="y", output=trace.prediction.layers[0].output)] * workers
    long = replace(trace, stages=[stage], prediction=replace(trace.prediction, layers=layers))
    found = document.pipeline(long)
    assert found["stages"][0]["parts_in_all"] == found["prediction"]["layers_in_all"] == workers
    assert len(found["stages"][0]["parts"]) == min(workers, 16)


@pytest.mark.parametrize(("steps", "shown"), [(40, [16, 25]), (1500, [360, 369])])
def test_the_timeline_is_a_window_of_ten_whole_steps_on_one_clock(
    steps: int, shown: list[int], tmp_path: Path
) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=3, epochs=1, timeline_steps=steps)
    window = read_window(folder)
    assert window is not None
    assert window["steps"] == shown
    assert window["length"] == pytest.approx(10 * 43_600, rel=0.01)
    forward = window["names"].index("forward")
    for each in window["ranks"]:
        assert sum(span[0] == forward for span in each["spans"]) == 10
    assert [each["rank"] for each in window["ranks"]] == [0, 1, 2]


def test_a_timeline_that_was_recorded_into_the_run_folder_itself_is_found(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=2, epochs=1, timeline_steps=20)
    for path in list(folder.timeline.iterdir()):
        path.rename(folder.path / path.name)
    window = read_window(folder)
    assert window is not None
    assert len(window["ranks"]) == 2


def test_steps_that_a_restart_has_done_again_are_in_the_timeline_once(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=2, epochs=1, timeline_steps=20)
    for rank in range(2):
        path = folder.timeline_of(rank)
        header, *events = [json.loads(line[:-1]) for line in path.read_text().splitlines()[1:]]
        late = [event for event in events if event["args"]["step"] >= 10]
        again = [header, *({**event, "ts": event["ts"] + 6e7} for event in late)]
        with open(path, "a") as file:
            file.writelines(json.dumps(event) + ",\n" for event in again)
    window = read_window(folder)
    assert window is not None
    assert window["steps"] == [10, 15]
    assert window["length"] == pytest.approx(6 * 43_600, rel=0.02)
    forward = window["names"].index("forward")
    assert [sum(span[0] == forward for span in each["spans"]) for each in window["ranks"]] == [6, 6]


def test_in_the_timeline_a_transfer_begins_when_the_last_worker_is_ready(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=3, epochs=1, timeline_steps=20)
    window = read_window(folder)
    assert window is not None
    ready, transfer = (window["names"].index(name) for name in ("ready", "transfer"))
    by_bucket: dict[str, list[tuple[int, float]]] = {}
    for each in window["ranks"]:
        for name, lane, begin, _, facts in each["spans"]:
            if name in (ready, transfer) and lane == 1:
                by_bucket.setdefault(facts, []).append((name, begin))
    assert len(by_bucket) == 30
    for spans in by_bucket.values():
        last = max(begin for name, begin in spans if name == ready)
        began = [begin for name, begin in spans if name == transfer]
        assert began == pytest.approx([last] * 3)


@pytest.mark.parametrize("content", ["", "[\n]", "{}", "nonsense", '{"name": 1}\n[[[[', "[" * 9000])
def test_a_timeline_without_a_whole_step_is_not_a_timeline(content: str, tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=2, ranks=1, epochs=1, timeline_steps=1)
    folder.timeline_of(0).write_text(content)
    assert read_window(folder) is None


def test_measured_and_predicted_sizes_are_told_apart_and_losses_add_up(tmp_path: Path) -> None:
    found = study(tmp_path / "run")
    assert [size["workers"] for size in found["measured"]] == [1, 2, 4]
    assert [size["network"] for size in found["predicted"]] == ["100 Gb/s", "1 Gb/s"] * 2
    assert found["measured"][2]["of_ideal"] == 0.8325
    assert sum(found["measured"][2]["lost"].values()) == 100
    assert found["suggestion"] == "Use a batch of 256: predicted gain 12 %."


@pytest.mark.parametrize("sizes", [[], [{"workers": 0, "speedup": 1}], 3, [None]])
def test_a_study_without_a_measurement_is_left_out(sizes: Any, tmp_path: Path) -> None:
    assert study(tmp_path / "run", sizes=sizes) is None


def mutated(value: Any, path: list[int], new: Any) -> Any:
    """The document with one value somewhere inside replaced."""
    found = at = copy.deepcopy(value)
    for place in path:
        keys: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = keys[place % len(keys)]
        if not isinstance(at[key], dict | list) or not at[key]:
            at[key] = new
            break
        at = at[key]
    return found


def mutate_lines(path: Path, place: list[int], value: Any) -> None:
    """Replace one value in every line of a file of JSON lines."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.dumps(mutated(json.loads(line.rstrip(",")), place, value)))
        except ValueError:
            lines.append(line)
    path.write_text("\n".join(lines) + "\n")


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
@example(place=[3], value=[], where="events")
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


def test_the_reason_of_a_failure_comes_first_and_its_traceback_is_shown(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=20, ranks=2, epochs=2)
    info = read_info(folder)
    assert info is not None
    reason = "worker 1 failed in step 13: ValueError: a label that no class has"
    write_info(folder, replace(info, status="failed", reason=reason, traceback="errors.txt"))
    folder.errors.write_text("Traceback (most recent call last):\n  here\nValueError: a label\n")
    found = built(folder)
    assert found["sentences"][0].startswith("Worker 1 failed in step 13: ValueError: a label")
    assert found["traceback"][-1] == "ValueError: a label"
    folder.errors.unlink()
    folder.errors.symlink_to(tmp_path)
    assert built(folder)["traceback"] == []


def test_a_share_of_the_time_is_the_same_number_in_every_sentence(tmp_path: Path) -> None:
    spent = {"forward": 8.9, "data": 3.9, "other": 37.9, "wait": 18.7, "transfer": 30.6}
    data = RunData(RunFolder(tmp_path), "rounded")
    for rank in (0, 1):
        phases = {Phase(name): seconds for name, seconds in spent.items()}
        data.ranks[rank] = RankTotals(rank, size=2, steps=1, phases=phases)
    everything = re.findall(r"\d+(?= %)", time_by_phase(data))
    assert sum(map(int, everything)) == 100
    assert re.findall(r"\d+(?= %)", waiting_verdict(data)) == [everything[-1]]
