"""What a model is wrapped with: our options, and what torch's arguments mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.ddp.compress import NAMES
from paceline.errors import UsageError, check_choice, check_whole, refuse_unknown_arguments, shown
from paceline.group import Membership, default_group
from paceline.transport import Transport, check_transport


@refuse_unknown_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class DDPOptions:
    """What torch's class has no argument for."""

    check_every: int = 0
    """Compare all replicas bit by bit after every so many synchronised steps; 0 means never."""

    compare_parameters: bool = True
    """Compare a fingerprint of some of the parameters in the trailers of gradients, so that one
    that differs on any rank is an error within 100 steps."""

    transport: str | Transport = "auto"
    """How gradients travel: "shared_memory" between the ranks of a host, "c10d" through
    torch.distributed, "auto" the first where it is possible; or an object that has the methods
    of `paceline.transport.Transport`."""

    compression: str | None = None
    """Send gradients in fewer bytes: "bf16" or "fp16"."""

    def __post_init__(self) -> None:
        check_transport(self.transport)
        check_choice("compression", self.compression, (*NAMES, None))
        check_whole("check_every", self.check_every, 0)


DEFAULT_OPTIONS = DDPOptions()


def check_arguments(module: Any, delayed: Any, delay_hook: Any, options: Any) -> None:
    """Raise if what was passed could not be wrapped on any rank."""
    if (delayed is None) != (delay_hook is None):
        raise UsageError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce belong together.",
            advice="Pass both, or neither: they have no effect here.",
        )
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"A model must be a torch.nn.Module, not {type(module).__name__}.",
            advice="Pass the module itself, before any call.",
        )
    if not isinstance(options, DDPOptions):
        raise UsageError(f"options is {options!r}.", advice="Pass DDPOptions(...).")


def pick_membership(process_group: Any, device_mesh: Any) -> Membership:
    if process_group is not None and device_mesh is not None:
        raise UsageError(
            "Cannot specify both process_group and device_mesh arguments.", advice="Pass one."
        )
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise UsageError(
                f"Only 1D device mesh is supported, but device_mesh has {device_mesh.ndim} "
                "dimensions.",
                advice="Pass one of its dimensions, device_mesh['name'].",
            )
        return Membership.of(device_mesh.get_group(mesh_dim=0))
    if isinstance(process_group, Membership):
        return process_group
    group = default_group() if process_group is None else process_group
    membership = Membership.of(group) if hasattr(group, "rank") else None
    if membership is None or not hasattr(membership.group, "allreduce"):
        if not isinstance(process_group, int):  # what torch gives to ranks outside a new group
            raise UsageError(
                f"process_group is {shown(process_group)}.",
                advice="Pass what torch.distributed.new_group() returned, or leave it out.",
            )
        raise UsageError(
            "This process is not a member of the process group that was passed.",
            advice="Wrap the model only on the ranks that belong to the group.",
        )
    return membership


def bucket_capacities(cap_mb: float | None, caps_mb: Sequence[float] | None) -> list[int] | None:
    if caps_mb:
        capacities = list(caps_mb)
    elif cap_mb is not None:
        capacities = [cap_mb]
    else:
        return None
    if not all(0 < cap < float("inf") for cap in capacities):
        raise UsageError(
            f"Bucket capacities must be positive and finite, not {capacities} MiB.",
            advice="Leave bucket_cap_mb out to get the default.",
        )
    return [max(1, int(cap * 2**20)) for cap in capacities]
