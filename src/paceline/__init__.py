"""Data-parallel training with PyTorch: one model, many devices, every copy in step.

Names are loaded when first used, so that `paceline --help` and the launcher start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

__version__ = "0.1.0"

_HOME_BY_NAME = {
    "DDPOptions": "paceline.ddp",
    "DPOptions": "paceline.dp",
    "DataParallel": "paceline.dp",
    "DistributedBatchSampler": "paceline.data",
    "DistributedDataParallel": "paceline.ddp",
    "DistributedSampler": "paceline.data",
    "EpochNotSetWarning": "paceline.data",
    "Run": "paceline.run",
    "RunOptions": "paceline.run",
    "SyncBatchNorm": "paceline.ddp.sync_batch_norm",
    "World": "paceline.comm.world",
    "compare": "paceline.explain.compare",
    "enable": "paceline.launcher.as_torch",
    "init_process_group": "paceline.comm.world",
    "launch": "paceline.launcher",
    "learn": "paceline.learn",
    "load_weights": "paceline.checkpoint",
    "record_step": "paceline.record",
    "seed_everything": "paceline.data.foreign",
    "shard_update": "paceline.update",
    "spans": "paceline.observe",
    "speedup": "paceline.explain.scaling",
}

__all__ = [*_HOME_BY_NAME, "__version__"]

if TYPE_CHECKING:
    from paceline import learn as learn
    from paceline.checkpoint import load_weights as load_weights
    from paceline.comm.world import World as World
    from paceline.comm.world import init_process_group as init_process_group
    from paceline.data import DistributedBatchSampler as DistributedBatchSampler
    from paceline.data import DistributedSampler as DistributedSampler
    from paceline.data import EpochNotSetWarning as EpochNotSetWarning
    from paceline.data.foreign import seed_everything as seed_everything
    from paceline.ddp import DDPOptions as DDPOptions
    from paceline.ddp import DistributedDataParallel as DistributedDataParallel
    from paceline.ddp.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from paceline.dp import DataParallel as DataParallel
    from paceline.dp import DPOptions as DPOptions
    from paceline.explain.compare import compare as compare
    from paceline.explain.scaling import speedup as speedup
    from paceline.launcher import launch as launch
    from paceline.launcher.as_torch import enable as enable
    from paceline.observe import spans as spans
    from paceline.record import record_step as record_step
    from paceline.run import Run as Run
    from paceline.run import RunOptions as RunOptions
    from paceline.update import shard_update as shard_update

__getattr__ = load_names(__name__, _HOME_BY_NAME)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
