"""What changes when a step commits: parameters, optimizer, scheduler, scaler; and nothing else.

Everything here is local arithmetic. No worker is asked and no file is touched, so two workers that
have the same gradients have the same state afterwards.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import UsageError


class Update:
    """The objects that a commit changes.

        begin --> (note_grads, after each backward) --> apply --> end; or end alone

    Invariant: between `begin` and `end` nobody else changes gradients or calls the optimizer, as a
    loop that was written for torch would; it is refused.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        optimizer: Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        clip_norm: float | None = None,
    ) -> None:
        _check_optimizer(named, optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "A ReduceLROnPlateau scheduler needs a metric, and schedulers are stepped here "
                "once per step without one.",
                advice='Pass it as state={"plateau": scheduler} and step it after run.evaluate().',
            )
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm}.", advice="Pass a number above 0, or None.")
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._clip_norm = clip_norm
        self._params = [param for _, param in named]
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._is_open = self._is_committing = False
        self._noted: tuple[Parameter, int, int] | None = None
        self._schedule_at: Any = None
        itself = weakref.ref(self)
        hook = optimizer.register_step_pre_hook(lambda *_: _refuse_foreign_step(itself()))
        weakref.finalize(self, hook.remove)

    def begin(self) -> None:
        """A step begins."""
        if self._schedule_at != self._schedule_now():
            self._schedule_at = self._schedule_now()
            raise UsageError(
                "The scheduler was stepped between two steps.",
                advice="A run steps it itself, once per step: leave scheduler.step() out.",
            )
        self.zero_grads()
        self._is_open, self._noted = True, None

    def end(self) -> None:
        """The step is over, whether it is applied or failed."""
        self._is_open, self._noted = False, None

    def note_grads(self) -> None:
        """Remember what the gradients are like; one of them tells of all."""
        param = next((each for each in self._params if each.grad is not None), None)
        if param is not None and param.grad is not None:
            # Not the gradient itself: whoever holds one keeps the engine from using its memory.
            self._noted = param, id(param.grad), param.grad._version

    @property
    def has_noted_grads(self) -> bool:
        """Whether the gradients are as they were noted, or nothing was."""
        if self._noted is None:
            return True
        param, grad, version = self._noted
        now = param.grad
        return now is not None and (id(now), now._version) == (grad, version)

    def _schedule_now(self) -> Any:
        """How far the scheduler is, where a commit has already stepped it."""
        return None if self._schedule_at is None else self.scheduler.last_epoch

    def zero_grads(self) -> None:
        for param in self._params:
            param.grad = None

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as backward should see it."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    @torch.no_grad()
    def multiply_grads(self, factor: float) -> None:
        if grads := self._grads(self._params):
            torch._foreach_mul_(grads, factor)

    def norm(self) -> Tensor | None:
        """The length of the gradients, where it has to be known to clip them."""
        if self._clip_norm is None:
            return None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return nn.utils.get_total_norm(self._grads(self._trained))

    def apply(self, norm: Tensor | None) -> None:
        """Commit."""
        self._is_committing = True
        try:
            self._apply(norm)
        finally:
            self._is_committing = False

    def _apply(self, norm: Tensor | None) -> None:
        if norm is not None and self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._trained, self._clip_norm, norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
            self._schedule_at = getattr(self.scheduler, "last_epoch", None)

    @staticmethod
    def _grads(params: Sequence[Tensor]) -> list[Tensor]:
        return [param.grad for param in params if param.grad is not None]


def _refuse_foreign_step(update: Update | None) -> None:
    """Raise if the optimizer is called in a step, and not by its commit."""
    if update is not None and update._is_open and not update._is_committing:
        raise UsageError(
            "optimizer.step() was called inside a step, which calls it when all gradients are "
            "there.",
            advice="Leave it out: inside the block only step.backward() is called.",
        )


def _check_optimizer(named: Sequence[tuple[str, Parameter]], optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} calls the model itself, several times in one step, and a "
            "run hands it the gradients of one pass.",
            advice="Use an optimizer whose step() needs no closure.",
        )
    known = {id(param) for _, param in named}
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    strange = [tuple(param.shape) for param in trained if id(param) not in known]
    if strange:
        raise UsageError(
            f"The optimizer has {len(strange)} parameters that are not the model's, the first of "
            f"shape {strange[0]}, so nobody would average their gradients.",
            advice="Build the optimizer from the parameters of this very model, and put layers of "
            "the loss into it.",
        )
