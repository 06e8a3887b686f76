"""Where a run takes place: the workers it trains with, whoever started them."""

from __future__ import annotations

import atexit

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from paceline import env
from paceline.comm.world import World, current_world, init_process_group
from paceline.ddp.wrapper import Wrapper
from paceline.errors import UsageError
from paceline.run.plan import Plan


def find_world() -> World:
    """torch's default group if there is one, else what a launcher says, else this one process."""
    if dist.is_available() and dist.is_initialized():
        return current_world()
    if env.read_placement() is None:
        # A group of its own, so that being alone leaves no trace in torch.
        return World(rank=0, size=1, group=dist.ProcessGroup(HashStore(), 0, 1))
    world = init_process_group()
    atexit.register(world.close)
    return world


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without the wrappers that a run replaces by its own."""
    while isinstance(model, Wrapper | nn.DataParallel):
        model = model.module
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "The model is wrapped in torch's DistributedDataParallel, which would average its "
            "gradients a second time.",
            advice="Pass the module inside: a run wraps it itself.",
        )
    return model


def check_batch_norm(model: nn.Module, size: int, shards: int, plan: Plan | None) -> None:
    """Refuse layers that talk to all workers in every pass where some would not be there."""
    if size == 1 or not any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        return
    advice = "Use shards equal to the number of workers, or BatchNorm, whose statistics are those "
    advice += "of a shard at any number of workers."
    if shards != size:
        raise UsageError(
            f"SyncBatchNorm needs one shard per worker, not {shards} shards on {size} workers.",
            advice=advice,
        )
    if plan is None or plan.shortest_batch < size:
        raise UsageError(
            "SyncBatchNorm needs samples on every worker, and the last batch of an epoch has too "
            "few.",
            advice="Pass drop_last=True in RunOptions, or choose another global_batch.",
        )
