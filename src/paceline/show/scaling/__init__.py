"""How much faster more workers are, where the rest is lost, and predictions for other sizes.

`measure` runs a script at each size and averages the recorded steps, `attribution` finds where time
is lost, `prediction` computes other sizes and suggests a change. `speedup` compares two times.
Nothing here needs torch.
"""

from __future__ import annotations

from paceline.show.scaling.attribution import SpeedUp, speedup

__all__ = ["SpeedUp", "speedup"]
