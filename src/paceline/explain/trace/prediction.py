"""One sample through every layer of a model, to the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.comm import tree
from paceline.ddp.wrapper import Wrapper, bare
from paceline.errors import UsageError
from paceline.record.facts import facts_of, tree_facts
from paceline.record.stages import Answer, Layer, Prediction

Kind = Literal["classes", "binary", "value"]
"""What an output means: a score for each class, one score for yes or no, or the value itself."""


def trace_prediction(
    model: nn.Module,
    inputs: Any,
    *,
    index: int = 0,
    expected: float | None = None,
    kind: Kind = "value",
    values: bool = False,
) -> Prediction:
    """Run one sample, a batch of one row, through the model and note what every layer makes of it.

    Layers are the innermost modules that are called, in that order. The model is in evaluation mode
    meanwhile, and no gradients are recorded.
    """
    inner = bare(model.module if isinstance(model, Wrapper) else model)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    layers: list[Layer] = []
    with _evaluating(inner), _noting(inner, layers, values), torch.no_grad():
        output = inner(*args)
    found = next(tree.tensors(output), None)
    if found is None:
        raise UsageError(
            f"The model's output is a {type(output).__name__} without a tensor.",
            advice="A prediction is traced to the first tensor of the output.",
        )
    if layers[-1].output.shape != list(found.shape):
        kept = facts_of("output", found, values=values)
        layers.append(Layer(name="", kind=type(inner).__name__, output=kept))
    answer = answer_of(found, kind, expected) if values else None
    return Prediction(
        index=index, input=tree_facts("input", args, values=values), layers=layers, answer=answer
    )


def answer_of(output: Tensor, kind: Kind, expected: float | None) -> Answer:
    """What one row of output says."""
    row = output.detach().reshape(-1).double().cpu()
    said = "" if expected is None else f"; the dataset says {expected:.4g}"
    if kind == "value" or (kind == "classes" and row.numel() < 2):
        shown = ", ".join(f"{number:.4g}" for number in row[:4].tolist())
        more = ", ..." if row.numel() > 4 else ""
        return Answer(
            kind="value",
            text=f"{shown}{more}{said}",
            value=float(row[0]) if row.numel() == 1 else None,
            expected=expected,
        )
    shares = torch.sigmoid(row[:1]) if kind == "binary" else torch.softmax(row, 0)
    if kind == "binary":
        yes = float(shares[0])
        label, probability = int(yes >= 0.5), max(yes, 1 - yes)
    else:
        label = int(shares.argmax())
        probability = float(shares[label])
    return Answer(
        kind="class",
        text=f"class {label}, with a probability of {probability:.1%}{said}",
        label=label,
        probability=probability,
        expected=expected,
    )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = {layer: layer.training for layer in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for layer, training in modes.items():
            layer.training = training


@contextmanager
def _noting(module: nn.Module, layers: list[Layer], values: bool) -> Iterator[None]:
    """Note every module inside which no other one was noted.

    Those are the ones without children, and the ones that do not call theirs, as attention does.
    """
    names = {layer: name for name, layer in module.named_modules()}
    begun: list[int] = []

    def begin(_layer: nn.Module, _args: Any) -> None:
        begun.append(len(layers))

    def note(layer: nn.Module, _args: Any, output: Any) -> None:
        found = next(tree.tensors(output), None)
        if begun.pop() == len(layers) and found is not None:
            layers.append(
                Layer(
                    name=names[layer],
                    kind=type(layer).__name__,
                    output=facts_of("output", found, values=values),
                    parameters=sum(param.numel() for param in layer.parameters()),
                )
            )

    handles: list[Any] = [layer.register_forward_pre_hook(begin) for layer in names]
    handles += [layer.register_forward_hook(note) for layer in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
