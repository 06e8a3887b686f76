"""What follows a recorded step: the epochs after it, and one prediction, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.report.markup import (
    NOTHING,
    Html,
    duration,
    figure,
    join,
    percent,
    sentence,
    table,
    tag,
    text,
)
from paceline.explain.report.picture import shape
from paceline.record.stages import Layer, Prediction, Stats, TensorFacts, Training

LAYERS_LIMIT = 64


def training_table(training: Training) -> Html:
    """The epochs that were trained after the recorded step."""
    has_accuracy = any(epoch.accuracy is not None for epoch in training.epochs)
    has_test = any(epoch.evaluation_accuracy is not None for epoch in training.epochs)
    head = ["epoch", "loss", *(["accuracy"] * has_accuracy), *(["held-out accuracy"] * has_test)]
    rows = []
    for epoch in training.epochs[:200]:
        row: list[object] = [figure(epoch.epoch), figure(epoch.loss)]
        row += [percent(epoch.accuracy)] if has_accuracy else []
        row += [percent(epoch.evaluation_accuracy)] if has_test else []
        rows.append([*row, duration(epoch.seconds), text(epoch.observation, 200)])
    last = len(head) + 1
    return join(
        [
            tag("h3", "The epochs after it"),
            tag("p", text(training.observation, 400)) if training.observation else None,
            table(
                [*head, "time", "what the numbers say"],
                rows,
                caption="Epochs of the trace",
                words=(0, last),
            ),
        ]
    )


def prediction_table(prediction: Prediction) -> Html:
    """One sample on its way through the layers, to the answer."""
    answer = prediction.answer
    layers = prediction.layers
    rows = [_input_row(tensor) for tensor in prediction.input[:4]]
    rows += [_layer_row(layer) for layer in layers[:LAYERS_LIMIT]]
    left = len(layers) - LAYERS_LIMIT
    return join(
        [
            tag("h3", "One sample through the trained model"),
            tag("p", f"Sample {figure(prediction.index)} goes through every layer to the answer."),
            table(
                ("layer", "what it is", "output", "values", "weights"),
                rows,
                caption="Prediction for one sample, layer by layer",
                words=range(4),
            ),
            tag("p", f"… and {left:,} more layers.", class_="note") if left > 0 else None,
            tag("p", tag("strong", sentence(text(answer.text, 300)))) if answer else None,
        ]
    )


def _input_row(tensor: TensorFacts) -> list[object]:
    values = values_in_words(tensor.first) if tensor.first else stats_in_words(tensor.stats)
    return [text(tensor.name, 80), "input", shape(tensor), values, NOTHING]


def _layer_row(layer: Layer) -> list[object]:
    output = layer.output
    values = values_in_words(output.first) if output.first else stats_in_words(output.stats)
    return [
        tag("code", text(layer.name, 80) or "(model)"),
        text(layer.kind, 60),
        tag("span", shape(output), class_="keep"),
        tag("span", values, class_="values"),
        figure(layer.parameters) if layer.parameters else NOTHING,
    ]


def values_in_words(values: Sequence[float]) -> str:
    """The first few values."""
    return ", ".join(figure(value, 3) for value in values[:3]) + (" …" if len(values) > 3 else "")


def stats_in_words(stats: Stats | None) -> str:
    """What values are like, where they themselves were not kept."""
    if stats is None:
        return NOTHING
    return f"{figure(stats.min)} to {figure(stats.max)}, mean {figure(stats.mean)}"
