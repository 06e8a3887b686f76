"""Public tools for tests: ranks as threads or processes, and planned faults."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
