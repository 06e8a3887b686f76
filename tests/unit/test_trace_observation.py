"""Words derived from the numbers of a training: each of them can be false, so each is tested."""

from __future__ import annotations

import math

import pytest

from paceline.explain.trace.observation import observe
from paceline.record.stages import Epoch


def epochs(losses: list[float], new: list[float] | None = None) -> list[Epoch]:
    return [
        Epoch(epoch=i + 1, loss=x, seconds=1.0, evaluation_loss=new[i] if new else None)
        for i, x in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0, 0.5, 0.3], ["the start", "falling fast", "falling fast"]),
        ([1.0, 0.9, 0.89], ["the start", "falling", "flat"]),
        ([1.0, 1.001, 1.2], ["the start", "flat", "rising"]),
        ([1.0, 0.5, 2.0], ["the start", "falling fast", "diverged: 4 times the best loss"]),
        ([1e-9, 1.0], ["the start", "diverged: 1e+09 times the best loss"]),
        ([1.0, 1200.0], ["the start", "diverged: 1,200 times the best loss"]),
        ([1.0, math.nan], ["the start", "diverged: the loss is not a number any more"]),
        ([1.0, math.inf, 1.0], ["the start", "diverged: the loss is not a number any more"]),
        ([0.0, 0.0], ["the start", "flat"]),
        ([-1.0, -2.0], ["the start", "falling fast"]),
    ],
)
def test_each_epoch_is_compared_with_those_before(losses: list[float], words: list[str]) -> None:
    told = [epoch.observation for epoch in observe(epochs(losses)).epochs]
    assert told[: len(words)] == words


@pytest.mark.parametrize(
    ("losses", "new", "words"),
    [
        ([], None, ""),
        ([0.7], None, "One epoch"),
        ([1.0, 0.5, 0.3], None, "fell from 1 to 0.3 and is still falling"),
        ([1.0, 0.5, 0.499], None, "is flat now"),
        ([1.0, 0.5, 0.6], None, "rose at the end"),
        ([1.0, 1.5], None, "nothing was learned"),
        ([1.0, 0.999, 1.001], None, "stayed at about"),
        ([1.0, 0.1, 5.0], None, "diverged after epoch 2"),
        ([1.0, math.nan, 0.5], None, "diverged in epoch 2"),
        ([1.0, 0.5, 0.3, 0.2], [1.0, 0.6, 0.7, 0.9], "Overfitting since epoch 3"),
        ([1.0, 0.5, 0.3], [1.0, 0.6, 0.5], "still falling"),
        ([1.0, 0.5, 0.3], [1.0, 0.6, 0.605], "still falling"),
    ],
)
def test_all_epochs_together_are_summed_up(
    losses: list[float], new: list[float] | None, words: str
) -> None:
    said = observe(epochs(losses, new)).observation
    assert words in said
    assert said == "" or said.endswith(".")


def test_overfitting_is_said_of_the_epoch_in_which_new_rows_get_worse() -> None:
    told = observe(epochs([1.0, 0.5, 0.3], [1.0, 0.6, 0.8])).epochs
    assert [epoch.observation for epoch in told][1] == "falling fast"
    assert told[2].observation.startswith("overfitting")


def test_a_perfect_accuracy_is_mentioned() -> None:
    rows = [Epoch(epoch=i, loss=1 / i, seconds=1.0, accuracy=i / 2) for i in (1, 2)]
    assert observe(rows).epochs[1].observation == "falling fast, every row right"
