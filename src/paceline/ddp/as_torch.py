"""`DistributedDataParallel` for scripts that were written for torch's: its names are torch's too.

Such a script groups parameters by names that begin with `module.`, and cuts that off what it saves.
"""

from __future__ import annotations

from typing import Any

from paceline.ddp import distributed
from paceline.ddp.wrapper import TorchNames

_Ours = distributed.DistributedDataParallel
# By the class's name, too, scripts tell what they have, and pickle finds it.
DistributedDataParallel: Any = type(_Ours.__name__, (TorchNames, _Ours), {"__module__": __name__})
