"""What changes when a step commits: parameters, optimizer, scheduler, scaler; and nothing else.

Everything here is local arithmetic. No worker is asked and no file is touched, so two workers that
have the same gradients have the same state afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import UsageError


class Update:
    """The objects that a commit changes."""

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
        if norm is not None and self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._trained, self._clip_norm, norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()

    @staticmethod
    def _grads(params: Sequence[Tensor]) -> list[Tensor]:
        return [param.grad for param in params if param.grad is not None]


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
