"""`DataParallel` for scripts that were written for torch's: its names are torch's too."""

from __future__ import annotations

from paceline.ddp import TorchNames
from paceline.dp import data_parallel


class DataParallel(TorchNames, data_parallel.DataParallel):
    """Under torch's name, and with its names, where a script is run unmodified."""
