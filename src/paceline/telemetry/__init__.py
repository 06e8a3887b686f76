"""What happened when, and who is told: phases, spans, stragglers, stalls, sinks, the terminal."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
