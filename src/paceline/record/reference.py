"""The check: the same step in one process on the whole batch, in plain torch, compared.

The model and the optimizer are copied before the step. Afterwards the rows of all workers go
through the copy in one forward pass; the backward pass starts from the recorded gradients of the
loss with respect to the outputs, so the loss function need not be known. Where a model's outputs
depend on other rows (batch statistics) or on random numbers, the parts go through one after the
other, each with its own random state, and the check says so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.ddp import SyncBatchNorm
from paceline.errors import summarize
from paceline.group import find_tensors
from paceline.record.hooks import BatchPart, StepRecording, dense, fill, join, trained_parameters
from paceline.record.stages import Check
from paceline.torch_private import BatchNorm, tensor_hooks

# How much two orders of summation may differ, as a share of the largest number.
ROUNDING_BY_DTYPE = {torch.float64: 1e-10, torch.float32: 1e-4}
ROUNDING_OF_OTHERS = 5e-2
ABSOLUTE_TOLERANCE = 1e-12

WHY_LOSS = (
    "the mean of the parts' losses is not the loss of the whole batch; parts of unequal size need "
    "weighted()"
)
WHY_SHAPES = "the parts' inputs have different shapes"
WHY_RANDOM = "the model draws random numbers, each part its own"
WHY_TOGETHER = (
    "this model treats the rows of a batch together, as BatchNorm does without synchronisation: "
    "the whole batch differs by {:.1g}"
)

Pairs = list[tuple[Tensor, Tensor]]


class Reference:
    """A model and its optimizer as they were before the step."""

    def __init__(self, module: nn.Module, optimizer: Optimizer | None) -> None:
        # Process groups cannot be copied: the copy refers to the same ones.
        held = [value for layer in module.modules() for value in vars(layer).values()]
        groups = {id(value): value for value in held if isinstance(value, dist.ProcessGroup)}
        self.module, self.optimizer = copy.deepcopy((module, optimizer), groups)
        # Hooks that change gradients are part of a model, but deepcopy does not copy them.
        for one, two in zip(module.parameters(), self.module.parameters(), strict=True):
            for hook in tensor_hooks(one).values():
                two.register_hook(hook)  # type: ignore[no-untyped-call]
        for layer in self.module.modules():
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
                # It would wait for the other ranks.
                layer.__class__ = _LocalBatchNorm  # type: ignore[assignment]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self.module)

    def check(
        self, rec: StepRecording, pieces: Sequence[BatchPart], factor: float, loss: float | None
    ) -> Check:
        """Compute the step again and compare; a failure becomes a check that reports it.

        `pieces` are the rows of all workers in order, `factor` is the engine's factor on the sum of
        their losses, and `loss` is the mean over all rows.
        """
        try:
            joined = join(pieces)
            if joined is None:
                return replace(self._compare(rec, pieces, factor, None), reason=WHY_SHAPES)
            whole = self._compare(rec, [joined], factor, loss)
            if whole.is_same:
                return whole
            if whole.loss is not None and self._compare(rec, [joined], factor, None).is_same:
                return replace(whole, reason=WHY_LOSS)
            parts = self._compare(rec, pieces, factor, None)
        except Exception as error:  # the step itself has succeeded
            return not_computed(f"computing it again failed: {summarize(error)}")
        if not parts.is_same:
            return whole
        is_random = any(piece.random_state for piece in pieces)
        together = WHY_TOGETHER.format(whole.difference or 0.0)
        return replace(parts, reason=WHY_RANDOM if is_random else together)

    def gradients_of(self, rec: StepRecording, piece: BatchPart) -> dict[str, Tensor]:
        """The gradients of a single piece, by parameter."""
        own = Reference(self.module, None)
        own._run(rec, piece, factor=1.0, uses_loss=False)
        return {name: param.grad for name, param in own.trained.items() if param.grad is not None}

    def _compare(
        self, rec: StepRecording, pieces: Sequence[BatchPart], factor: float, loss: float | None
    ) -> Check:
        # A new copy for each comparison: running it changes buffers and optimizer state.
        own = Reference(self.module, self.optimizer)
        ran = [own._run(rec, piece, factor, loss is not None) for piece in pieces]
        outputs = [
            (ours, theirs)
            for (mine, _), piece in zip(ran, pieces, strict=True)
            for ours, theirs in zip(mine, piece.outputs, strict=True)
            if ours.shape == theirs.shape and ours.dim() > 0 and ours.is_floating_point()
        ]
        gradients = _pair_up({n: p.grad for n, p in own.trained.items()}, rec.averaged)
        pairs_by_what = {"outputs": outputs, "gradients": gradients}
        if rec.has_update and own.optimizer is not None:
            pairs_by_what["parameters"] = own._update(rec)
        if ran[0][1] is not None:
            pairs_by_what["loss"] = [(ran[0][1], torch.tensor(loss, dtype=torch.float64))]
        compared = [*outputs, *gradients]
        shares = [ROUNDING_BY_DTYPE.get(two.dtype, ROUNDING_OF_OTHERS) for _, two in compared]
        share = ROUNDING_OF_OTHERS if rec.autocast else max(shares, default=1e-4)
        is_whole = len(pieces) == 1
        found = {what: distance(pairs) for what, pairs in pairs_by_what.items()}
        differences: dict[str, Any] = {what: apart for what, (apart, _) in found.items()}
        tolerances = {
            what: share * scale + ABSOLUTE_TOLERANCE for what, (_, scale) in found.items()
        }
        worst = max(differences, key=differences.__getitem__)
        is_same = all(differences[what] <= tolerances[what] for what in found)
        is_finite = all(bool(dense(t).isfinite().all()) for pair in compared for t in pair)
        verdict = "same" if is_same else "NOT the same"
        where = "on the whole batch" if is_whole else "part by part"
        return Check(
            how="whole batch" if is_whole else "part by part",
            text=f"{verdict} as one process {where}: difference {differences[worst]:.1g}",
            is_same=is_same,
            difference=differences[worst],
            tolerance=tolerances[worst],
            reason="" if is_finite else "some numbers are not finite, on both",
            **differences,
        )

    def _run(
        self, rec: StepRecording, piece: BatchPart, factor: float, uses_loss: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """Forward and backward of one piece; gradients add up in the parameters.

        Returns the outputs, and the loss where its function is known and wanted.
        """
        device = next((p.device for p in self.trained.values()), torch.device("cpu"))
        args, kwargs = fill(rec.calls[0].arguments, (t.to(device) for t in piece.inputs))
        loss = None
        autocast = torch.autocast(*rec.autocast) if rec.autocast else nullcontext()
        with _with_random_state(piece), torch.enable_grad(), autocast:
            output = self.module(*args, **kwargs)
            if uses_loss and rec.loss_fn is not None and piece.targets:
                targets = fill(rec.targets[0], (t.to(device) for t in piece.targets))
                loss = rec.loss_fn(output, targets)
        outputs = list(find_tensors(output))
        roots = [
            (out, (grad.to(out.device) * factor).to(out.dtype))
            for out, grad in zip(outputs, piece.grads, strict=True)
            if grad is not None and out.requires_grad
        ]
        if loss is not None:
            torch.autograd.backward(loss)
        elif roots:
            # In one call: outputs may depend on each other, and each has its own gradient.
            torch.autograd.backward([out for out, _ in roots], [grad for _, grad in roots])
        return [out.detach() for out in outputs], None if loss is None else loss.detach()

    def _update(self, rec: StepRecording) -> Pairs:
        """Let the copied optimizer apply the engine's gradients, to check the update by itself.

        Not the reference's gradients: some optimizers divide by a gradient's magnitude, so a
        difference of 1e-12 between two tiny gradients would become as large as the learning rate.
        """
        for name, param in self.trained.items():
            applied = rec.applied.get(name)
            param.grad = None if applied is None else applied.to(param.device).clone()
        assert self.optimizer is not None
        self.optimizer.step()
        return _pair_up({n: p.detach() for n, p in self.trained.items()}, rec.trained)


class _LocalBatchNorm(BatchNorm):
    """SyncBatchNorm in one process, which has all rows."""

    def _check_input_dim(self, input: Tensor) -> None:
        return


def not_computed(reason: str) -> Check:
    return Check(how="not computed", text="not compared with one process", reason=reason)


def distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The largest difference, and the largest finite number compared."""
    difference = scale = 0.0
    for ours, theirs in pairs:
        if ours.numel():
            one = dense(ours).detach()
            two = dense(theirs).to(one.device)
            wide = torch.complex128 if one.is_complex() else torch.float64
            apart = (one.to(wide) - two.to(wide)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            # Equal infinities do not differ, nor do two NaN.
            apart[(one == two) | (one.isnan() & two.isnan())] = 0.0
            difference = max(difference, apart.max().item())
            finite = one[one.isfinite()].abs()
            scale = max(scale, finite.max().item() if finite.numel() else 0.0)
    return difference, scale


def _pair_up(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor]) -> Pairs:
    """Pair tensors by name; one that only one side has is compared with zeros."""
    pairs = []
    for name, mine in ours.items():
        other = theirs.get(name)
        if mine is not None:
            pairs.append((mine, torch.zeros_like(mine) if other is None else other))
        elif other is not None:
            pairs.append((torch.zeros_like(other), other))
    return pairs


@contextmanager
def _with_random_state(piece: BatchPart) -> Iterator[None]:
    """Use the piece's random state inside, and restore the generators afterwards."""
    if not piece.random_state:
        yield
        return
    with torch.random.fork_rng():
        torch.set_rng_state(piece.random_state[0].cpu())
        if len(piece.random_state) > 1:
            torch.cuda.set_rng_state(piece.random_state[1].cpu())
        yield
