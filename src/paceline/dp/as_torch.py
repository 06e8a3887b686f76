"""`DataParallel` for scripts that were written for torch's: its names are torch's too."""

from __future__ import annotations

from typing import Any

from paceline.ddp import TorchNames
from paceline.dp import data_parallel

_Ours = data_parallel.DataParallel
# By the class's name, too, scripts tell what they have, and pickle finds it.
DataParallel: Any = type(_Ours.__name__, (TorchNames, _Ours), {"__module__": __name__})
