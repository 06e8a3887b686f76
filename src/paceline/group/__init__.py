"""Who takes part, and talking: the world of ranks, its collectives, its launcher."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
