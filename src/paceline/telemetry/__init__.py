"""Times and events of a run: phases, spans, stragglers, stalls, sinks, trackers, the terminal."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
