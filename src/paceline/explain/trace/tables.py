"""The tables under the picture: epochs of a training, layers of a prediction."""

from __future__ import annotations

import textwrap

from paceline.explain.trace.lines import WIDTH, Line, cut, paragraph, short_number
from paceline.observe.units import shape_text
from paceline.record.stages import Prediction, Training


def draw_training(training: Training, width: int = WIDTH) -> list[Line]:
    """The table of epochs, an observation beside each, and one below."""
    has_evaluation = any(e.evaluation_loss is not None for e in training.epochs)
    header = f"{'epoch':>7} {'loss':>9} {'accuracy':>9} {'seconds':>8}"
    header += f" {'unseen':>9}" if has_evaluation else ""
    lines = [Line("Training", "title"), Line(f"{header}  what it says", "quiet")]
    for epoch in training.epochs:
        accuracy = "-" if epoch.accuracy is None else f"{epoch.accuracy:.1%}"
        row = f"{epoch.epoch:>7} {short_number(epoch.loss):>9} {accuracy:>9} {epoch.seconds:>8.3f}"
        if has_evaluation:
            loss = epoch.evaluation_loss
            row += f" {'-' if loss is None else short_number(loss):>9}"
        said = textwrap.wrap(epoch.observation, max(10, width - len(row) - 2)) or [""]
        lines.append(Line(f"{row}  {said[0]}"))
        lines += [Line(" " * (len(row) + 2) + more) for more in said[1:]]
    if has_evaluation:
        told = "unseen: the loss on rows that are not trained on"
        lines.append(Line(f"  {told}", "quiet"))
    return [*lines, Line(""), *paragraph(training.observation, width, "  ")]


def draw_prediction(prediction: Prediction, width: int = WIDTH) -> list[Line]:
    """One sample on its way through the layers."""
    rows = [("input", "", facts.shape, facts) for facts in prediction.input[:1]] + [
        (each.name, each.kind, each.output.shape, each.output) for each in prediction.layers
    ]
    layers = [" ".join(part for part in (name, kind) if part) for name, kind, _, _ in rows]
    wide = min(28, max([5, *map(len, layers)]))
    shapes = [shape_text(shape) for _, _, shape, _ in rows]
    long = min(18, max([5, *map(len, shapes)]))
    header = f"  {'layer':<{wide}}  {'shape':<{long}}"
    header += f"  {'min':>8} {'mean':>8} {'max':>8} {'zeros':>6}"
    title = f"Prediction for sample {prediction.index:,}, layer by layer"
    lines = [Line(title, "title"), Line(header, "quiet")]
    for label, shape, (_, _, _, facts) in zip(layers, shapes, rows, strict=True):
        stats = facts.stats
        told = f"{'(too few numbers to hide them)':>33}"
        if stats is not None:
            numbers = (stats.min, stats.mean, stats.max)
            told = " ".join(f"{short_number(number):>8}" for number in numbers)
            told += f" {stats.zeros:>6.0%}"
        lines.append(Line(f"  {_last(label, wide):<{wide}}  {cut(shape, long):<{long}}  {told}"))
    if prediction.answer is not None:
        lines += [Line(""), *paragraph(f"Answer: {prediction.answer.text}.", width, "  ")]
    return lines


def _last(label: str, room: int) -> str:
    """The end of a long name, which says more than its beginning."""
    return label if len(label) <= room else f"...{label[-(room - 3) :]}"
