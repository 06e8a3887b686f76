"""Data parallelism in one process: a replica of the module on every device.

A batch goes through the files in this order: `scatter`, `replicate`, `parallel_apply`, `gather`.
"""

from paceline.dp.data_parallel import DataParallel, DPOptions

__all__ = ["DPOptions", "DataParallel"]
