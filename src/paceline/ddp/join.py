"""`join()`: ranks with different numbers of batches, by torch's `Join`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from paceline.group import Group, all_gather, all_reduce

if TYPE_CHECKING:
    from paceline.ddp.distributed import DistributedDataParallel


class JoinSurface(Joinable):
    """What torch's `Join` asks of a model; mixed into `DistributedDataParallel`."""

    device: torch.device
    process_group: Group

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for loops of different lengths: ranks that finish early keep company."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> UnevenInputs:
        divide = kwargs.get("divide_by_initial_world_size", True)
        model: Any = self
        return UnevenInputs(model, divide_by_initial_world_size=divide)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group


class UnevenInputs(JoinHook):
    """One model in torch's `Join` context: ranks that run out of inputs keep the others company.

    They repeat the collectives of the others' steps, with gradients of zero, until the last one is
    done; then all take the last one's model.
    """

    def __init__(
        self, model: DistributedDataParallel, *, divide_by_initial_world_size: bool
    ) -> None:
        super().__init__()
        self._model = model
        # A rank without inputs counts like one that has, unless asked otherwise: torch's default.
        self._weight = 1.0 if divide_by_initial_world_size else 0.0

    def main_hook(self) -> None:
        """Repeat the collectives of one step of the ranks that still have inputs."""
        model = self._model
        if model.will_sync_module_buffers():
            model._copy_buffers(agree_on_root(model.process_group, model.device, False))
        wants_sync = any_wants_sync(model.process_group, model.device, False)
        model.require_forward_param_sync = wants_sync
        if wants_sync:
            model.reducer.shadow(self._weight)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that was there to the end."""
        model = self._model
        root = agree_on_root(model.process_group, model.device, is_last_joiner)
        model._copy_model(root)


def any_wants_sync(group: Group, device: torch.device, mine: bool) -> bool:
    """Whether any rank will average the gradients of this forward pass."""
    wishes = torch.tensor([float(mine)], device=device)
    all_reduce(group, wishes, "Asking whether gradients will be averaged")
    return bool(wishes.item() > 0)


def agree_on_root(group: Group, device: torch.device, is_candidate: bool) -> int:
    """The highest rank that is a candidate."""
    mine = torch.tensor([int(is_candidate)], device=device)
    votes = all_gather(group, mine, "Agreeing on whose buffers count")
    return max((rank for rank, vote in enumerate(votes) if vote.item()), default=0)
