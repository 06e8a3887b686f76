"""One step of a training, recorded stage by stage, as data that can be drawn and checked.

Names are loaded when first used: reading a recorded step needs no torch, recording one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {
    "Stage": "paceline.record.stages",
    "StepRecording": "paceline.record.hooks",
    "Trace": "paceline.record.stages",
    "from_json": "paceline.record.schema",
    "read": "paceline.record.schema",
    "record_step": "paceline.record.step",
    "to_json": "paceline.record.schema",
    "write": "paceline.record.schema",
}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.record.hooks import StepRecording as StepRecording
    from paceline.record.schema import from_json as from_json
    from paceline.record.schema import read as read
    from paceline.record.schema import to_json as to_json
    from paceline.record.schema import write as write
    from paceline.record.stages import Stage as Stage
    from paceline.record.stages import Trace as Trace
    from paceline.record.step import record_step as record_step

__getattr__ = load_names(__name__, _HOME_BY_NAME)
