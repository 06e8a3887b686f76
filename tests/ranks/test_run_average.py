"""`ema=`: the average of the weights is torch's, at any number of workers, saved and scored."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, WIDTH, Rows, Told, assert_same, mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline import load_weights
from paceline.errors import CheckpointError, UsageError
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.testing import run_ranks, seeded
from paceline.update import WeightAverage

DECAY = 0.4


def ramped(averages: list[Tensor], now: list[Tensor], count: Tensor | int) -> None:
    """As torch blends them with a decay that grows to `DECAY`: step 5 is the first that has it."""
    number = int(count) + 1
    decay = min(DECAY, (1 + number) / (10 + number))
    get_ema_multi_avg_fn(decay)(averages, now, count)  # type: ignore[no-untyped-call]


def with_statistics() -> nn.Module:
    layers = (nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))
    return seeded(nn.Sequential(*layers))


def make(net: nn.Module, world: World | None = None, **options: Any) -> Run:
    arguments: Any = {"folder": options.pop("folder", None), "sinks": options.pop("sinks", ())}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return Run(
        net,
        optimizer,
        Rows(48),
        global_batch=16,
        epochs=2,
        shards=4,
        world=world,
        options=RunOptions(progress="quiet", **{"ema": DECAY, **options}),
        **arguments,
    )


def train(
    world: World | None = None, stop_after: int = 6, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, float]]]:
    """The weights, what an averaged model of torch's own makes of them, and what is scored."""
    net = with_statistics()
    run = make(net, world, **options)
    by_torch = AveragedModel(net, multi_avg_fn=ramped, use_buffers=True)
    scores = []

    def score(batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(run.model(batch[0]), batch[1])}

    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
        by_torch.update_parameters(net)
        if step.ends_epoch:
            before = [each.clone() for each in net.state_dict().values()]
            scores.append(run.evaluate(score) | run.evaluate(score, ema=True))
            after = net.state_dict().values()
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if step.number == stop_after:
            run.save()
            break
    assert run.ema is not None
    state = {name: each.clone() for name, each in run.ema.items()}
    return state, dict(by_torch.module.state_dict()), scores


@pytest.mark.parametrize("update", ["whole", "sharded"])
def test_the_average_is_torchs_at_any_number_of_workers(update: str) -> None:
    expected, by_torch, scored = train()
    counters = [name for name in expected if name.endswith("num_batches_tracked")]
    for name in expected.keys() - counters:
        assert torch.equal(expected[name], by_torch[name])
    for size in (2, 3):
        for state, _, scores in run_ranks(size, lambda world: train(world, update=update)):
            assert_same(state, expected)
            for mine, theirs in zip(scores, scored, strict=True):
                assert mine == pytest.approx(theirs)


def test_evaluating_on_the_average_scores_the_model_that_is_saved_as_ema(tmp_path: Path) -> None:
    told = Told()
    expected, _, scored = train(folder=tmp_path / "run", sinks=[told])
    last = told.of("evaluation")[-1].metrics
    assert last.keys() == {"ema_loss"}
    assert scored[-1]["ema_loss"] != pytest.approx(scored[-1]["loss"], rel=1e-4)
    net = with_statistics()
    report = load_weights(net, tmp_path / "run", part="ema")
    assert report.where == "['ema']"
    assert_same(dict(net.state_dict()), expected, rtol=0, atol=0)
    net.eval()
    loss = F.cross_entropy(net(Rows(48).x), Rows(48).y)
    assert loss.item() == pytest.approx(last["ema_loss"], rel=1e-5)
    with pytest.raises(CheckpointError, match="It has model, ema"):
        load_weights(net, tmp_path / "run", part="average")


def test_a_run_continues_with_its_average_at_another_number_of_workers(tmp_path: Path) -> None:
    expected, _, _ = train()
    run_ranks(2, lambda world: train(world, folder=tmp_path / "run", stop_after=4))
    for state, _, _ in run_ranks(3, lambda world: train(world, folder=tmp_path / "run")):
        assert_same(state, expected)
    with pytest.raises(UsageError, match=r"ema.* in.* checkpoint only"):
        make(with_statistics(), folder=tmp_path / "run", ema=None)


def test_in_16_bits_the_average_keeps_more_digits_than_the_weights() -> None:
    net = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(net.weight, 1.0)
    average = WeightAverage(net, 0.999)
    average.update(1)
    nn.init.constant_(net.weight, 2.0)
    average.update(100_000)
    assert average.state_dict()["weight"].item() == pytest.approx(1.001)
    with average.in_use():
        assert net.weight.item() == 1.0  # which is all that its 16 bits can say
    assert net.weight.item() == 2.0


def test_a_buffer_that_changes_its_shape_is_averaged_from_then_on() -> None:
    net = nn.BatchNorm1d(2)
    average = WeightAverage(net, 0.5)
    average.update(1)
    net.running_mean = torch.full((3,), 4.0)
    average.update(20)
    net.running_mean.zero_()
    average.update(21)
    assert average.state_dict()["running_mean"].tolist() == [2.0, 2.0, 2.0]


def test_a_weight_with_two_names_is_averaged_once() -> None:
    net = mlp()
    net.second = net[0]
    state = WeightAverage(net, 0.9).state_dict()
    assert state["0.weight"] is state["second.weight"]
    assert state.keys() == net.state_dict().keys()


@pytest.mark.parametrize("ema", [0.0, 1.0, 1.5, True, "0.9", float("nan")])
def test_an_impossible_decay_is_refused(ema: Any) -> None:
    with pytest.raises(UsageError, match=rf"ema.* {re.escape(repr(ema))}"):
        RunOptions(ema=ema)


def test_scoring_an_average_that_there_is_not_is_refused() -> None:
    run = make(mlp(), ema=None)
    with pytest.raises(UsageError, match="averages no weights"):
        run.evaluate(lambda _: {}, ema=True)
