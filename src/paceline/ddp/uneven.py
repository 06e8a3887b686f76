"""Ranks that run out of inputs early keep the others company: what `join()` does.

Under `model.join()` a rank whose loop has ended repeats the collectives of the others' steps,
with gradients of zero, until the last one is done; then all take the last one's model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from paceline.ddp import DistributedDataParallel


class UnevenInputs(JoinHook):
    """The part of one model in torch's `Join` context."""

    def __init__(
        self, model: DistributedDataParallel, *, divide_by_initial_world_size: bool
    ) -> None:
        super().__init__()
        self._model = model
        # A rank without inputs counts like one that has, unless asked otherwise: torch's default.
        self._weight = 1.0 if divide_by_initial_world_size else 0.0

    def main_hook(self) -> None:
        """Repeat the collectives of one step of the ranks that still have inputs."""
        self._model.shadow_step(self._weight)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give everybody the model of a rank that was there to the end."""
        self._model.take_final_model(is_last_joiner)
