"""A `LearningRate` as one of torch's learning rate schedulers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.policy.batch import LearningRate


class LearningRateScheduler(LRScheduler):
    """A `LearningRate` as a torch scheduler: multiplies every parameter group's own rate.

    The rates that the optimizer was made with are those of one device. The state has these rates
    and the number of steps, but not the policy: that comes from the program, so that a change in
    the program takes effect after a restart.
    """

    def __init__(self, optimizer: Optimizer, rate: LearningRate, last_epoch: int = -1) -> None:
        self.rate = rate
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        factor = self.rate.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        return {name: value for name, value in state.items() if name != "rate"}
