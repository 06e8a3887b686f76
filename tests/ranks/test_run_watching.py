"""What people can see of a run: a recorded step, a timeline, the slow worker, the batch."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import QUIET, Rows, assert_same, mlp, train
from sentences import says
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from paceline.ddp import NaiveEngine
from paceline.errors import DesyncError
from paceline.files.run_folder import RunFolder, read_events, read_info
from paceline.group.world import World
from paceline.record import read
from paceline.run import Run, RunOptions
from paceline.telemetry import Phase, find_stopwatch, spans
from paceline.telemetry.stragglers import Blame
from paceline.testing import run_ranks

BLAME = Blame(rank=1, phase="data", slower_by_s=0.2, phase_s=0.21, others_phase_s=0.01, steps=8)

SAME_BITS = RunOptions(progress="quiet", same_bits=True)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(RunFolder(folder)) if event["kind"] == kind]


@pytest.mark.parametrize(
    ("size", "shards", "weigh"),
    [(1, 1, True), (2, 2, False), (2, 3, True), (2, 3, False), (3, 3, True)],
)
def test_a_chosen_step_is_recorded_and_computes_the_same(
    size: int, shards: int, weigh: bool, tmp_path: Path
) -> None:
    def body(world: World, step: int) -> Any:
        options = RunOptions(progress="quiet", trace_step=step)
        folder = tmp_path / f"run{step}"
        return train(world, folder=folder, options=options, shards=shards, weigh=weigh, epochs=1)

    watched, usual = (run_ranks(size, body, step)[0] for step in (3, 0))
    trace = read(tmp_path / "run3" / "pipeline" / "step3.json")
    assert trace.check is not None
    assert (trace.check.how, trace.check.is_same) == ("whole batch", True)
    assert [stage.name for stage in trace.stages][:2] == ["data", "sampler"]
    assert_same(watched.parameters, usual.parameters, rtol=0.0, atol=0.0)
    if size == 1:  # threads share a generator
        assert watched.between == usual.between
    assert RunFolder(tmp_path / "run3").pipeline_steps() == [3]
    assert RunFolder(tmp_path / "run0").pipeline_steps() == []


@pytest.mark.parametrize("size", [1, 3])
def test_the_next_step_is_recorded_by_all_when_somebody_asks_while_the_run_trains(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run.stop.PERIOD_S", 0.0)  # they vote in every step
    monkeypatch.setattr("paceline.run.watching.LOOK_PERIOD_S", 0.0)
    folder = RunFolder(tmp_path / "asked")
    compared = 0 if size == 1 else size * 6  # three samples, twice

    class Asking(Rows):
        loaded = 0

        def __getitem__(self, index: int) -> Any:
            self.loaded += 1
            if self.loaded == compared + 10:  # in the second step of 14
                folder.record_request.touch()
            return super().__getitem__(index)

    rows = Asking()
    asked = run_ranks(size, lambda world: train(world, dataset=rows, folder=folder.path))[0]
    usual = run_ranks(size, lambda world: train(world, folder=tmp_path / "usual"))[0]
    (step,) = folder.pipeline_steps()
    trace = read(folder.pipeline_of(step))
    assert 3 <= step <= 14
    assert trace.workers == size
    assert trace.check is not None
    assert trace.check.is_same
    assert not folder.record_request.exists()
    assert_same(asked.parameters, usual.parameters, rtol=0.0, atol=0.0)


def test_a_step_of_a_stream_is_recorded_without_numbers_of_samples(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Rows()[index] for index in range(50)])

    options = RunOptions(progress="quiet", trace_step=2)
    train(dataset=Stream(), folder=tmp_path / "run", options=options, epochs=1)
    trace = read(tmp_path / "run" / "pipeline" / "step2.json")
    assert trace.check is not None
    assert trace.check.is_same
    assert trace.dataset_rows is None


def test_a_recorded_step_that_fails_leaves_no_hook_and_is_recorded_when_it_comes_again(
    tmp_path: Path,
) -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = RunOptions(progress="quiet", trace_step=2)
    run = Run(
        net, optimizer, Rows(), global_batch=25, epochs=1, folder=tmp_path / "run", options=options
    )
    path = tmp_path / "run" / "pipeline" / "step2.json"
    hooks = [len(module._forward_hooks) for module in net.modules()]
    failures = 0
    for step in run:
        try:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
                if step.number == 2 and not failures:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            failures += 1
            assert not path.exists()
            assert [len(module._forward_hooks) for module in net.modules()] == hooks
    assert failures == 1
    assert read(path).step == 2


def test_a_step_that_is_not_finite_leaves_no_hook_either() -> None:
    net = mlp()
    data = Rows()
    data.x[:] = float("nan")
    hooks = [len(module._forward_hooks) for module in net.modules()]
    with pytest.raises(Exception, match="nan"):
        train(build=lambda: net, dataset=data, options=RunOptions(progress="quiet", trace_step=1))
    assert [len(module._forward_hooks) for module in net.modules()] == hooks


def test_the_launchers_step_is_recorded_unless_the_script_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TRACE_STEP", "4")
    train(folder=tmp_path / "launcher")
    assert RunFolder(tmp_path / "launcher").pipeline_steps() == [4]
    train(folder=tmp_path / "script", options=RunOptions(progress="quiet", trace_step=2))
    assert RunFolder(tmp_path / "script").pipeline_steps() == [2]


def test_what_cannot_be_recorded_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(**arguments: Any) -> str:
        wishes = RunOptions(progress="plain", trace_step=arguments.pop("trace_step", 2))
        train(options=wishes, epochs=1, **arguments)
        return capsys.readouterr().out

    assert said().count("Step 2 is not recorded: that needs folder=") == 1
    assert "Step 99 is not recorded: the run has 7 steps." in said(
        folder=tmp_path / "run", trace_step=99
    )
    assert says(said(folder=tmp_path / "run"), "Step 2", "not recorded: it", "applied already.")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "pipeline").touch()  # as good as a disk that is full
    assert said(folder=tmp_path / "full").count("Step 2 cannot be recorded") == 1


def test_workers_that_would_record_different_steps_are_told(tmp_path: Path) -> None:
    def body(world: World) -> None:
        options = RunOptions(progress="quiet", trace_step=world.rank)
        train(world, folder=tmp_path / "run", options=options)

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, DesyncError)
        assert "trace_step" in str(error)


def test_who_is_slow_is_written_and_said_with_the_number_of_the_runs_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def body(world: World, is_first: bool) -> None:
        net = mlp()
        run = Run(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            Rows(),
            global_batch=8,
            epochs=2,
            folder=folder,
            world=world,
            options=RunOptions(progress="plain"),
        )
        watch = find_stopwatch(world.group)
        assert watch is not None
        detector = watch.detector
        before = detector.on_blame
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
                if step.number == 6 and world.rank == 0:
                    detector._say(BLAME)
            if is_first and step.number == 4:
                run.save()
                break
        assert detector.on_blame == before

    run_ranks(2, body, True)
    run_ranks(2, body, False)
    (event,) = events(folder, "blame")
    assert event == {
        "kind": "blame",
        "t": event["t"],
        "rank": 0,
        "step": 6,
        "slow_rank": 1,
        "phase": "data",
        "slower_by_s": 0.2,
        "steps": 8,
    }
    shown = capsys.readouterr()
    assert shown.out.count(f"Step 6: {BLAME}") == 1
    assert "Worker 1" not in shown.err


def test_a_worker_that_computes_more_shards_than_others_is_not_called_slow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    busy = replace(BLAME, rank=0, phase=Phase.FORWARD, phase_s=0.023, others_phase_s=0.012)

    def body(world: World, finding: Blame, begins_with: int) -> None:
        """The batch is cut into 3 shards, as it was when a run of 2 workers began, or is since."""
        net = mlp()
        options = RunOptions(progress="plain")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        given: dict[str, Any] = {"global_batch": 8, "epochs": 1, "world": world}
        run = Run(net, optimizer, Rows(8), **given, options=options, shards=begins_with)
        watch = find_stopwatch(world.group)
        assert watch is not None
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
                if world.rank == 0:
                    run._parts.cut.adopt(3)
                    watch.detector._say(finding)

    for begins_with in (3, 2):
        run_ranks(2, body, busy, begins_with)
        said = capsys.readouterr().out
        assert "is slow" not in said
        assert "2 of 3 shards" in said
    run_ranks(2, body, replace(busy, phase_s=0.2), 3)
    assert "Worker 0 is slow" in capsys.readouterr().out


@pytest.mark.parametrize("shards", [3, 6])
def test_only_fetching_samples_is_data_and_the_rest_of_the_users_loop_is_not(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_BLAME", "1")

    def body(world: World) -> None:
        phases = dict[str, set[str]]()

        def note(where: str) -> None:
            watch = find_stopwatch(world.group)
            assert watch is not None
            phases.setdefault(where, set()).add(watch.phase)

        class Noting(Rows):
            def __getitem__(self, index: int) -> Any:
                note("dataset")
                return super().__getitem__(index)

        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        arguments = {"global_batch": 12, "epochs": 2, "shards": shards}
        run = Run(net, optimizer, Noting(), world=world, options=QUIET, **arguments)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    note("before forward")
                    loss = F.cross_entropy(run.model(x), y)
                    note("before backward")
                    step.backward(loss)
                    note("after backward")
                note("after the shards")
            note("between steps")
        assert phases.pop("dataset") == {"data"}
        assert set().union(*phases.values()) == {"other"}, phases

    run_ranks(3, body)


def test_what_a_worker_that_stands_still_says_is_kept_in_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_STALL_S", "2")

    def body(world: World) -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        arguments = {"global_batch": 8, "epochs": 1, "folder": tmp_path / "run"}
        run = Run(net, optimizer, Rows(), world=world, options=QUIET, **arguments)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            watch = find_stopwatch(world.group)
            if step.number == 2 and world.rank == 1 and watch is not None:
                watch.stalls._say("Worker 1 stands still.")

    run_ranks(2, body)
    # On a busy machine there may be real ones beside it.
    (event,) = [e for e in events(tmp_path / "run", "message") if "stands still" in e["text"]]
    assert (event["rank"], event["level"]) == (1, "warning")
    assert event["text"] in capsys.readouterr().err


def test_a_timeline_is_recorded_into_the_folder_until_the_loop_ends(tmp_path: Path) -> None:
    options = RunOptions(progress="quiet", timeline=True)
    train(folder=tmp_path / "run", options=options)
    assert not spans.is_on()
    lines = json.loads(RunFolder(tmp_path / "run").timeline_of(0).read_text())
    names = {line["name"] for line in lines}
    assert {"data", "forward", "backward", "optimizer"} <= names


def test_a_timeline_that_is_recorded_already_stays_where_it_is(tmp_path: Path) -> None:
    spans.start(tmp_path / "mine", 0)
    try:
        train(folder=tmp_path / "run", options=RunOptions(progress="quiet", timeline=True))
        assert spans.is_on()
    finally:
        spans.stop()
    assert not RunFolder(tmp_path / "run").timeline.exists()


def test_the_launchers_timeline_goes_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TIMELINE", str(tmp_path / "launcher"))
    try:
        train(folder=tmp_path / "run", options=RunOptions(progress="quiet", timeline=True))
    finally:
        spans.stop()
    assert (tmp_path / "launcher" / "rank0.trace.json").exists()
    assert not RunFolder(tmp_path / "run").timeline.exists()


def test_a_timeline_that_cannot_be_written_is_said_and_the_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "timeline" / "rank0.trace.json").mkdir(parents=True)
    options = RunOptions(progress="plain", timeline=True)
    train(folder=tmp_path / "run", options=options)
    train(options=options)
    assert capsys.readouterr().out.count("There is no timeline: ") == 2


def test_every_run_says_how_its_batch_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "Global batch 8 on 2 workers, in 2 shards of at most 4 rows."

    def body(world: World, name: str, *lines: str) -> None:
        options = RunOptions(progress="plain", policy=lines)
        train(world, folder=tmp_path / name, options=options, epochs=1)

    run_ranks(2, body, "run")
    info = read_info(RunFolder(tmp_path / "run"))
    assert info is not None
    assert info.policy == [sentence]
    assert sentence in capsys.readouterr().out
    run_ranks(2, body, "own", "As on one device.")
    assert "As on one device." in (shown := capsys.readouterr().out)
    assert sentence not in shown


def test_advice_on_noise_is_said_once_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RunOptions(progress="plain", noise_every=1)
    train(folder=tmp_path / "run", options=options, shards=2, epochs=3)
    found = events(tmp_path / "run", "noise")
    assert len(found) == 3
    shown = capsys.readouterr().out
    assert shown.count("noise scale") == 1
    assert " ".join(shown.split()).endswith(found[-1]["advice"])


@pytest.mark.parametrize(("shards", "merges"), [(1, False), (4, True)])
def test_noise_that_cannot_be_measured_is_said_once(
    shards: int, merges: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = RunOptions(progress="plain", noise_every=1, merge_shards=merges)
    train(folder=tmp_path / "run", options=options, shards=shards)
    assert capsys.readouterr().out.count("The gradient noise scale cannot be measured") == 1
    assert events(tmp_path / "run", "noise") == []


def test_a_quiet_run_says_nothing_of_all_this(capsys: pytest.CaptureFixture[str]) -> None:
    train(options=QUIET)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "given", [{"engine": NaiveEngine}, {"options": SAME_BITS}], ids=["naive", "same bits"]
)
def test_a_launcher_hears_who_waits_with_any_engine(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends a worker that hangs only where another one says that it waits."""
    monkeypatch.setenv("PACELINE_STALL_S", "60")
    arguments = {"options": QUIET, **given}

    def body(world: World) -> list[bool]:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run = Run(net, optimizer, Rows(16), global_batch=8, epochs=1, world=world, **arguments)
        watch = find_stopwatch(run.membership.group)
        assert watch is not None
        seen = [watch.since_ns]
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            seen.append(watch.since_ns)
        return [before < after for before, after in pairwise(seen)]

    for moved in run_ranks(2, body):
        assert moved == [True, True]
