"""`paceline trace`: a recorded step drawn for people, and what training and prediction look like.

The recording itself is `paceline.record`. Names are loaded when first used: drawing a file needs
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {
    "draw": "paceline.explain.trace.drawing",
    "observe": "paceline.explain.trace.prediction",
    "trace_prediction": "paceline.explain.trace.prediction",
}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.explain.trace.drawing import draw as draw
    from paceline.explain.trace.prediction import observe as observe
    from paceline.explain.trace.prediction import trace_prediction as trace_prediction

__getattr__ = load_names(__name__, _HOME_BY_NAME)
