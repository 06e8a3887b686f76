"""Reading run folders of any kind: complete, restarted, running, damaged, empty, hostile."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sentences import says
from synthetic_run import BATCH, SCALING, synthetic_run, synthetic_trace

from paceline.errors import UsageError
from paceline.files.run_folder import EventWriter, RunFolder, RunInfo, write_info
from paceline.record.stages import write as write_trace
from paceline.show.report.collect import collect, find_runs
from paceline.show.report.curves import Curve
from paceline.show.report.document import build
from paceline.show.report.pace import PaceTable, RecentStep, find_spans
from paceline.show.report.run_data import RunData
from paceline.show.report.sentences import (
    best_accuracy,
    how_to_continue,
    learning_sentences,
    pauses,
    progress,
    time_by_phase,
    waiting_verdict,
    what_was_trained,
)
from paceline.telemetry import Phase

INFO = RunInfo(name="small", created=1.0, updated=2.0, workers=2, global_batch=4)


def folder_with(path: Path, info: RunInfo | None = INFO) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    if info is not None:
        write_info(folder, info)
    return folder


def write_steps(folder: RunFolder, rank: int, *steps: dict[str, Any], size: int = 2) -> None:
    writer = EventWriter(folder, rank)
    writer.write("start", size=size, pid=1, host="h", device="cpu", step=0)
    for index, step in enumerate(steps, start=1):
        facts = {"step": index, "epoch": 0, "samples": 2, "seconds": 0.5, "metrics": {}}
        writer.write("step", **facts | step)
    writer.close()


def test_metrics_are_summed_over_ranks_however_uneven_they_are(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    write_steps(folder, 0, {"metrics": {"loss": [9.0, 3]}})
    write_steps(folder, 1, {"metrics": {"loss": [1.0, 1]}})
    (point,) = collect(folder.path).metrics["loss"].points(10)
    assert point.mean == 10 / 4


def test_speed_is_all_workers_samples_by_the_time_that_passed_inside_steps_or_not(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path / "run")
    for rank, samples in enumerate((3, 1)):
        with EventWriter(folder, rank) as writer:
            writer.write("start", t=100.0, size=2, step=0)
            for step, t in ((1, 100.5), (2, 101.5)):  # the second begins after an evaluation
                writer.write("step", t=t, step=step, samples=samples, seconds=0.1)
    curve = collect(folder.path).rate
    assert [point.mean for point in curve.points()] == [pytest.approx(8.0), pytest.approx(4.0)]
    assert curve.points(1)[0].mean == pytest.approx(8 / 1.5)


def test_steps_that_a_restart_has_undone_do_not_count(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    writer = EventWriter(folder, 0)
    for begin, loss in ((0, 5.0), (2, 7.0)):
        writer.write("start", t=10.0 + begin, size=1, pid=1, host="h", device="cpu", step=begin)
        for step in range(begin + 1, 5):
            facts = {"samples": 1, "seconds": 1.0, "metrics": {"loss": [loss, 1]}}
            writer.write("step", t=10.5 + begin, step=step, epoch=0, **facts)
        writer.write("epoch", t=10.6 + begin, epoch=0, step=4, metrics={"loss": loss})
    writer.close()
    data = collect(folder.path)
    assert [p.mean for p in data.metrics["loss"].points(9)] == [5.0, 5.0, 7.0, 7.0]
    assert [event["metrics"]["loss"] for event in data.events["epoch"]] == [7.0]
    assert (len(data.starts), data.redone, data.ranks[0].steps) == (2, 2, 4)


def test_every_sample_of_a_synthetic_run_is_counted_once(tmp_path: Path) -> None:
    data = collect(synthetic_run(tmp_path / "run", steps=20, ranks=3, epochs=2).path)
    assert sum(rank.samples for rank in data.ranks.values()) == 20 * BATCH
    assert data.missing == []
    assert [len(data.events[kind]) for kind in ("epoch", "checkpoint")] == [2, 2]
    assert data.steps == 20


def test_memory_does_not_grow_with_the_length_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Curve.__init__, "__defaults__", (256,))
    peaks = []
    for steps in (300, 1500):
        folder = synthetic_run(tmp_path / f"run{steps}", steps=steps, ranks=2, epochs=3)
        tracemalloc.start()
        collect(folder.path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 500_000


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda f: f.info.unlink(), "no run.json"),
        (lambda f: f.info.write_text("{"), "could not be read"),
        (lambda f: f.info.write_text('{"schema": 99}'), "has schema 99"),
        (lambda f: f.events_of(1).unlink(), "no events of worker 1"),
        (lambda f: f.events_of(1).write_bytes(b"\xff\xfe\n{}\n"), "2 lines of events/rank1.jsonl"),
        (lambda f: f.scaling.write_text("[1]"), "scaling study could not be read"),
        (lambda f: f.scaling.mkdir(), "scaling study could not be read"),
        (lambda f: f.pipeline_of(4).write_text("{"), "recording of step 4 could not be read"),
        (lambda f: f.pipeline_of(4).write_text('{"schema": 1}'), "step has no 'engine'"),
    ],
)
def test_what_is_missing_or_damaged_is_said_on_the_page(
    break_it: Any, said: str, tmp_path: Path
) -> None:
    trace = synthetic_trace()
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=2, epochs=1, trace=trace)
    break_it(folder)
    data = collect(folder.path)
    assert any(said in each for each in data.missing)
    assert data.traces == [trace]


@pytest.mark.parametrize("place", ["", "runs/inner", "checkpoints"])
def test_a_folder_without_a_run_is_a_mistake_that_names_the_run_in_it_or_around_it(
    place: str, tmp_path: Path
) -> None:
    if place == "checkpoints":
        asked, run = tmp_path / "run" / place, tmp_path / "run"
        asked.mkdir(parents=True)
        folder_with(run)
    else:
        asked, run = tmp_path / "asked", tmp_path / "asked" / place
        run.mkdir(parents=True)
        if place:
            folder_with(run)
    with pytest.raises(UsageError, match="has no run") as error:
        collect(asked)
    assert (str(run) in error.value.advice) == bool(place)


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        collect(tmp_path / "nothing")


def test_half_a_last_line_is_left_for_later_and_not_called_damaged(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1, epochs=1)
    with open(folder.events_of(0), "ab") as file:
        file.write(b'{"kind":"step","t":1,"ra')
    assert collect(folder.path).missing == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"schema": 1, "sizes": [{"workers": 1, "speedup": 1.0}]}))
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=2, epochs=1)
    for path in (folder.scaling, folder.events / "rank2.jsonl", folder.path / "pipeline"):
        os.symlink(secret, path)
    data = collect(folder.path)
    assert data.study is None
    assert sorted(data.ranks) == [0, 1]


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1, epochs=1)
    os.mkfifo(folder.scaling)
    os.mkfifo(folder.events / "rank1.jsonl")
    os.mkfifo(folder.path / "timeline")
    said = " ".join(collect(folder.path).missing)
    assert re.search(r"scaling\.json.* not a plain file", said)


def test_a_line_or_a_document_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1, epochs=1)
    with open(folder.events_of(0), "ab") as file:
        file.write(b'{"kind":"message","t":1,"rank":0,"text":"' + b"x" * 2**21 + b'"}\n')
    folder.scaling.write_bytes(b" " * (16 * 2**20 + 1))
    data = collect(folder.path)
    assert len(data.events["message"]) == 0
    assert any("larger than 16 MiB" in each for each in data.missing)


def data_of(tmp_path: Path, **options: Any) -> RunData:
    return collect(synthetic_run(tmp_path / "run", epochs=2, **{"steps": 60, **options}).path)


def test_the_slow_worker_is_named_with_its_phase_as_the_run_blamed_it(tmp_path: Path) -> None:
    said = waiting_verdict(data_of(tmp_path, slow_rank=1))
    assert said.startswith("Worker 1 ")
    assert says(said, "12.3 ms longer", "backward (computing gradients)")


def test_waiting_in_turns_is_explained_by_who_is_last(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    late, early = ({"forward": 0.03, "wait": 0.001}, {"forward": 0.01, "wait": 0.021})
    for rank in range(2):
        turns = [late if (step + rank) % 2 else early for step in range(30)]
        write_steps(folder, rank, *({"phases": phases} for phases in turns))
    data = collect(folder.path)
    assert says(waiting_verdict(data), "changes from step to step")
    told = time_by_phase(data)
    assert "65 % to computing, 32 % to waiting for slower workers and 3 % to exch" in told


def test_waiting_that_all_do_in_every_step_is_the_exchange(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    for rank in range(2):
        write_steps(folder, rank, *({"phases": {"forward": 0.01, "wait": 0.02}} for _ in range(30)))
    data = collect(folder.path)
    assert says(waiting_verdict(data), "All wait for", "exchange of gradients")
    told = time_by_phase(data)
    assert says(told, "33 % to computing", "67 % to exchanging gradients")


def test_a_metric_without_numbers_is_not_called_a_training_that_diverged(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    odd = {"loss": [1.0, 1.0], "bleu": [math.nan, 1.0]}
    write_steps(folder, 0, *({"metrics": odd} for _ in range(3)))
    (said,) = [each for each in learning_sentences(collect(folder.path)) if "bleu" in each]
    assert said == "From step 1 on, some values of bleu are not numbers."


def test_metrics_beyond_the_limit_are_counted_and_said(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    many = {f"metric {number}": [1.0, 1.0] for number in range(15)}
    for rank in range(2):
        write_steps(folder, rank, *({"metrics": many} for _ in range(2)))
    data = collect(folder.path)
    assert len(data.metrics) == 12
    assert any(says(each, "12 metrics") for each in data.missing)


@pytest.mark.parametrize("kind", ["scaling", "pipeline"])
def test_a_folder_with_a_study_or_a_batch_alone_is_not_called_empty(
    kind: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "study")
    folder.create()
    if kind == "scaling":
        folder.scaling.write_text(json.dumps(SCALING))
    else:
        write_trace(synthetic_trace(), folder.pipeline_of(1))
    data = collect(folder.path)
    assert "nothing in this folder" not in what_was_trained(data)
    assert "no run" in what_was_trained(data)
    assert data.missing == []
    assert progress(data) == ""
    assert build(data)["status"] is None


def test_workers_that_are_even_are_not_blamed(tmp_path: Path) -> None:
    assert waiting_verdict(data_of(tmp_path, slow_rank=None)).startswith("No worker holds ")


def test_one_worker_has_no_others_to_wait_for(tmp_path: Path) -> None:
    assert "no waiting" in waiting_verdict(data_of(tmp_path, ranks=1, slow_rank=None))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("finished", "It finished: 60 steps in 2 epochs"),
        ("running", "It was still running when this page was made: 60 steps"),
        ("stopped", "It was stopped after 60 steps in 2 epochs"),
        ("failed", "It failed after 60 steps in 2 epochs"),
    ],
)
def test_the_end_is_said_in_words(status: str, words: str, tmp_path: Path) -> None:
    data = data_of(tmp_path, status=status)
    data.read_t = data.last_t + 1
    assert words in progress(data)


def run_of(path: Path, host: str, pid: int) -> RunData:
    """A run that says it is running, with one worker on `host`."""
    folder = folder_with(path, replace(INFO, workers=1, steps=120))
    with EventWriter(folder, 0) as writer:
        writer.write("start", size=1, pid=pid, host=host, device="cpu", step=0)
        writer.write("step", step=1, epoch=0, samples=2, seconds=0.5, metrics={})
    return collect(folder.path)


ZOMBIE = "a child that nobody has waited for"


@pytest.mark.parametrize("how", ["never there", ZOMBIE])
def test_a_run_whose_processes_are_gone_was_killed(how: str, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    if how == ZOMBIE:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    data = run_of(tmp_path / "run", socket.gethostname(), child.pid if how == ZOMBIE else 2**22 + 1)
    child.wait()
    assert data.status == "killed"
    assert progress(data).startswith("It was killed after 1 of 120 steps (1 %)")
    assert "is training" not in what_was_trained(data)


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere.example"])
@pytest.mark.parametrize(
    ("silence_s", "status"),
    [(1.0, "running"), (200.0, "running"), (2000.0, "silent")],
    ids=["just now", "a long step", "hung"],
)
def test_a_run_that_may_be_alive_is_called_running_until_it_was_silent_for_long(
    silence_s: float, status: str, host: str, tmp_path: Path
) -> None:
    data = run_of(tmp_path / "run", host, os.getpid())
    data.read_t = data.last_t + silence_s
    assert data.status == status
    assert ("probably killed, after 1 of 120 steps" in progress(data)) == (status == "silent")


@pytest.mark.parametrize("kept", [[], [2], [2, 4]])
def test_a_run_that_was_killed_says_how_to_continue(kept: list[int], tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1, epochs=2, status="running")
    for step in kept:
        (folder.checkpoints / f"step{step:08d}").mkdir(parents=True)
    data = collect(folder.path)
    data.is_gone = True
    said = how_to_continue(data)
    parts = ["continues", f"step {kept[-1]}", "newest checkpoint"] if kept else ["no checkpoint"]
    assert says(said, *parts)
    assert said in build(data)["sentences"]


def steps_with(rank: int, pause: tuple[int, int, str], count: int) -> list[Any]:
    """What one rank writes where `pause` is a rank, a step and the phase it stands still in.

    The others wait for the sum of that step; or, where its rank had that already, in the next one,
    and not always in what counts as waiting.
    """
    paused_rank, paused_step, paused_phase = pause
    has_sum = paused_phase in ("wait", "other")
    phase = {"other": "data"}.get(paused_phase, "wait")
    when = paused_step + has_sum
    if rank == paused_rank:
        phase, when = paused_phase, paused_step
    found = []
    for step in range(1, count + 1):
        phases = {"data": 0.001, "forward": 0.01, "backward": 0.02, "other": 0.001, "wait": 0.001}
        phases[phase] += 2.0 if step == when else 0.0
        found.append({"phases": phases, "seconds": sum(phases.values())})
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("phase", ["forward", "data", "wait", "other"])
@pytest.mark.parametrize(("count", "step"), [(8, 5), (100, 77)])
def test_a_single_pause_of_one_rank_is_named_with_its_step(
    size: int, phase: str, count: int, step: int, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "run", replace(INFO, workers=size))
    for rank in range(size):
        write_steps(folder, rank, *steps_with(rank, (1, step, phase), count), size=size)
    data = collect(folder.path)
    (said,) = pauses(data)
    assert said.startswith(f"Worker 1 stood still for 2.00 s in step {step} ({phase}), and")
    found = build(data)
    assert said in found["sentences"]
    assert said in found["workers"]["verdict"]


def test_what_all_ranks_do_and_the_first_steps_are_no_pauses(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    for rank in range(2):
        usual = {"forward": 0.01, "wait": 0.001}
        first = {"forward": 3.0 if rank else 0.01, "wait": 0.01 if rank else 3.0}
        evaluated = usual | {"other": 2.0 + rank / 10}
        steps = [first, *[usual] * 20, evaluated, *[usual] * 20]
        write_steps(folder, rank, *({"phases": phases} for phases in steps))
    assert pauses(collect(folder.path)) == []


def test_an_unfinished_run_says_how_much_of_the_plan_is_done(tmp_path: Path) -> None:
    data = data_of(tmp_path, status="running")
    assert data.info is not None
    data.read_t = data.last_t + 1
    data.info = replace(data.info, steps=120)
    assert "60 of 120 steps (50 %)" in progress(data)
    assert what_was_trained(data) == "4 workers are training DigitsNet (52,650 weights) on cpu."


def test_the_best_accuracy_belongs_to_the_first_epoch_that_had_it(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    values = [0.9, 0.96, 0.95, 0.96]
    data.events["evaluation"].clear()
    for epoch, value in enumerate(values):
        data.events["evaluation"].append({"epoch": epoch, "metrics": {"accuracy": value}})
    assert best_accuracy(data) == ("held-out data", 0.96, 1)


def test_a_loss_that_stops_being_a_number_is_said_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "run")
    write_steps(folder, 0, {"metrics": {"loss": [1.0, 1]}}, {"metrics": {"loss": ["nan", 1]}})
    said = learning_sentences(collect(folder.path))
    assert said[0].startswith("From step 2 on, some values of loss are not numbers")


def test_without_two_epochs_the_loss_is_said_to_begin_where_its_curve_begins(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path / "run")
    write_steps(folder, 0, *({"metrics": {"loss": [1 / step, 1]}} for step in range(1, 101)))
    said = learning_sentences(collect(folder.path))
    parts = ("training loss fell", "1.0000", "first step", "0.0100", "last steps")
    assert any(says(each, *parts) for each in said)


def test_the_loss_is_the_mean_of_an_epoch_in_sentence_tile_and_table(tmp_path: Path) -> None:
    found = build(data_of(tmp_path))
    first, last = (event["metrics"]["loss"] for event in found["learning"]["epochs"])
    parts = ("training loss fell", f"{first:.4f} in epoch 1", f"{last:.4f} in epoch 2")
    assert any(says(each, *parts) for each in found["sentences"])
    tile = ("training loss", f"{last:.4f}", f"in epoch 2; {first:.4f} in epoch 1")
    assert tile in map(tuple, found["tiles"])


def test_a_worker_that_was_slow_and_is_no_more_is_named_once_and_not_as_slow_now() -> None:
    tables = {rank: PaceTable() for rank in range(3)}
    recent: dict[int, list[RecentStep]] = {rank: [] for rank in range(3)}
    for step in range(1, 250):
        for rank, table in tables.items():
            is_slow = rank == 1 and 121 <= step <= 210
            if rank == 1 and 211 <= step <= 241:
                continue  # it was killed, and its replacement has just joined
            own_s = 0.010 + (0.012 if is_slow else 0.0) + 1e-5 * ((step * 7 + rank) % 5)
            spent = {Phase.FORWARD: own_s, Phase.WAIT: 0.0 if is_slow else 0.012}
            table.add(step, spent, own_s)
            recent[rank] = [*recent[rank], RecentStep(step, float(step), 0, 1.0, spent)][-100:]
    (span,) = find_spans(tables, recent)
    assert (span.rank, span.first, span.last, span.is_now) == (1, 121, 210, False)


def test_the_islands_of_a_run_are_found_beside_it(tmp_path: Path) -> None:
    first, second = (synthetic_run(tmp_path / "runs" / name, steps=1, ranks=1) for name in "ab")
    other = synthetic_run(first.path / "island-1", steps=1, ranks=1)
    assert find_runs(tmp_path / "runs") == [first.path, other.path, second.path]
