"""Public tools for tests: ranks as threads or as processes, and models that are equal on all."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
