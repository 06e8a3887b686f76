"""One process per device: `DistributedDataParallel`, and what belongs to it."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
