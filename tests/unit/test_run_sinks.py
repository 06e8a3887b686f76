"""What a run tells its sinks, and what it does with one that is broken."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from runs import QUIET, Rows, Told, mlp, train
from sentences import says
from torch.nn import functional as F
from torch.optim import SGD

from paceline.errors import UsageError
from paceline.files import RunInfo
from paceline.run import Run, RunOptions, Sink, StepReport
from paceline.telemetry import Message, Summary, TerminalSink
from paceline.testing import run_ranks


def go(
    sinks: list[Any], folder: Path | None = None, options: RunOptions = QUIET, workers: int = 0
) -> Run:
    net = mlp()
    optimizer = SGD(net.parameters(), lr=0.1)
    run = Run(
        net, optimizer, Rows(20), global_batch=8, epochs=2, folder=folder, sinks=sinks,
        options=options, loader_workers=workers,
    )  # fmt: skip
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
        if step.ends_epoch:
            run.evaluate(lambda batch: {"rows": len(batch[1])})
            run.message("half way", "warning")
    return run


def test_a_sink_is_told_everything_in_its_order(tmp_path: Path) -> None:
    told = Told()
    go([told], tmp_path / "run")
    names = [name for name, _ in told.calls if name != "checkpoint"]
    epoch = ["step", "step", "evaluation", "message", "step", "epoch"]
    assert sorted(names) == sorted(["start", "stop", *2 * epoch])
    assert (names[0], names[-1]) == ("start", "stop")
    info, begun, lines = told.of("start")[0]
    assert (info.global_batch, begun, lines) == (8, 0, [])
    assert [report.step for report in told.of("step")] == [1, 2, 3, 4, 5, 6]
    assert [report.samples for report in told.of("step")] == [8, 8, 4, 8, 8, 4]
    assert {summary.samples for summary in told.of("epoch") + told.of("evaluation")} == {20}
    first = told.of("step")[:3]
    sums = [report.sums["loss"] for report in first]
    mean = sum(total for total, _ in sums) / sum(count for _, count in sums)
    assert told.of("epoch")[0].metrics == {"loss": pytest.approx(mean)}
    assert [(each.text, each.level) for each in told.of("message")] == [("half way", "warning")] * 2
    assert [written.step for written in told.of("checkpoint")] == [3, 6]
    assert told.of("stop") == [(6, "finished", "all steps are applied")]


def test_a_step_tells_how_many_batches_the_loaders_processes_have_ready() -> None:
    alone, ahead = Told(), Told()
    go([alone])
    go([ahead], workers=1)
    assert {report.queued for report in alone.of("step")} == {None}
    found = [report.queued for report in ahead.of("step")]
    assert all(0 <= each <= 6 for each in found)
    assert found[-1] == 0  # all were taken


def test_sinks_are_told_on_rank_0_only() -> None:
    def body(world: Any) -> int:
        told = Told()
        train(world, sinks=[told], epochs=1)
        return len(told.of("step"))

    assert run_ranks(3, body) == [7, 0, 0]


@pytest.mark.parametrize("method", ["start", "step", "epoch", "evaluation", "message", "stop"])
def test_a_sink_that_raises_is_named_once_and_switched_off(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told, calls = Told(), []

    class Broken(Told):
        pass

    def fail(*_: Any) -> None:
        calls.append(method)
        raise ConnectionError("no route to host")

    setattr(Broken, method, fail)
    run = go([Broken(), told], options=RunOptions(progress="plain"))
    assert (run.step, calls) == (6, [method])
    said = [m.text for m in told.of("message") if "Broken" in m.text]
    assert len(said) == 1
    assert f"{method}() raised ConnectionError: no route to host" in said[0]
    assert len(re.findall(r"\bBroken\b.* off\b", capsys.readouterr().out)) == 1


def test_a_sink_whose_exception_has_no_message_is_switched_off_like_any_other() -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Broken(Told):
        def step(self, _: Any) -> None:
            raise Wordless

    told = Told()
    assert go([Broken(), told]).step == 6
    assert [m for m in told.of("message") if says(m.text, "Broken", "Wordless")]


def test_a_script_may_save_after_an_interrupt_that_came_while_a_sink_was_told(
    tmp_path: Path,
) -> None:
    class Interrupted(Told):
        def step(self, report: StepReport) -> None:
            if report.step == 2:
                raise KeyboardInterrupt

    net = mlp()
    options = RunOptions(progress="quiet", handle_signals=False)
    run = Run(
        net, SGD(net.parameters(), lr=0.1), Rows(20), global_batch=8, epochs=1, folder=tmp_path,
        sinks=[Interrupted()], options=options,
    )  # fmt: skip

    def loop() -> None:
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))

    with pytest.raises(KeyboardInterrupt):
        loop()
    run.save()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002.0001"]


def test_a_subclass_of_sink_has_the_methods_that_it_cares_about() -> None:
    class Steps(Sink):
        def __init__(self) -> None:
            self.numbers: list[int] = []

        def step(self, report: StepReport) -> None:
            self.numbers.append(report.step)

    steps = Steps()
    go([steps])
    assert steps.numbers == [1, 2, 3, 4, 5, 6]


def test_a_sink_that_lacks_a_method_is_refused_by_name() -> None:
    class Half:
        def start(self) -> None: ...

    with pytest.raises(UsageError, match=r"sinks\[1\] .*Half.* step\(\)"):
        go([Told(), Half()])


def test_the_rate_of_an_epoch_that_was_resumed_is_that_of_its_own_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sink = TerminalSink("plain", None, draws=True)
    shape = {"dataset_size": 1000, "steps_per_epoch": 10, "steps": 20, "global_batch": 100}
    info = RunInfo(name="run", created=0.0, updated=0.0, epochs=2, **shape)  # type: ignore[arg-type]
    sink.start(info, 9, [])
    sink.epoch(Summary(0, 10, {"loss": 0.5}, 1.0, 1000))
    sink.epoch(Summary(1, 20, {"loss": 0.4}, 1.0, 1000))
    sink.stop(20, "finished", "")
    first, second = capsys.readouterr().out.split("samples/s\n")[1].splitlines()[:2]
    assert first.split()[-1] == "100"
    assert second.split()[-1] == "1,000"


def test_a_worker_that_came_late_sums_up_the_whole_run_and_those_who_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = {"dataset_size": 20, "steps_per_epoch": 3, "steps": 30, "global_batch": 8}
    info = RunInfo(name="run", created=0.0, updated=0.0, workers=3, epochs=10, **shape)  # type: ignore[arg-type]
    sink = TerminalSink("plain", None, draws=True, began=(2, time.time() - 60))
    sink.start(info, 28, [])
    for step, samples in ((29, 8), (30, 4)):
        sink.step(StepReport(step, 9, samples, samples, 0.1, {}, {}))
    sink.message(Message("", kind="generation", facts={"workers": 2}))
    sink.stop(30, "finished", "all steps are applied")
    # Ten epochs of 20 samples, without the 16 of two steps of an earlier start.
    assert "run finished on 2 workers: 28 steps, 184 samples" in capsys.readouterr().out
