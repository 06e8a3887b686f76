"""What happened when: phases, spans, the timeline, stragglers, stalls, and the run folder."""

from paceline.observe import spans as spans
