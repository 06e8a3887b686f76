"""What happened when: phases, spans, the timeline, stragglers, stalls, and the run folder."""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
