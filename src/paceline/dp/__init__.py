"""Data parallelism in one process: replicas of a module on several devices, each in turn the
whole of scatter, replicate, parallel apply and gather."""

from paceline.dp.data_parallel import DataParallel
from paceline.dp.options import DPOptions

__all__ = ["DPOptions", "DataParallel"]
