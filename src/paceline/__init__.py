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
    "DistributedBatchSampler": "paceline.sampler",
    "DistributedDataParallel": "paceline.ddp",
    "DistributedSampler": "paceline.sampler",
    "EpochNotSetWarning": "paceline.sampler",
    "Run": "paceline.run",
    "RunOptions": "paceline.run",
    "SyncBatchNorm": "paceline.sync_batch_norm",
    "World": "paceline.world",
    "compare": "paceline.comparison",
    "init_process_group": "paceline.world",
    "launch": "paceline.launcher",
    "load_weights": "paceline.checkpoint",
    "speedup": "paceline.scaling",
}

__all__ = [*_HOME_BY_NAME, "__version__"]

if TYPE_CHECKING:
    from paceline.checkpoint import load_weights as load_weights
    from paceline.comparison import compare as compare
    from paceline.ddp import DDPOptions as DDPOptions
    from paceline.ddp import DistributedDataParallel as DistributedDataParallel
    from paceline.dp import DataParallel as DataParallel
    from paceline.dp import DPOptions as DPOptions
    from paceline.launcher import launch as launch
    from paceline.run import Run as Run
    from paceline.run import RunOptions as RunOptions
    from paceline.sampler import DistributedBatchSampler as DistributedBatchSampler
    from paceline.sampler import DistributedSampler as DistributedSampler
    from paceline.sampler import EpochNotSetWarning as EpochNotSetWarning
    from paceline.scaling import speedup as speedup
    from paceline.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from paceline.world import World as World
    from paceline.world import init_process_group as init_process_group

__getattr__ = load_names(__name__, _HOME_BY_NAME)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
