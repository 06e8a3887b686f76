"""Words derived from a training's numbers, and one sample through every layer to the answer."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn

from paceline import DataParallel
from paceline.errors import UsageError
from paceline.record import stages
from paceline.record.stages import Epoch, Trace
from paceline.show.trace import observe, trace_prediction
from paceline.show.trace.prediction import answer_of
from paceline.show.trace.training import with_median_times
from paceline.testing import seeded


def test_every_layer_is_noted_in_the_order_of_the_calls() -> None:
    net = seeded(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    found = trace_prediction(net, torch.ones(1, 4), index=7, kind="classes", values=True)
    assert [(layer.name, layer.kind, layer.output.shape) for layer in found.layers] == [
        ("0", "Linear", [1, 8]),
        ("1", "ReLU", [1, 8]),
        ("2", "Linear", [1, 3]),
    ]
    assert [layer.parameters for layer in found.layers] == [40, 0, 27]
    assert found.index == 7
    relu = found.layers[1].output.stats
    assert relu is not None
    assert relu.min == 0.0
    assert 0 < relu.zeros < 1
    expected = torch.softmax(net(torch.ones(1, 4)), 1)
    assert found.answer is not None
    assert found.answer.label == int(expected.argmax())
    assert found.answer.probability == pytest.approx(expected.max().item())


def test_attention_which_does_not_call_its_parts_is_a_layer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    names = [each.name for each in trace_prediction(layer, torch.randn(1, 3, 8)).layers]
    assert names[0] == "self_attn"
    assert "self_attn.out_proj" not in names


def test_a_layer_that_is_called_twice_is_noted_twice_and_a_model_without_layers_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return {"out": self.same(self.same(x)).sum(1), "rest": "text"}

    twice = trace_prediction(Twice(), torch.ones(1, 4))
    assert [layer.name for layer in twice.layers] == ["same", "same", ""]
    alone = trace_prediction(nn.Linear(2, 2), torch.ones(1, 2))
    assert [layer.kind for layer in alone.layers] == ["Linear"]


def test_modes_and_hooks_are_as_before_and_a_wrapper_is_looked_through() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    net[1].eval()
    model = DataParallel(net, ["cpu:0"])
    found = trace_prediction(model, torch.ones(1, 4))
    assert found.layers[0].output.stats is None  # too few numbers to hide them
    assert found.answer is None
    assert (net.training, net[0].training, net[1].training) == (True, True, False)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in net.modules())


def test_hooks_are_gone_after_an_error() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    with pytest.raises(RuntimeError):
        trace_prediction(net, torch.ones(1, 4))
    assert net.training
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in net.modules())


def test_a_model_that_gives_no_tensor_is_refused() -> None:
    class Words(nn.Module):
        def forward(self, _x: Tensor) -> str:
            return "yes"

    with pytest.raises(UsageError, match="without a tensor"):
        trace_prediction(Words(), torch.ones(1))


@pytest.mark.parametrize(
    ("output", "kind", "parts"),
    [
        ([[2.0]], "binary", ["class 1", "88.1%", 1]),
        ([[-2.0]], "binary", ["class 0", "88.1%", 1]),
        ([[0.0, 0.0, 9.0]], "classes", ["class 2", "100.0%"]),
        ([[1.5]], "value", ["1.5", 1]),
        ([[1.0, 2.0, 3.0, 4.0, 5.0]], "value", ["1, 2, 3, 4, ...", 1]),
        ([[3.0]], "classes", ["3", 1]),
    ],
)
def test_an_answer_is_a_class_with_its_probability_or_a_value(
    output: list[list[float]], kind: Any, parts: list[object]
) -> None:
    text = answer_of(torch.tensor(output), kind, 1.0).text
    assert text.startswith(str(parts[0]))
    assert says(text, *parts)


def epochs(losses: list[float], new: list[float] | None = None) -> list[Epoch]:
    return [
        Epoch(epoch=i + 1, loss=x, seconds=1.0, evaluation_loss=new[i] if new else None)
        for i, x in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0, 0.5, 0.3], [".*start", "falling fast", "falling fast"]),
        ([1.0, 0.9, 0.89], [".*start", "falling", "flat"]),
        ([1.0, 1.001, 1.2], [".*start", "flat", "rising"]),
        ([1.0, 0.5, 2.0], [".*start", "falling fast", "diverged: 4 times .*"]),
        ([1e-9, 1.0], [".*start", r"diverged: 1e\+09 times .*"]),
        ([1.0, 1200.0], [".*start", r"diverged: 1\.2e\+03 times .*"]),
        ([1.0, math.nan], [".*start", "diverged: .* not a number"]),
        ([1.0, math.inf, 1.0], [".*start", "diverged: .* not a number"]),
        ([0.0, 0.0], [".*start", "flat"]),
        ([-1.0, -2.0], [".*start", "falling fast"]),
    ],
)
def test_each_epoch_is_compared_with_those_before(losses: list[float], words: list[str]) -> None:
    told = [epoch.observation for epoch in observe(epochs(losses)).epochs]
    assert all(map(re.fullmatch, words, told))


@pytest.mark.parametrize(
    ("losses", "new", "words"),
    [
        ([], None, ""),
        ([0.7], None, "One epoch"),
        ([1.0, 0.5, 0.3], None, "fell from 1 to 0.3 .*still falling"),
        ([1.0, 0.5, 0.499], None, "flat now"),
        ([1.0, 0.5, 0.6], None, "rose at .*end"),
        ([1.0, 1.5], None, "nothing was learned"),
        ([1.0, 0.999, 1.001], None, "nothing was learned"),
        ([1.0, 0.1, 5.0], None, "diverged; its best epoch was 2"),
        ([1.0, math.nan, 0.5], None, "diverged; its best epoch was 3"),
        ([1.0, 0.5, 0.3, 0.2], [1.0, 0.6, 0.7, 0.9], "Overfitting since epoch 3"),
        ([1.0, 0.5, 0.3], [1.0, 0.6, 0.5], "still falling"),
        ([1.0, 0.5, 0.3], [1.0, 0.6, 0.605], "still falling"),
    ],
)
def test_all_epochs_together_are_summed_up(
    losses: list[float], new: list[float] | None, words: str
) -> None:
    said = observe(epochs(losses, new)).observation
    assert re.search(words, said)
    assert said == "" or said.endswith(".")


def test_overfitting_is_said_of_the_epoch_in_which_new_rows_get_worse() -> None:
    told = observe(epochs([1.0, 0.5, 0.3], [1.0, 0.6, 0.8])).epochs
    assert [epoch.observation for epoch in told][1] == "falling fast"
    assert told[2].observation.startswith("overfitting")


def test_a_perfect_accuracy_is_mentioned() -> None:
    rows = [Epoch(epoch=i, loss=1 / i, seconds=1.0, accuracy=i / 2) for i in (1, 2)]
    assert observe(rows).epochs[1].observation == "falling fast, every row right"


@pytest.mark.parametrize(("slowest", "is_busy"), [(0.015, False), (0.5, True)])
def test_times_are_medians_of_several_steps_and_a_busy_machine_is_named(
    slowest: float, is_busy: bool
) -> None:
    trace = stages.read(Path(__file__).parents[1] / "data" / "pipeline-ddp.json")

    def taking(seconds: float) -> Trace:
        stages = [
            replace(
                stage,
                seconds=seconds,
                parts=[
                    replace(part, seconds=part.seconds and seconds + (part.worker or 0))
                    for part in stage.parts
                ],
            )
            for stage in trace.stages
        ]
        return replace(trace, stages=stages, seconds=seconds)

    told = with_median_times(trace, [taking(seconds) for seconds in (0.01, slowest, 0.012)])
    forward = next(stage for stage in told.stages if stage.name == "forward")
    assert [part.seconds for part in forward.parts] == [0.012, 1.012]
    assert (told.seconds, forward.seconds) == (0.012, 1.012)  # the slowest worker's
    buckets = next(stage for stage in told.stages if stage.name == "buckets")
    assert [part.seconds for part in buckets.parts] == [None]
    assert told.times.startswith("Times are medians of 3 steps, of 10 ms to ")
    assert ("busy machine" in told.times) is is_busy
