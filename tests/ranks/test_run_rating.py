"""What a run does by a metric: a lower learning rate, an early end; and `run.stop()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Rows, Told, mlp
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import UsageError
from paceline.files.run_folder import RunFolder, read_info
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.run.updates import find_better
from paceline.testing import run_ranks

ACCURACIES = [0.5, 0.6, 0.6, 0.55, 0.7, 0.7, 0.7, 0.7]
STEPS_PER_EPOCH = 2


def make(world: World | None = None, *, epochs: int = len(ACCURACIES), **given: Any) -> Run:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    arguments: Any = {name: given.pop(name) for name in ("folder", "sinks") if name in given}
    if plateau := given.pop("plateau", None):
        arguments["scheduler"] = ReduceLROnPlateau(optimizer, **plateau)
    options: Any = {"progress": "quiet", "best_metric": "accuracy", "better": "higher", **given}
    return Run(
        net,
        optimizer,
        Rows(16),
        global_batch=16 // STEPS_PER_EPOCH,
        epochs=epochs,
        shards=4,
        world=world,
        options=RunOptions(**options),
        **arguments,
    )


def learn(run: Run, *, stop_after: int = 0, saves: bool = False) -> list[float]:
    """Train, evaluate as planned, and return the learning rate of every step."""
    rates = []
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
        rates.append(step.lr or 0.0)
        if step.ends_epoch:
            accuracy = ACCURACIES[step.epoch % len(ACCURACIES)]
            run.evaluate(lambda _, value=accuracy: {"accuracy": value})
            if saves:
                run.save()  # what was measured is in it, and counts once
        if step.number == stop_after:
            break
    return rates


def rates_of_torch(**plateau: Any) -> list[float]:
    optimizer = torch.optim.SGD(mlp().parameters(), lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, **plateau)
    rates = []
    for accuracy in ACCURACIES:
        rates += [optimizer.param_groups[0]["lr"]] * STEPS_PER_EPOCH
        scheduler.step(accuracy)
    return rates


@pytest.mark.parametrize("size", [1, 3])
def test_a_scheduler_steps_on_the_metric_as_in_a_loop_by_hand_and_after_a_resume(
    size: int, tmp_path: Path
) -> None:
    plateau = {"mode": "max", "patience": 1, "factor": 0.5}
    expected = rates_of_torch(**plateau)
    assert len(set(expected)) == 3

    def train(world: World) -> list[float]:
        begun = make(world, folder=tmp_path / "run", plateau=plateau)
        rates = learn(begun, stop_after=8, saves=True)
        return rates + learn(make(world, folder=tmp_path / "run", plateau=plateau))

    for rates in run_ranks(size, train):
        assert rates == expected


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_whose_metric_no_longer_improves_ends_early(size: int, tmp_path: Path) -> None:
    def train(world: World) -> list[Any]:
        told, again = Told(), Told()
        first = make(world, folder=tmp_path / "run", patience=2, sinks=[told], keep_best=1)
        done = [len(learn(first))]
        done.append(len(learn(make(world, folder=tmp_path / "run", patience=2, sinks=[again]))))
        done.append(len(learn(make(world, folder=tmp_path / "run", patience=3))))
        return [done, told.of("stop") + again.of("stop")]

    for rank, (done, ends) in enumerate(run_ranks(size, train)):
        assert done == [8, 0, 8]
        if rank == 0:
            reason = "stopped early: accuracy was not better than 0.6 2 times in a row"
            assert ends == [(8, "stopped", reason)] * 2
    info = read_info(RunFolder(tmp_path / "run"))
    assert info is not None
    assert info.status == "finished"  # in the last epoch, where nothing is left to stop


@pytest.mark.parametrize("size", [1, 3])
def test_one_worker_can_end_the_run_on_all_after_one_step_and_it_continues(
    size: int, tmp_path: Path
) -> None:
    asking = size - 1

    def train(world: World) -> list[Any]:
        told = Told()
        run = make(world, folder=tmp_path / "run", epochs=500, sinks=[told], best_metric=None)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    if (step.number, world.rank) == (3, asking):
                        run.stop()
                    step.backward(F.cross_entropy(run.model(x), y))
        ended = run.step
        assert make(world, folder=tmp_path / "run", epochs=500).step == ended
        assert next(iter(run)).number == ended + 1
        return [ended, told.of("stop")[:1]]

    everyone = run_ranks(size, train)
    ended = everyone[0][0]
    assert [each for each, _ in everyone] == [ended] * size
    assert 3 <= ended < 1000
    assert ended == 3 or size > 1
    assert everyone[0][1] == [(ended, "stopped", "stopped by run.stop()")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"plateau": {"mode": "max"}, "best_metric": None}, "steps on a metric"),
        ({"plateau": {"mode": "min"}}, "mode='min', and better='higher'"),
        ({"patience": 3, "best_metric": None}, "patience .*3"),
        ({"patience": 0}, "patience .*0"),
        ({"best_metric": "hits", "better": None}, "'hits'"),
        ({"best_metric": "accuracy_drop", "better": None}, "'accuracy_drop'"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        make(**given)
    assert raised.value.advice


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("accuracy", "higher"),
        ("ema_val/F1", "higher"),
        ("top5-acc", "higher"),
        ("ema_loss", "lower"),
        ("perplexity", "lower"),
    ],
)
def test_the_usual_names_say_which_values_are_better(name: str, better: str) -> None:
    assert find_better(name, None) == better
    assert {find_better(name, "lower"), find_better(name, "higher")} == {"lower", "higher"}


def test_a_metric_that_is_spelt_wrong_is_said_once() -> None:
    told = Told()
    learn(make(best_metric="acuracy", patience=1, sinks=[told]))
    (said,) = told.of("message")
    assert said.level == "warning"
    assert "Did you mean 'accuracy'? This epoch has accuracy, loss." in said.text
