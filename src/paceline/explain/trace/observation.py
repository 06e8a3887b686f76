"""What the numbers of a training say, in words. Pure: numbers in, sentences out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from paceline.record.stages import Epoch, Training

FLAT = 0.02
"""A change of the loss by less than this share is none."""
FAST = 0.25
"""From this share on the loss falls fast."""
DIVERGED = 3.0
"""A loss so many times the best one has left for good."""


def observe(epochs: Sequence[Epoch]) -> Training:
    """The same epochs with an observation each, and one for all of them."""
    told = [
        replace(epoch, observation=describe_epoch(epochs[:number], epoch))
        for number, epoch in enumerate(epochs)
    ]
    return Training(epochs=told, observation=describe_training(epochs))


def describe_epoch(before: Sequence[Epoch], epoch: Epoch) -> str:
    """A few words on one epoch, given those before it."""
    if not math.isfinite(epoch.loss):
        return "diverged: the loss is not a number any more"
    if not before:
        return "the start"
    last = before[-1]
    best = min((e.loss for e in before if math.isfinite(e.loss)), default=math.inf)
    if best > 0 and epoch.loss > DIVERGED * best:
        times = epoch.loss / best
        many = f"{times:,.0f}" if times < 1e6 else f"{times:.1g}"
        return f"diverged: {many} times the best loss"
    trend = _trend(last.loss, epoch.loss)
    if _is_overfitting(last, epoch):
        return "overfitting: better on what it trains on, worse on new rows"
    if epoch.accuracy is not None and epoch.accuracy >= 1.0:
        return f"{trend}, every row right"
    return trend


def describe_training(epochs: Sequence[Epoch]) -> str:
    """One or two sentences on all epochs: what happened, and what it suggests."""
    if not epochs:
        return ""
    first, last = epochs[0], epochs[-1]
    for epoch in epochs:
        if not math.isfinite(epoch.loss):
            return (
                f"The training diverged in epoch {epoch.epoch}: the loss is not a number. "
                "Try a smaller learning rate."
            )
    if len(epochs) == 1:
        return f"One epoch, with a loss of {last.loss:.4g}: train for more to see a trend."
    best = min(epochs, key=lambda epoch: epoch.loss)
    if best.loss > 0 and last.loss > DIVERGED * best.loss:
        return (
            f"The training diverged after epoch {best.epoch}: the loss went from {best.loss:.4g} "
            f"up to {last.loss:.4g}. Try a smaller learning rate."
        )
    overfit = _overfitting_since(epochs)
    if overfit is not None:
        return (
            f"Overfitting since epoch {overfit + 1}: rows it has not seen are predicted worse, "
            f"while the training loss still falls. Epoch {overfit} was the best."
        )
    change = _trend(epochs[-2].loss, last.loss)
    if last.loss >= first.loss * (1 + FLAT):
        return f"The loss rose from {first.loss:.4g} to {last.loss:.4g}: nothing was learned."
    if last.loss > first.loss * (1 - FLAT):
        return f"The loss stayed at about {last.loss:.4g}: nothing was learned yet."
    fell = f"The loss fell from {first.loss:.4g} to {last.loss:.4g}"
    if change == "flat":
        return f"{fell} and is flat now: more epochs would change little."
    if change == "rising":
        return f"{fell} and rose at the end: the learning rate may be too large by now."
    return f"{fell} and is still falling: more epochs would help."


def _trend(before: float, now: float) -> str:
    if not math.isfinite(before):
        return "back to numbers"
    scale = max(abs(before), 1e-12)
    change = (now - before) / scale
    if change <= -FAST:
        return "falling fast"
    if change <= -FLAT:
        return "falling"
    return "flat" if change < FLAT else "rising"


def _is_overfitting(before: Epoch, epoch: Epoch) -> bool:
    """Whether the loss fell on the rows that are trained on, and rose on the others."""
    if before.evaluation_loss is None or epoch.evaluation_loss is None:
        return False
    rose = epoch.evaluation_loss > before.evaluation_loss * (1 + FLAT)
    return rose and epoch.loss < before.loss


def _overfitting_since(epochs: Sequence[Epoch]) -> int | None:
    """The number of the epoch that was best on new rows, if the last is worse by more than noise.

    One bad epoch among good ones is no trend: the last one decides.
    """
    known = [epoch for epoch in epochs if epoch.evaluation_loss is not None]
    if len(known) < 2:
        return None
    best = min(known, key=lambda epoch: epoch.evaluation_loss or 0.0)
    last = known[-1]
    assert best.evaluation_loss is not None
    assert last.evaluation_loss is not None
    is_worse = last.evaluation_loss > best.evaluation_loss * (1 + 2 * FLAT)
    return best.epoch if is_worse and last.loss < best.loss else None
