"""Comments on epochs of a training, and one sample through every layer of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.ddp import Wrapper, bare
from paceline.errors import UsageError
from paceline.group import find_tensors
from paceline.record import Answer, Epoch, Layer, SamplePrediction, TrainedEpochs, tree_facts

FLAT = 0.02
"""A change of the loss by less than this share counts as none."""
FAST = 0.25
"""From this share on the loss counts as falling fast."""
DIVERGED = 3.0
"""A loss this many times the best one counts as diverged."""

Kind = Literal["classes", "binary", "value"]
"""What an output means: a score for each class, one score for yes or no, or a value."""


def observe(epochs: Sequence[Epoch]) -> TrainedEpochs:
    """Add an observation to each epoch, and one for all of them."""
    described = [
        replace(epoch, observation=_describe_epoch(epochs[:number], epoch))
        for number, epoch in enumerate(epochs)
    ]
    return TrainedEpochs(epochs=described, observation=_describe_training(epochs))


def _describe_epoch(before: Sequence[Epoch], epoch: Epoch) -> str:
    """A few words on one epoch, given those before it."""
    if not math.isfinite(epoch.loss):
        return "diverged: the loss is not a number"
    if not before:
        return "before training" if epoch.epoch == 0 else "the start"
    last = before[-1]
    best = min((e.loss for e in before if math.isfinite(e.loss)), default=math.inf)
    if best > 0 and epoch.loss > DIVERGED * best:
        return f"diverged: {epoch.loss / best:.2g} times the best loss"
    if last.evaluation_loss is not None and epoch.evaluation_loss is not None:
        is_worse = epoch.evaluation_loss > last.evaluation_loss * (1 + FLAT)
        if is_worse and epoch.loss < last.loss:
            return "overfitting: better on what it trains on, worse on new rows"
    every_row = ", every row right" if epoch.accuracy is not None and epoch.accuracy >= 1 else ""
    return _trend(last.loss, epoch.loss) + every_row


def _describe_training(epochs: Sequence[Epoch]) -> str:
    """One or two sentences on all epochs: what happened, and what it suggests."""
    if len(epochs) < 2:
        return "One epoch shows no trend: train for more." if epochs else ""
    first, last = epochs[0], epochs[-1]
    best = min(epochs, key=lambda e: e.loss if math.isfinite(e.loss) else math.inf)
    went = f"from {first.loss:.4g} to {last.loss:.4g}"
    is_finite = all(math.isfinite(epoch.loss) for epoch in epochs)
    if not is_finite or 0 < DIVERGED * best.loss < last.loss:
        return (
            f"The training diverged; its best epoch was {best.epoch}, with a loss of "
            f"{best.loss:.4g}. Try a smaller learning rate."
        )
    # A single bad epoch is not a trend: only the last one decides.
    known = [(e.evaluation_loss, e) for e in epochs if e.evaluation_loss is not None]
    if known:
        least, then = min(known, key=lambda pair: pair[0])
        if known[-1][0] > least * (1 + 2 * FLAT) and known[-1][1].loss < then.loss:
            return (
                f"Overfitting since epoch {then.epoch + 1}: rows it has not seen are predicted "
                f"worse, while the training loss still falls. Epoch {then.epoch} was the best."
            )
    if last.loss > first.loss * (1 - FLAT):
        return f"The loss went {went}: nothing was learned."
    advice = {
        "flat": "and is flat now: more epochs would change little.",
        "rising": "and rose at the end: the learning rate may be too large by now.",
    }.get(_trend(epochs[-2].loss, last.loss), "and is still falling: more epochs would help.")
    return f"The loss fell {went} {advice}"


def _trend(before: float, now: float) -> str:
    change = (now - before) / max(abs(before), 1e-12)
    if math.isnan(change):
        return "a number again"
    if change <= -FLAT:
        return "falling fast" if change <= -FAST else "falling"
    return "rising" if change >= FLAT else "flat"


def trace_prediction(
    model: nn.Module,
    inputs: Any,
    *,
    index: int = 0,
    expected: float | None = None,
    kind: Kind = "value",
    values: bool = False,
) -> SamplePrediction:
    """Run one sample, a batch of one row, through the model, and record every layer's output.

    Layers are the modules inside which no other one is called, in the order of their calls: those
    without children, and those that do not call theirs, as attention does. The model is in
    evaluation mode meanwhile, and no gradients are recorded.
    """
    inner = bare(model.module if isinstance(model, Wrapper) else model)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    name_by_module = {module: name for name, module in inner.named_modules()}
    was_training = {module: module.training for module in name_by_module}
    layers: list[Layer] = []
    begun: list[int] = []

    def note(module: nn.Module, _args: Any, output: Any) -> None:
        found = next(find_tensors(output), None)
        # No layer was added since this module began, so it called no other one.
        if begun.pop() == len(layers) and found is not None:
            layers.append(
                Layer(
                    name=name_by_module[module],
                    kind=type(module).__name__,
                    output=tree_facts("output", found, values=values)[0],
                    parameters=sum(param.numel() for param in module.parameters()),
                )
            )

    handles: list[Any] = []
    for module in name_by_module:
        handles.append(module.register_forward_pre_hook(lambda *_: begun.append(len(layers))))
        handles.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            output = inner.eval()(*args)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in was_training.items():
            module.training = mode
    found = next(find_tensors(output), None)
    if found is None:
        raise UsageError(
            f"The model's output is a {type(output).__name__} without a tensor.",
            advice="A prediction is traced to the first tensor of the output.",
        )
    if layers[-1].output.shape != list(found.shape):
        (kept,) = tree_facts("output", found, values=values)
        layers.append(Layer(name="", kind=type(inner).__name__, output=kept))
    return SamplePrediction(
        index=index,
        input=tree_facts("input", args, values=values),
        layers=layers,
        answer=answer_of(found, kind, expected) if values else None,
    )


def answer_of(output: Tensor, kind: Kind, expected: float | None) -> Answer:
    """The answer in one row of output."""
    row = output.detach().reshape(-1).double().cpu()
    said = "" if expected is None else f"; the dataset says {expected:.4g}"
    if kind == "value" or (kind == "classes" and row.numel() < 2):
        shown = ", ".join(f"{number:.4g}" for number in row[:4].tolist())
        text = f"{shown}{', ...' if row.numel() > 4 else ''}{said}"
        value = float(row[0]) if row.numel() == 1 else None
        return Answer(kind="value", text=text, value=value, expected=expected)
    if kind == "binary":
        yes = torch.sigmoid(row[0])
        shares = torch.stack([1 - yes, yes])
    else:
        shares = torch.softmax(row, 0)
    label = int(shares.argmax())
    probability = float(shares[label])
    text = f"class {label}, with a probability of {probability:.1%}{said}"
    return Answer(kind="class", text=text, label=label, probability=probability, expected=expected)
