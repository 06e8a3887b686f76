"""The check: the same step in one process on the whole batch, by plain torch, and the difference.

A copy of the model and the optimizer is taken before the step. Afterwards the rows of all workers
go through the copy in one forward pass; the backward pass starts from the gradients that the loss
had with respect to the outputs, which were recorded, so the loss function need not be known. Where
a model treats rows together (batch statistics) or draws random numbers, the parts go through one
after the other, each with its own random numbers, and the check says so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from paceline.comm import tree
from paceline.ddp.sync_batch_norm import SyncBatchNorm
from paceline.observe.units import list_text
from paceline.record.facts import Piece
from paceline.record.hooks import StepHooks, dense, trained_parameters
from paceline.record.stages import Check

# How far apart two orders of the same sums may end, as a share of the largest number.
ROUNDING_BY_DTYPE = {torch.float64: 1e-10, torch.float32: 1e-4}
ROUNDING_OF_OTHERS = 5e-2
NEXT_TO_NOTHING = 1e-12

Pairs = list[tuple[Tensor, Tensor]]


class Reference:
    """A model and its optimizer as they were before the step."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        # Process groups cannot be copied, and need not be.
        held = [value for layer in module.modules() for value in vars(layer).values()]
        groups = {id(value): value for value in held if isinstance(value, dist.ProcessGroup)}
        self.module, self.optimizer = copy.deepcopy((module, optimizer), groups)
        # Hooks that change gradients on their way are part of a model; a copy leaves them behind.
        for one, two in zip(module.parameters(), self.module.parameters(), strict=True):
            for hook in (one._backward_hooks or {}).values():
                two.register_hook(hook)  # type: ignore[no-untyped-call]
        for layer in self.module.modules():
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
                # Nobody else would answer.
                layer.__class__ = _AloneBatchNorm  # type: ignore[assignment]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self.module)

    def check(
        self, hooks: StepHooks, pieces: Sequence[Piece], factor: float, loss: float | None
    ) -> Check:
        """Compute the step again and compare; a failure to do so is a check that says so.

        `pieces` are the rows of all workers in order, `factor` is what the engine multiplied the
        sum of their losses with, and `loss` is the mean over all rows.
        """
        try:
            return self._check(hooks, pieces, factor, loss)
        except Exception as error:  # the step is done and right; only its check is missing
            return not_computed(f"computing it again failed: {first_line(error)}")

    def _check(
        self, hooks: StepHooks, pieces: Sequence[Piece], factor: float, loss: float | None
    ) -> Check:
        """On the whole batch, else part by part."""
        reason, whole = _why_not_whole(pieces), None
        if not reason:
            joined = [_join(pieces)]
            whole = self._compare(hooks, joined, factor, loss)
            if whole.is_same:
                return whole
            if whole.loss is not None and self._compare(hooks, joined, factor, None).is_same:
                return replace(whole, reason=_why_loss_differs(pieces))
        parts = self._compare(hooks, pieces, factor, None, is_whole=False)
        if whole is None:
            return replace(parts, reason=reason)
        if not parts.is_same:
            return whole
        if any(piece.random_state for piece in pieces):
            return replace(parts, reason="the model draws random numbers, each part its own")
        return replace(parts, reason=_why_rows_matter(self.module, whole.difference or 0.0))

    def gradients_of(self, hooks: StepHooks, piece: Piece) -> dict[str, Tensor]:
        """What a single piece adds to the gradients, by parameter."""
        own = Reference(self.module, None)
        own._run(hooks, piece, factor=1.0, uses_loss=False)
        return {name: param.grad for name, param in own.trained.items() if param.grad is not None}

    def _compare(
        self,
        hooks: StepHooks,
        pieces: Sequence[Piece],
        factor: float,
        loss: float | None,
        is_whole: bool = True,
    ) -> Check:
        own = Reference(self.module, self.optimizer)
        ran = [own._run(hooks, piece, factor, loss is not None) for piece in pieces]
        outputs = [
            (ours, theirs)
            for (mine, _), piece in zip(ran, pieces, strict=True)
            for ours, theirs in zip(mine, piece.outputs, strict=True)
            if ours.shape == theirs.shape and ours.dim() > 0 and ours.is_floating_point()
        ]
        gradients = _pair_up({n: p.grad for n, p in own.trained.items()}, hooks.averaged)
        pairs_by_what = {"outputs": outputs, "gradients": gradients}
        if hooks.has_update and own.optimizer is not None:
            pairs_by_what["parameters"] = own._update(hooks)
        if ran[0][1] is not None:
            pairs_by_what["loss"] = [(ran[0][1], torch.tensor(loss, dtype=torch.float64))]
        compared = [*outputs, *gradients]
        share = ROUNDING_OF_OTHERS
        if hooks.autocast is None:
            share = _rounding(theirs.dtype for _, theirs in compared)
        is_finite = all(
            bool(dense(tensor).isfinite().all()) for pair in compared for tensor in pair
        )
        return _judge(
            {what: distance(pairs) for what, pairs in pairs_by_what.items()},
            share,
            how="whole batch" if is_whole else "part by part",
            where="one process on the whole batch" if is_whole else "one process, each part",
            reason="" if is_finite else "some numbers are not finite, on both",
        )

    def _run(
        self, hooks: StepHooks, piece: Piece, factor: float, uses_loss: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Forward and backward of one piece; gradients add up in the parameters.

        Returns the outputs, and the loss where its function is known and wanted.
        """
        device = next((p.device for p in self.trained.values()), torch.device("cpu"))

        def fill(template: Any, tensors: Sequence[Tensor]) -> Any:
            left = iter(tensors)
            return tree.map_tensors(lambda _: next(left).to(device), template)

        args, kwargs = fill(hooks.calls[0].arguments, piece.inputs)
        loss, notes = None, hooks.notes
        autocast = torch.autocast(*hooks.autocast) if hooks.autocast else nullcontext()
        with _random_numbers(piece), torch.enable_grad(), autocast:
            output = self.module(*args, **kwargs)
            if uses_loss and notes.loss_fn is not None and piece.targets:
                loss = notes.loss_fn(output, fill(notes.targets[0], piece.targets))
        outputs = list(tree.tensors(output))
        if loss is not None:
            torch.autograd.backward(loss)
            return [out.detach() for out in outputs], loss.detach()
        roots = [
            (out, (grad.to(out.device) * factor).to(out.dtype))
            for out, grad in zip(outputs, piece.grads, strict=True)
            if grad is not None and out.requires_grad
        ]
        if roots:
            # Outputs that depend on each other get each their own share of the gradient.
            torch.autograd.backward([out for out, _ in roots], [grad for _, grad in roots])
        return [out.detach() for out in outputs], None

    def _update(self, hooks: StepHooks) -> Pairs:
        """Let the copied optimizer apply the engine's gradients: is the update what it should be?

        Not the reference's own gradients: some optimizers divide by a gradient's size, which makes
        a difference of 1e-12 between two next to nothing as large as the learning rate.
        """
        for name, param in self.trained.items():
            applied = hooks.applied.get(name)
            param.grad = None if applied is None else applied.to(param.device).clone()
        assert self.optimizer is not None
        self.optimizer.step()
        return _pair_up({n: p.detach() for n, p in self.trained.items()}, hooks.trained)


class _AloneBatchNorm(_BatchNorm):
    """Statistics of all rows, which are all here."""

    def _check_input_dim(self, input: Tensor) -> None:
        return


def check_sums(
    pairs: Iterable[tuple[Tensor, Tensor]], parameters: Iterable[Tensor], reason: str
) -> Check:
    """The check that is left where a step cannot be computed again: are the sums right?

    `pairs` are the workers' own gradients, averaged once more, and the engine's.
    """
    where = "the workers' own gradients, averaged by plain torch"
    found = {"gradients": distance(pairs)}
    share = _rounding(parameter.dtype for parameter in parameters)
    return _judge(found, share, how="gradients only", where=where, reason=reason)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


def not_computed(reason: str) -> Check:
    return Check(how="not computed", text="not compared with one process", reason=reason)


def distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The largest difference, and the largest finite number that it is a difference of."""
    difference = scale = 0.0
    for ours, theirs in pairs:
        if ours.numel():
            one = dense(ours).detach()
            two = dense(theirs).to(one.device)
            wide = torch.complex128 if one.is_complex() else torch.float64
            apart = (one.to(wide) - two.to(wide)).abs()
            # Infinities of one sign do not differ, nor do two that are not numbers.
            is_equal = (one == two) | (one.isnan() & two.isnan())
            apart = torch.where(is_equal, torch.zeros_like(apart), apart)
            difference = max(difference, apart.max().item(), key=_nan_is_worst)
            finite = one[one.isfinite()].abs()
            scale = max(scale, finite.max().item() if finite.numel() else 0.0)
    return difference, scale


def _judge(
    found: Mapping[str, tuple[float, float]], share: float, *, how: Any, where: str, reason: str
) -> Check:
    """Whether differences are rounding: at most `share` of the largest number, each."""
    tolerances = {what: share * scale + NEXT_TO_NOTHING for what, (_, scale) in found.items()}
    differences: dict[str, Any] = {what: apart for what, (apart, _) in found.items()}
    worst = max(differences, key=lambda what: _nan_is_worst(differences[what]))
    is_same = all(differences[what] <= tolerances[what] for what in found)
    said = "same" if is_same else "NOT the same"
    return Check(
        how=how,
        text=f"{said} as {where}: difference {differences[worst]:.1g}",
        is_same=is_same,
        difference=differences[worst],
        tolerance=tolerances[worst],
        reason=reason,
        **differences,
    )


def _nan_is_worst(number: float) -> float:
    return float("inf") if number != number else number


def _rounding(dtypes: Iterable[torch.dtype]) -> float:
    """The share of the largest number that rounding may explain, by the roughest dtype."""
    return max((ROUNDING_BY_DTYPE.get(d, ROUNDING_OF_OTHERS) for d in dtypes), default=1e-4)


def _pair_up(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor]) -> Pairs:
    """Tensors of one name; one that only one side has is compared with zeros."""
    pairs = []
    for name, mine in ours.items():
        other = theirs.get(name)
        if mine is not None:
            pairs.append((mine, torch.zeros_like(mine) if other is None else other))
        elif other is not None:
            pairs.append((torch.zeros_like(other), other))
    return pairs


