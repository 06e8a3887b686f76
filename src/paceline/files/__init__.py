"""Bytes that are not trusted: JSON documents, values as bytes, tensors in files, the run folder."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
