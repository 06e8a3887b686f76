"""Whether to share an update out: what was asked for, or what is faster."""

from __future__ import annotations

from torch.optim import Optimizer

from paceline.ddp import DistributedDataParallel
from paceline.errors import PacelineError
from paceline.transport.shared_memory import SharedMemory
from paceline.update.kind import Kind, find_kind

WORTH_SHARING = 2**20
"""Parameters from which on the work that is saved exceeds what gathering costs; see decision 60."""


def choose_update(wanted: str, optimizer: Optimizer, *, size: int, can_survive: bool) -> bool:
    """Whether the update of a run is to be shared out; the same on every worker.

    `auto` does so on CPUs, where it was measured, and where nothing is lost by it: with its update
    shared out a run cannot continue without a worker that dies.
    """
    if size == 1 or wanted != "auto":
        return wanted == "sharded"
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if can_survive or any(param.device.type != "cpu" for param in params):
        return False
    if sum(param.numel() for param in params) < WORTH_SHARING:
        return False
    try:
        return find_kind(optimizer) is Kind.ELEMENT
    except PacelineError:
        return False


def is_worth_gathering(model: DistributedDataParallel) -> bool:
    """Whether `auto` shares out: gathering through sockets takes longer than the update saves."""
    return isinstance(model._reducer.transport, SharedMemory)


def describe_sharing(
    optimizer: Optimizer, size: int, *, can_survive: bool, is_saved: bool
) -> list[str]:
    """What is said when a run begins."""
    if size == 1:
        return []
    line = (
        f"The update is shared out: each of {size} workers steps its share of the parameters, and "
        f"keeps the state of {type(optimizer).__name__} for it."
    )
    if can_survive and is_saved:
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
