"""`paceline trace`: a recorded step drawn for people, and what training and prediction look like.

The recording itself is `paceline.pipeline`. Names are loaded when first used: drawing a file needs
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {
    "Recording": "paceline.pipeline.recording",
    "Trace": "paceline.pipeline.stages",
    "draw": "paceline.trace.drawing",
    "observe": "paceline.trace.observation",
    "read": "paceline.pipeline.schema",
    "record_step": "paceline.pipeline.recording",
    "trace_prediction": "paceline.trace.prediction",
}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.pipeline.recording import Recording as Recording
    from paceline.pipeline.recording import record_step as record_step
    from paceline.pipeline.schema import read as read
    from paceline.pipeline.stages import Trace as Trace
    from paceline.trace.drawing import draw as draw
    from paceline.trace.observation import observe as observe
    from paceline.trace.prediction import trace_prediction as trace_prediction

__getattr__ = load_names(__name__, _HOME_BY_NAME)
