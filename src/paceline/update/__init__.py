"""Gradients to new parameters: the only place that steps an optimizer, a scheduler or a scaler.

`whole` has the seam, `Update`, and its implementations; `sharded` has every rank step its share of
the parameters only; `finite` looks for NaN before anything changes, without waiting for a device.
"""

from paceline.update.average import WeightAverage
from paceline.update.choice import choose_update, describe_sharing, is_worth_gathering
from paceline.update.exchange import ExchangedStep, find_exchanged
from paceline.update.finite import FiniteCheck, HostCopy, Loss
from paceline.update.pieces import step_in_pieces
from paceline.update.sharded import shard_update
from paceline.update.whole import Update, make_update, needs_metric

__all__ = [
    "ExchangedStep",
    "FiniteCheck",
    "HostCopy",
    "Loss",
    "Update",
    "WeightAverage",
    "choose_update",
    "describe_sharing",
    "find_exchanged",
    "is_worth_gathering",
    "make_update",
    "needs_metric",
    "shard_update",
    "step_in_pieces",
]
