"""Gradients to new parameters: the only place that steps an optimizer, a scheduler or a scaler.

`whole` has the seam, `Update`, and its implementations; `finite` looks for NaN before anything
changes, without waiting for a device.
"""

from paceline.update.finite import FiniteCheck, HostCopy, Loss
from paceline.update.whole import Update, make_update

__all__ = ["FiniteCheck", "HostCopy", "Loss", "Update", "make_update"]
