"""`paceline trace`: a recorded step drawn for people, and what training and prediction look like.

The recording itself is `paceline.record`. Names are loaded when first used: drawing a file needs
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {
    "StepRecording": "paceline.record.step",
    "Trace": "paceline.record.stages",
    "draw": "paceline.explain.trace.drawing",
    "observe": "paceline.explain.trace.observation",
    "read": "paceline.record.schema",
    "record_step": "paceline.record.step",
    "trace_prediction": "paceline.explain.trace.prediction",
}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.explain.trace.drawing import draw as draw
    from paceline.explain.trace.observation import observe as observe
    from paceline.explain.trace.prediction import trace_prediction as trace_prediction
    from paceline.record.schema import read as read
    from paceline.record.stages import Trace as Trace
    from paceline.record.step import StepRecording as StepRecording
    from paceline.record.step import record_step as record_step

__getattr__ = load_names(__name__, _HOME_BY_NAME)
