"""What changes when a step commits: parameters, optimizer, scheduler, scaler; and nothing else.

`WholeUpdate` steps every parameter on every worker, `ScaledUpdate` does so with a `GradScaler`.
Both are local arithmetic: two workers with equal gradients have equal state afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.update.average import WeightAverage
from paceline.update.finite import FiniteCheck, Loss


class Update(Protocol):
    """How the gradients of a step become new parameters.

        begin --> backward, once per shard --> commit, or, when the step fails, abandon

    Where `sharded` has the optimizer step a share only, the parameters are gathered in `commit`.
    """

    parts: dict[str, Any]
    """The objects it changes that have a `state_dict()`, by name."""

    def begin(self, step: int) -> None: ...

    def backward(self, loss: Tensor, factor: float) -> None:
        """Add the gradients of `loss` times `factor`."""

    def multiply_grads(self, factor: float) -> None: ...

    def commit(self, losses: Sequence[Loss]) -> Tensor | None:
        """Check, clip and apply the gradients; returns their length where it was computed."""

    def rate(self, metric: float) -> None:
        """Tell a scheduler that waits for a metric, between two steps."""

    def abandon(self) -> None:
        """Forget the gradients of a step that has failed."""

    def finish(self) -> None:
        """Be done with all steps so far; raises if one of them was not finite."""

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with on their way."""


