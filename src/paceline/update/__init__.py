"""Gradients to new parameters: the only place that steps an optimizer, a scheduler or a scaler.

`whole` has the seam, `Update`, and its implementations; `finite` looks for NaN before anything
changes; `host_copy` reads a device's numbers without waiting for it.
"""

from paceline.update.finite import FiniteCheck, Loss
from paceline.update.host_copy import HostCopy
from paceline.update.whole import Update, make_update

__all__ = ["FiniteCheck", "HostCopy", "Loss", "Update", "make_update"]
