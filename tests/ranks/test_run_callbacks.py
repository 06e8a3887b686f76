"""A callback on one worker asks for something, and all do it after the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Rows, mlp, train
from torch.nn import functional as F

from paceline import Callback
from paceline.checkpoint import Written
from paceline.errors import UsageError
from paceline.group.world import World
from paceline.run import Message, Run, RunOptions, StepReport, Summary
from paceline.testing import run_ranks

OPTIONS = RunOptions(progress="quiet", check_finite="all", keep=20)


class Asking(Callback):
    """Asks in the steps that it is told, and keeps what it hears of."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.heard: list[tuple[Any, ...]] = []
        self.evaluated: list[int] = []

    def on_step(self, report: StepReport) -> None:
        assert self.rank == 0, "sinks are told on rank 0"
        match report.step:
            case 3:
                self.ask_save()
            case 5:
                self.ask_evaluation()
            case 9:
                self.ask_stop()

    def evaluate(self) -> None:
        self.evaluated.append(self.run.step)

        def score(batch: Any) -> dict[str, Any]:
            return {"loss": F.cross_entropy(self.run.model(batch[0]), batch[1])}

        self.run.evaluate(score, Rows(9))

    def on_evaluate(self, summary: Summary) -> None:
        self.heard.append(("evaluated", summary.step, summary.samples))

    def on_checkpoint(self, written: Written) -> None:
        self.heard.append(("saved", written.step))

    def on_end(self, status: str, reason: str) -> None:
        self.heard.append((status, "run.stop()" in reason))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_workers_do_what_one_callback_asks_for_after_the_same_step(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run.stop.PERIOD_S", 0.0)  # they vote in every step

    def body(world: World) -> tuple[Asking, list[int]]:
        asking = Asking(world.rank)
        trained = train(
            world, sinks=[asking], folder=tmp_path / "run", shards=3, epochs=4, options=OPTIONS
        )
        return asking, sorted(trained.losses)

    told = run_ranks(size, body)
    # What is asked after a step is told rides in the vote of the next, which a worker alone is not
    # in need of.
    later = size > 1
    assert {tuple(steps) for _, steps in told} == {tuple(range(1, 10 + later))}
    assert [asking.evaluated for asking, _ in told] == [[5 + later]] * size
    first = told[0][0].heard
    assert [each for each in first if each[0] != "saved"] == [
        ("evaluated", 5 + later, 9),
        ("stopped", True),
    ]
    assert [each[1] for each in first if each[0] == "saved"] == [3 + later, 7, 9 + later]


def test_a_run_says_where_callbacks_go() -> None:
    with pytest.raises(UsageError, match="callbacks") as raised:
        train(callbacks=[Callback()])
    assert "sinks=" in raised.value.advice


@pytest.mark.parametrize("what", ["save", "evaluate"])
@pytest.mark.parametrize("when", ["on_step", "on_evaluate", "on_checkpoint", "on_end"])
@pytest.mark.parametrize("size", [1, 2])
def test_what_all_workers_do_together_is_refused_to_a_callback_on_one(
    size: int, when: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run.stop.PERIOD_S", 0.0)

    def body(world: World) -> tuple[list[str], list[int]]:
        warned: list[str] = []

        class Calling(Callback):
            def message(self, message: Message) -> None:
                warned.append(message.text)

        def call(self: Any, *_: Any) -> None:
            getattr(self.run, what)(*[lambda batch: {}] * (what == "evaluate"))

        class Asks(Callback):
            def on_step(self, report: StepReport) -> None:
                self.ask_evaluation()

            def evaluate(self) -> None:
                self.run.evaluate(lambda batch: {}, Rows(9))

        sinks = [Asks(), type("Wrong", (Callback,), {when: call})(), Calling()]
        folder = tmp_path / "run"
        trained = train(world, sinks=sinks, folder=folder, shards=2, epochs=2, options=OPTIONS)
        return warned, sorted(trained.losses)

    told = run_ranks(size, body)
    assert {len(steps) for _, steps in told} == {14}
    (text,) = [each for each in told[0][0] if "Wrong" in each]
    assert f"run.{what}()" in text
    assert f"ask_{'save' if what == 'save' else 'evaluation'}()" in text


@pytest.mark.parametrize("inner", ["save", "evaluate"])
@pytest.mark.parametrize("outer", ["score", "collect"])
@pytest.mark.parametrize("size", [1, 2])
def test_nothing_that_all_do_together_begins_inside_an_evaluation(
    size: int, outer: str, inner: str
) -> None:
    def body(world: World) -> None:
        net = mlp()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        run = Run(net, sgd, Rows(9), global_batch=4, epochs=1, world=world, options=OPTIONS)

        def call(found: Any) -> dict[str, Any]:
            getattr(run, inner)(*[lambda batch: {}] * (inner == "evaluate"))
            return {}

        if outer == "score":
            run.evaluate(call)
        else:
            run.evaluate(lambda batch: batch[0], collect=call)

    with pytest.raises(UsageError, match=inner):
        run_ranks(size, body)
