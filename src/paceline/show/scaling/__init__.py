"""How much faster more workers are, where the rest is lost, and predictions for other sizes.

`measure` runs a script at each size and averages the recorded steps, `attribution` finds where time
is lost, `prediction` computes other sizes and suggests a change. `two_times` compares two times.
Nothing here needs torch.
"""

from __future__ import annotations

from paceline.show.scaling.two_times import SpeedUp, speedup

__all__ = ["SpeedUp", "speedup"]