class WholeUpdate:
    """Every worker steps everything.

    Invariant: between `begin` and `commit` nobody else changes gradients or calls the optimizer,
    as a loop that was written for torch would; it is refused.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        clip_norm: float | None = None,
        finite: FiniteCheck | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        """Without `finite` nobody looks for NaN."""
        self.parts: dict[str, Any] = {"optimizer": optimizer}
        if scheduler is not None:
            self.parts["scheduler"] = scheduler
        self._optimizer, self._scheduler = optimizer, scheduler
        if average is not None:
            self.parts["ema"] = average
        self._clip_norm, self._finite, self._average = clip_norm, finite, average
        self._params = params
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._step = 0
        self._refusal: Any = None
        self._noted: tuple[Parameter, int, int] | None = None
        self._schedule_at: Any = None
        self._needs_metric = needs_metric(scheduler)

    @property
    def loss_scale(self) -> float:
        return 1.0

    def begin(self, step: int) -> None:
        # Known only once a commit has stepped it: a checkpoint may be loaded before.
        if self._schedule_at is not None and self._schedule_at != self._scheduler.last_epoch:
            self._schedule_at = self._scheduler.last_epoch
            raise UsageError(
                "The scheduler was stepped between two steps.",
                advice="A run steps it itself, once per step or when its metric is measured: leave "
                "scheduler.step() out.",
            )
        for param in self._params:
            param.grad = None
        self._step, self._noted = step, None
        self._refusal = self._optimizer.register_step_pre_hook(_refuse_foreign_step)
        hooks: Any = self._optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(self._refusal.id, last=False)  # before the update is shared out

    def backward(self, loss: Tensor, factor: float) -> None:
        self._refuse_changed_grads()
        # Zero times infinity, and times NaN, is NaN: a loss that is not finite makes its gradients
        # NaN on every worker, and no host has to look at it.
        scaled = loss * (factor if self._finite is None else loss.detach() * 0 + factor)
        self._scaled(scaled).backward()  # type: ignore[no-untyped-call]
        for param in self._params:
            if (grad := param.grad) is not None:
                # Not the gradient itself: whoever holds it keeps the engine from using its memory.
                self._noted = param, id(grad), grad._version
                break

    @torch.no_grad()
    def multiply_grads(self, factor: float) -> None:
        if grads := [param.grad for param in self._params if param.grad is not None]:
            torch._foreach_mul_(grads, factor)

    def commit(self, losses: Sequence[Loss]) -> Tensor | None:
        norm = None
        if self._clip_norm is not None:
            self._unscale()
            grads = [param.grad for param in self._trained if param.grad is not None]
            norm = nn.utils.get_total_norm(grads)
        self._check(losses, norm)
        self._refusal.remove()
        if norm is not None and self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._trained, self._clip_norm, norm)
        self._step_optimizer()
        if self._scheduler is not None and not self._needs_metric:
            self._step_scheduler()
        if self._average is not None:
            self._average.update(self._step)
        return norm

    def rate(self, metric: float) -> None:
        if self._needs_metric:
            self._step_scheduler(metric)

    def _step_scheduler(self, *metric: float) -> None:
        self._scheduler.step(*metric)
        self._schedule_at = getattr(self._scheduler, "last_epoch", None)

    def abandon(self) -> None:
        if self._refusal is not None:
            self._refusal.remove()
        self._schedule_at = None  # the state of a worker that is further may be loaded now
        for param in self._params:
            param.grad = None
        if self._finite is not None:
            self._finite.forget()

    def finish(self) -> None:
        if self._finite is not None:
            self._finite.ask()

    def _check(self, losses: Sequence[Loss], norm: Tensor | None) -> None:
        if self._finite is not None:
            self._finite.check(self._step, losses, norm)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss

    def _unscale(self) -> None:
        """Make the gradients those of the losses."""

    def _step_optimizer(self) -> None:
        self._optimizer.step()

    def _refuse_changed_grads(self) -> None:
        """One gradient tells of all: it must be as the last backward has left it."""
        if self._noted is None:
            return
        param, grad, version = self._noted
        now = param.grad
        if now is None or (id(now), now._version) != (grad, version):
            raise UsageError(
                f"Step {self._step}: the gradients of the shards before this one were changed or "
                "cleared.",
                advice="Leave zero_grad() and clipping to the run: it clears gradients itself, and "
                "clips those of the whole batch with clip_norm=.",
            )


class ScaledUpdate(WholeUpdate):
    """With a `GradScaler`, which expects infinities and skips their steps: nobody else looks."""

    def __init__(
        self, params: Sequence[Parameter], optimizer: Optimizer, scaler: Any, **rest: Any
    ) -> None:
        super().__init__(params, optimizer, **rest)
        self.parts["scaler"] = self._scaler = scaler

    @property
    def loss_scale(self) -> float:
        return float(self._scaler.get_scale())

    def abandon(self) -> None:
        super().abandon()
        self._scaler._per_optimizer_states.clear()  # as its update() does after every step

    def _check(self, losses: Sequence[Loss], norm: Tensor | None) -> None: ...

    def _scaled(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def _unscale(self) -> None:
        self._scaler.unscale_(self._optimizer)

    def _step_optimizer(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()


def make_update(
    params: Sequence[Parameter],
    optimizer: Optimizer,
    *,
    scheduler: Any,
    scaler: Any,
    clip_norm: float | None,
    finite: FiniteCheck | None,
    average: WeightAverage | None,
) -> Update:
    """The update that these objects need; raises where they do not fit together."""
    _check_optimizer(params, optimizer)
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"clip_norm is {clip_norm}.", advice="Pass a number above 0, or None.")
    rest: Any = {"scheduler": scheduler, "clip_norm": clip_norm, "finite": finite}
    rest["average"] = average
    if scaler is not None and scaler.is_enabled():
        return ScaledUpdate(params, optimizer, scaler, **rest)
    return WholeUpdate(params, optimizer, **rest)


def needs_metric(scheduler: Any) -> bool:
    """Whether it steps on a metric, as `ReduceLROnPlateau` does, and not once per step."""
    return scheduler is not None and "metrics" in inspect.signature(scheduler.step).parameters


def _refuse_foreign_step(*_: Any) -> None:
    raise UsageError(
        "optimizer.step() was called inside a step, which calls it when all gradients are there.",
        advice="Leave it out: inside the block only step.backward() is called.",
    )


def _check_optimizer(params: Sequence[Parameter], optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} calls the model itself, several times in one step, and a "
            "run hands it the gradients of one pass.",
            advice="Use an optimizer whose step() needs no closure.",
        )
    known = {id(param) for param in params}
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    strange = [tuple(param.shape) for param in trained if id(param) not in known]
    if strange:
        raise UsageError(
            f"The optimizer has {len(strange)} parameters that are not the model's, the first of "
            f"shape {strange[0]}, so nobody would average their gradients.",
            advice="Build the optimizer from the parameters of this very model, and put layers of "
            "the loss into it.",
        )
