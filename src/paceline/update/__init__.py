"""Gradients to new parameters: the only place that steps an optimizer, a scheduler or a scaler.

`whole` has the seam, `Update`, and its implementations; `sharded` has every rank step its share of
the parameters only; `finite` looks for NaN before anything changes, without waiting for a device.
"""

from paceline.update.choice import choose_update, describe_sharing
from paceline.update.finite import FiniteCheck, HostCopy, Loss
from paceline.update.sharded import find_sharded, shard_update
from paceline.update.whole import Update, make_update

__all__ = [
    "FiniteCheck",
    "HostCopy",
    "Loss",
    "Update",
    "choose_update",
    "describe_sharing",
    "find_sharded",
    "make_update",
    "shard_update",
]
