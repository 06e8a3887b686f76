"""The check: the same step in one process on the whole batch, by plain torch, and the difference.

A copy of the model and the optimizer is taken before the step. Afterwards the rows of all workers
go through the copy in one forward pass; the backward pass starts from the gradients that the loss
had with respect to the outputs, which were recorded, so the loss function need not be known. Where
a model treats rows together (batch statistics) or draws random numbers, the parts go through one
after the other, each with its own random numbers, and the check says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from paceline.comm import tree
from paceline.ddp.sync_batch_norm import SyncBatchNorm
from paceline.ddp.wrapper import bare
from paceline.record.distance import (
    NEXT_TO_NOTHING,
    ROUNDING_OF_OTHERS,
    distance,
    is_finite,
    order,
    pair_up,
    rounding,
)
from paceline.record.stages import Check
from paceline.record.words import join_words


@dataclass(frozen=True, slots=True)
class Piece:
    """What one worker or replica computed in one forward pass, and what its loss said of it."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    grads: list[Tensor | None]
    """Of the loss, by output."""
    random_state: list[Tensor]
    """What to begin with to draw the same numbers; empty where none are drawn."""
    targets: list[Tensor] = field(default_factory=list)
    """What the loss compares the outputs with, where that is known."""

    @property
    def rows(self) -> int:
        first = next((t for t in self.inputs if t.dim()), None)
        return 0 if first is None else first.shape[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine came to."""

    gradients: Mapping[str, Tensor]
    """After backward."""
    applied: Mapping[str, Tensor]
    """As the optimizer found them: clipped, for example."""
    parameters: Mapping[str, Tensor]
    """After the update."""
    loss: float | None = None
    """The mean over all rows."""


class Reference:
    """A model and its optimizer as they were before the step."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        # Process groups cannot be copied, and need not be.
        held = [value for layer in module.modules() for value in vars(layer).values()]
        groups = {id(value): value for value in held if isinstance(value, dist.ProcessGroup)}
        self.module, self.optimizer = copy.deepcopy((module, optimizer), groups)
        _copy_hooks(module, self.module)
        for layer in self.module.modules():
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
                # Nobody else would answer.
                layer.__class__ = _AloneBatchNorm  # type: ignore[assignment]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in bare(self.module).named_parameters() if p.requires_grad]


def _copy_hooks(source: nn.Module, copied: nn.Module) -> None:
    """Hooks that change gradients on their way are part of a model; a copy leaves them behind."""
    for one, two in zip(source.parameters(), copied.parameters(), strict=True):
        for hook in (one._backward_hooks or {}).values():
            two.register_hook(hook)  # type: ignore[no-untyped-call]


class _AloneBatchNorm(_BatchNorm):
    """Statistics of all rows, which are all here."""

    def _check_input_dim(self, input: Tensor) -> None:
        return


@dataclass(frozen=True, slots=True)
class Task:
    """What to compute again: the pieces in order, and how a call of the module looks."""

    pieces: Sequence[Piece]
    template: tuple[Any, Any]
    """Arguments of a call, whose tensors are replaced."""
    factor: float
    """What the sum of the losses is multiplied with."""
    autocast: tuple[str, torch.dtype] | None = None
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    targets: Any = None
    """Targets of a call, whose tensors are replaced."""

    @property
    def knows_loss(self) -> bool:
        return self.loss_fn is not None and all(piece.targets for piece in self.pieces)


def check_step(reference: Reference, task: Task, outcome: Outcome) -> Check:
    """Compute the step again and compare: on the whole batch, else part by part."""
    why_not_whole = _why_not_whole(task.pieces)
    whole = None
    known = replace(task, loss_fn=None)
    if not why_not_whole:
        joined = [_join(task.pieces)]
        whole = _compare(reference, task, joined, outcome, "whole batch")
        if whole.is_same:
            return whole
        if task.knows_loss and _compare(reference, known, joined, outcome, "whole batch").is_same:
            return replace(whole, reason=_why_loss_differs(task.pieces))
    task = known
    parts = _compare(reference, task, task.pieces, outcome, "part by part")
    if whole is None:
        return replace(parts, reason=why_not_whole)
    if not parts.is_same:
        return whole
    if any(piece.random_state for piece in task.pieces):
        return replace(parts, reason="the model draws random numbers, each part its own")
    return replace(parts, reason=_why_rows_matter(reference.module, whole.difference or 0.0))


def contribution(reference: Reference, task: Task) -> dict[str, Tensor]:
    """The gradients of a single piece, by parameter."""
    own = Reference(reference.module, None)
    _run(own, replace(task, loss_fn=None), task.pieces[0])
    return {name: param.grad for name, param in own.named() if param.grad is not None}


def check_sums(difference: float, scale: float, dtype: torch.dtype, reason: str) -> Check:
    """The check that is left where a step cannot be computed again: are the sums right?"""
    tolerance = rounding([dtype]) * scale + NEXT_TO_NOTHING
    is_same = difference <= tolerance
    return Check(
        how="gradients only",
        text=_sentence(is_same, "the workers' own gradients, averaged by plain torch", difference),
        is_same=is_same,
        difference=difference,
        tolerance=tolerance,
        gradients=difference,
        reason=reason,
    )


def not_computed(reason: str) -> Check:
    return Check(how="not computed", text="not compared with one process", reason=reason)


def _why_not_whole(pieces: Sequence[Piece]) -> str:
    if len({(len(piece.inputs), len(piece.outputs)) for piece in pieces}) > 1:
        return "the parts' inputs or outputs are not alike"
    first = pieces[0]
    for piece in pieces[1:]:
        for one, two in zip(first.inputs, piece.inputs, strict=True):
            if one.shape[1:] != two.shape[1:]:
                return "the parts' inputs have different shapes"
    return ""


def _why_loss_differs(pieces: Sequence[Piece]) -> str:
    """The engine did what it was told; the sum of the losses is not the loss of the sum."""
    rows = [str(piece.rows) for piece in pieces]
    if len(set(rows)) > 1:
        return (
            f"the losses of {join_words(rows[:6])} rows were averaged as if they were equally "
            "many; weighted() counts rows"
        )
    return "the loss of the whole batch is not the mean of its parts' losses"


def _why_rows_matter(module: nn.Module, difference: float) -> str:
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if any(layer.training for layer in layers):
        name = type(layers[0]).__name__
        return (
            f"{name} normalises each part by its own rows, so the whole batch gives something else "
            f"(by {difference:.1g}); SyncBatchNorm does not"
        )
    return f"this model treats the rows of a batch together: on the whole batch {difference:.1g}"


def _join(pieces: Sequence[Piece]) -> Piece:
    """All rows in one piece. What has no rows of its own is taken from the first."""
    if len(pieces) == 1:
        return pieces[0]

    def join(tensors: Iterable[Tensor]) -> Tensor:
        listed = list(tensors)
        pairs = zip(listed, pieces, strict=True)
        is_cut = all(t.dim() > 0 and t.shape[0] == piece.rows for t, piece in pairs)
        home = listed[0].device
        return torch.cat([t.to(home) for t in listed]) if is_cut else listed[0]

    def join_grads(number: int) -> Tensor | None:
        grads = [
            torch.zeros_like(p.outputs[number]) if p.grads[number] is None else p.grads[number]
            for p in pieces
        ]
        known = [grad for grad in grads if grad is not None]
        if all(piece.grads[number] is None for piece in pieces):
            return None
        pairs = zip(known, pieces, strict=True)
        if all(grad.dim() > 0 and grad.shape[0] == piece.rows for grad, piece in pairs):
            return torch.cat([grad.to(known[0].device) for grad in known])
        return torch.stack([grad.to(known[0].device) for grad in known]).sum(0)

    first = pieces[0]
    return Piece(
        inputs=[join(p.inputs[i] for p in pieces) for i in range(len(first.inputs))],
        outputs=[join(p.outputs[i] for p in pieces) for i in range(len(first.outputs))],
        grads=[join_grads(i) for i in range(len(first.outputs))],
        random_state=[],
        targets=[join(p.targets[i] for p in pieces) for i in range(len(first.targets))]
        if all(len(p.targets) == len(first.targets) for p in pieces)
        else [],
    )


def _compare(
    reference: Reference, task: Task, pieces: Sequence[Piece], outcome: Outcome, how: Any
) -> Check:
    own = Reference(reference.module, reference.optimizer)
    ran = [_run(own, task, piece) for piece in pieces]
    outputs = [each for each, _ in ran]
    pairs = [
        (ours, theirs)
        for mine, piece in zip(outputs, pieces, strict=True)
        for ours, theirs in zip(mine, piece.outputs, strict=True)
        if ours.shape == theirs.shape and ours.dim() > 0 and ours.is_floating_point()
    ]
    gradients = pair_up({n: p.grad for n, p in own.named()}, outcome.gradients)
    parameters = _update(own, outcome) if outcome.parameters and own.optimizer else None
    compared = {"outputs": distance(pairs), "gradients": distance(gradients)}
    if parameters is not None:
        compared["parameters"] = distance(parameters)
    loss = ran[0][1]
    if loss is not None and outcome.loss is not None:
        compared["loss"] = distance([(loss, torch.tensor(outcome.loss, dtype=torch.float64))])
    dtypes = [tensor.dtype for _, tensor in (*pairs, *gradients)]
    share = ROUNDING_OF_OTHERS if task.autocast else rounding(dtypes)
    tolerance_by_what = {
        what: share * scale + NEXT_TO_NOTHING for what, (_, scale) in compared.items()
    }
    worst = max(compared, key=lambda what: order(compared[what][0]))
    difference = compared[worst][0]
    is_same = all(compared[what][0] <= tolerance_by_what[what] for what in compared)
    where = "one process on the whole batch" if how == "whole batch" else "one process, each part"
    return Check(
        how=how,
        text=_sentence(is_same, where, difference),
        is_same=is_same,
        difference=difference,
        tolerance=tolerance_by_what[worst],
        outputs=compared["outputs"][0],
        loss=compared["loss"][0] if "loss" in compared else None,
        gradients=compared["gradients"][0],
        parameters=compared["parameters"][0] if "parameters" in compared else None,
        reason="" if is_finite([*pairs, *gradients]) else "some numbers are not finite, on both",
    )


def _run(reference: Reference, task: Task, piece: Piece) -> tuple[list[Tensor], Tensor | None]:
    """Forward and backward of one piece; gradients add up in the reference's parameters.

    Returns the outputs, and the loss where its function is known.
    """
    device = next((p.device for _, p in reference.named()), torch.device("cpu"))
    inputs = iter(piece.inputs)
    args, kwargs = tree.map_tensors(lambda _: next(inputs).to(device), task.template)
    loss = None
    with _random_numbers(piece), torch.enable_grad(), _autocast(task.autocast):
        output = reference.module(*args, **kwargs)
        if task.loss_fn is not None and piece.targets:
            rest = iter(piece.targets)
            targets = tree.map_tensors(lambda _: next(rest).to(device), task.targets)
            loss = task.loss_fn(output, targets)
    outputs = list(tree.tensors(output))
    if loss is not None:
        torch.autograd.backward(loss)
        return [out.detach() for out in outputs], loss.detach()
    roots = [
        (out, (grad.to(out.device) * task.factor).to(out.dtype))
        for out, grad in zip(outputs, piece.grads, strict=True)
        if grad is not None and out.requires_grad
    ]
    if roots:
        # Outputs that depend on each other get each their own share of the gradient.
        torch.autograd.backward([out for out, _ in roots], [grad for _, grad in roots])
    return [out.detach() for out in outputs], None


def _update(reference: Reference, outcome: Outcome) -> list[tuple[Tensor, Tensor]]:
    """Let the copied optimizer apply the engine's gradients: is the update what it should be?

    Not the reference's own gradients: some optimizers divide by a gradient's size, which makes a
    difference of 1e-12 between two next to nothing as large as the learning rate.
    """
    for name, param in reference.named():
        applied = outcome.applied.get(name)
        param.grad = None if applied is None else applied.to(param.device).clone()
    assert reference.optimizer is not None
    reference.optimizer.step()
    return pair_up({n: p.detach() for n, p in reference.named()}, outcome.parameters)


def _autocast(kind: tuple[str, torch.dtype] | None) -> AbstractContextManager[Any]:
    return nullcontext() if kind is None else torch.autocast(kind[0], kind[1])


def _random_numbers(piece: Piece) -> AbstractContextManager[Any]:
    return _RandomNumbers(piece.random_state) if piece.random_state else nullcontext()


class _RandomNumbers:
    """Draws what was drawn before, and leaves the generators as they were."""

    def __init__(self, states: Sequence[Tensor]) -> None:
        self._states = states
        self._fork = torch.random.fork_rng()

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.set_rng_state(self._states[0].cpu())
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1].cpu())

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def _sentence(is_same: bool, where: str, difference: float) -> str:
    return f"{'same' if is_same else 'NOT the same'} as {where}: difference {difference:.1g}"
