"""A callback on one worker asks for something, and all do it after the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import Rows, train
from torch.nn import functional as F

from paceline import Callback
from paceline.checkpoint import Written
from paceline.errors import UsageError
from paceline.group.world import World
from paceline.run import RunOptions, StepReport, Summary
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
