"""Whether to share an update out: what was asked for, or what is faster."""

from __future__ import annotations

from torch.optim import Optimizer

from paceline.ddp import DistributedDataParallel, Engine
from paceline.errors import PacelineError
from paceline.transport import SharedMemory
from paceline.update.kept import can_be_kept, has_common_memory
from paceline.update.kind import Kind, find_kind, params_of

WORTH_SHARING = 2**20
"""Parameters from which on the work that is saved exceeds what gathering costs; see decision 60."""


def is_worth_sharing(
    optimizer: Optimizer, *, size: int, can_survive: bool, elementwise: bool | None = None
) -> bool:
    """Whether `auto` shares the update of a run out; the same on every worker.

    It does so on CPUs, where it was measured, and where a run that can survive a worker loses
    nothing with it.
    """
    params = params_of(optimizer)
    if size == 1 or (can_survive and not can_be_kept(optimizer)):
        return False
    if any(param.device.type != "cpu" for param in params):
        return False
    if sum(param.numel() for param in params) < WORTH_SHARING:
        return False
    try:
        return find_kind(optimizer, elementwise) is Kind.ELEMENT
    except PacelineError:
        return False


def is_worth_gathering(model: Engine, *, can_survive: bool) -> bool:
    """Whether `auto` shares out: gathering through sockets takes longer than the update saves."""
    if not isinstance(model, DistributedDataParallel):
        return False
    transport = model.reducer.transport
    return has_common_memory(transport) if can_survive else isinstance(transport, SharedMemory)


def describe_sharing(
    model: Engine, optimizer: Optimizer, *, can_survive: bool, is_saved: bool
) -> list[str]:
    """What is said when a run begins."""
    assert isinstance(model, DistributedDataParallel)
    size = model.reducer.size
    if size == 1:
        return []
    line = (
        f"The update is shared out: each of {size} workers steps its share of the parameters, and "
        f"keeps the state of {type(optimizer).__name__} for it."
    )
    if can_survive and can_be_kept(optimizer) and has_common_memory(model.reducer.transport):
        line += " It lies in memory that all of them map: a worker that dies takes nothing along."
    elif can_survive and is_saved:
        line += (
            " A worker that dies takes its share along: the others go back to the newest "
            "checkpoint, of which checkpoint_every= makes more."
        )
    elif can_survive:
        line += (
            " A worker that dies takes its share along, and without a folder there is no "
            "checkpoint to go back to: its death ends the run."
        )
    return [line]
