"""`DistributedDataParallel` for scripts that were written for torch's: its names are torch's too.

Such a script groups parameters by names that begin with `module.`, and cuts that off what it saves.
"""

from __future__ import annotations

from paceline.ddp import distributed
from paceline.ddp.wrapper import TorchNames


class DistributedDataParallel(TorchNames, distributed.DistributedDataParallel):
    """Under torch's name, and with its names, where a script is run unmodified."""
