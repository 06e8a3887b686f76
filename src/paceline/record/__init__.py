"""One step of a training, recorded stage by stage, as data that can be drawn and checked."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
