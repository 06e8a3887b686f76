"""Data parallelism in one process: a replica of the module on every device.

A batch goes through `scatter`, `replicate`, `parallel_apply` and `gather`, in this order.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
