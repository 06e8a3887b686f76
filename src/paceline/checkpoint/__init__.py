"""Atomic saves and verified loads of everything a step depends on, and weights from any file.

Names are loaded when first used: `paceline ckpt ls`, `show` and `verify` start without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_HOME_BY_NAME = {
    "CheckpointWarning": "paceline.checkpoint.saver",
    "Checkpoints": "paceline.checkpoint.saver",
    "Saved": "paceline.checkpoint.saver",
    "WeightsReport": "paceline.checkpoint.weights",
    "Written": "paceline.checkpoint.saver",
    "load_weights": "paceline.checkpoint.weights",
}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.checkpoint.saver import Checkpoints as Checkpoints
    from paceline.checkpoint.saver import CheckpointWarning as CheckpointWarning
    from paceline.checkpoint.saver import Saved as Saved
    from paceline.checkpoint.saver import Written as Written
    from paceline.checkpoint.weights import WeightsReport as WeightsReport
    from paceline.checkpoint.weights import load_weights as load_weights

__getattr__ = load_names(__name__, _HOME_BY_NAME)
