"""Who takes part, and talking: the world of ranks, its collectives, and values as bytes."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
