"""What happened when: phases, spans, the timeline, stragglers, stalls, and the run folder."""
