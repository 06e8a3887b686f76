"""One step of a training, recorded stage by stage, as data that can be drawn and checked.

Names are loaded when first used: reading a recorded step needs no torch, recording one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {
    "Recording": "paceline.pipeline.recording",
    "Stage": "paceline.pipeline.stages",
    "Trace": "paceline.pipeline.stages",
    "from_json": "paceline.pipeline.schema",
    "read": "paceline.pipeline.schema",
    "record_step": "paceline.pipeline.recording",
    "to_json": "paceline.pipeline.schema",
    "validate": "paceline.pipeline.schema",
    "write": "paceline.pipeline.schema",
}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.pipeline.recording import Recording as Recording
    from paceline.pipeline.recording import record_step as record_step
    from paceline.pipeline.schema import from_json as from_json
    from paceline.pipeline.schema import read as read
    from paceline.pipeline.schema import to_json as to_json
    from paceline.pipeline.schema import validate as validate
    from paceline.pipeline.schema import write as write
    from paceline.pipeline.stages import Stage as Stage
    from paceline.pipeline.stages import Trace as Trace

__getattr__ = load_names(__name__, _HOME_BY_NAME)
