"""`paceline run --as-torch`: an unmodified torch script gets our classes under torch's names.

The names are exchanged right after torch has been imported and before the script goes on, so
`from torch.nn.parallel import DistributedDataParallel` finds ours everywhere: in the script, in
its own modules and in the libraries it uses. torch's own code keeps torch's classes, because it
relies on their insides.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

OURS_BY_TORCHS = {
    ("torch.nn.parallel", "DistributedDataParallel"): ("paceline.ddp", "DistributedDataParallel"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): (
        "paceline.ddp",
        "DistributedDataParallel",
    ),
    ("torch.nn", "DataParallel"): ("paceline.dp", "DataParallel"),
    ("torch.nn.parallel", "DataParallel"): ("paceline.dp", "DataParallel"),
    ("torch.nn", "SyncBatchNorm"): ("paceline.ddp.sync_batch_norm", "SyncBatchNorm"),
    ("torch.utils.data", "DistributedSampler"): ("paceline.data", "PaddedDistributedSampler"),
    ("torch.utils.data.distributed", "DistributedSampler"): (
        "paceline.data",
        "PaddedDistributedSampler",
    ),
}

_KEEP_TORCHS = {"torch", "paceline"}


def swap_classes() -> None:
    """Exchange every name of the table. torch must be fully imported."""
    for (torch_module, name), (our_module, our_name) in OURS_BY_TORCHS.items():
        swap(import_module(torch_module), name, getattr(import_module(our_module), our_name))


def swap(module: ModuleType, name: str, ours: Any) -> None:
    """Make `module.name` be `ours` for everybody but torch and Paceline themselves.

    A property of the module's class comes before the module's own dictionary, which stays as it
    is: code inside the module, which looks there, still sees the original.
    """
    originals = vars(module)

    def look_up(_: ModuleType) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return originals[name] if asker.partition(".")[0] in _KEEP_TORCHS else ours

    def assign(_: ModuleType, value: Any) -> None:
        nonlocal ours
        ours = value  # somebody else's patch goes over ours, as it would over torch's

    kind: Any = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: property(look_up, assign)})
