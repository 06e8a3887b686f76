"""Gradients to new parameters: the only place that steps an optimizer, a scheduler or a scaler.

`whole` has the seam, `Update`, and its implementations; `sharded` has every rank step its share of
the parameters only. NaN is looked for before anything changes, without waiting for a device.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