def _why_not_whole(pieces: Sequence[Piece]) -> str:
    if len({(len(piece.inputs), len(piece.outputs)) for piece in pieces}) > 1:
        return "the parts' inputs or outputs are not alike"
    if len({tuple(t.shape[1:] for t in piece.inputs) for piece in pieces}) > 1:
        return "the parts' inputs have different shapes"
    return ""


def _why_loss_differs(pieces: Sequence[Piece]) -> str:
    """The engine did what it was told; the sum of the losses is not the loss of the sum."""
    rows = [piece.rows for piece in pieces]
    if len(set(rows)) > 1:
        return (
            f"the losses of {list_text(rows[:6])} rows were averaged as if they were equally "
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
    """All rows in one piece. What has no rows of its own is taken from the first, or summed."""
    if len(pieces) == 1:
        return pieces[0]

    def join(tensors: Iterable[Tensor], *, sums: bool = False) -> Tensor:
        listed = list(tensors)
        listed = [tensor.to(listed[0].device) for tensor in listed]
        pairs = zip(listed, pieces, strict=True)
        if all(t.dim() > 0 and t.shape[0] == piece.rows for t, piece in pairs):
            return torch.cat(listed)
        return torch.stack(listed).sum(0) if sums else listed[0]

    def join_grads(number: int) -> Tensor | None:
        grads = [(piece.grads[number], piece.outputs[number]) for piece in pieces]
        if all(grad is None for grad, _ in grads):
            return None
        known = (torch.zeros_like(out) if grad is None else grad for grad, out in grads)
        return join(known, sums=True)

    first = pieces[0]
    has_targets = all(len(piece.targets) == len(first.targets) for piece in pieces)
    return Piece(
        inputs=[join(p.inputs[i] for p in pieces) for i in range(len(first.inputs))],
        outputs=[join(p.outputs[i] for p in pieces) for i in range(len(first.outputs))],
        grads=[join_grads(i) for i in range(len(first.outputs))],
        targets=[join(p.targets[i] for p in pieces) for i in range(len(first.targets))]
        if has_targets
        else [],
    )


@contextmanager
def _random_numbers(piece: Piece) -> Iterator[None]:
    """Draws what was drawn before, and leaves the generators as they were."""
    if not piece.random_state:
        yield
        return
    with torch.random.fork_rng():
        torch.set_rng_state(piece.random_state[0].cpu())
        if len(piece.random_state) > 1:
            torch.cuda.set_rng_state(piece.random_state[1].cpu())
        yield
