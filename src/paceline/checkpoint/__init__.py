"""Atomic saves and verified loads of everything a step depends on, and weights from any file."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
