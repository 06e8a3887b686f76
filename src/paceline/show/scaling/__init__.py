"""How much faster more workers are, where the rest went, and what still more would bring.

`measure` runs a script at each size and makes a usual step of what the workers recorded,
`attribution` says where time was lost, `prediction` what other sizes would take and what to try.
`speedup` is the arithmetic alone. Nothing here needs torch.
"""

from __future__ import annotations

from paceline.show.scaling.attribution import SpeedUp, speedup

__all__ = ["SpeedUp", "speedup"]
