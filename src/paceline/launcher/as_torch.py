"""`paceline run --as-torch`: an unmodified torch script gets our classes under torch's names.

The names are exchanged right after torch has been imported and before the script continues, so
`from torch.nn.parallel import DistributedDataParallel` finds ours everywhere: in the script, in
its own modules and in the libraries it uses. torch's own code keeps torch's classes, because it
relies on their insides.

Scripts that call `torch.multiprocessing.spawn` train in processes of their own, often with a
MASTER_PORT of their own. So what a worker is prepared for here holds in what it spawns as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from paceline import env
from paceline.launcher.worker import when_imported

_DDP = "paceline.ddp", "DistributedDataParallel"
_DP = "paceline.dp", "DataParallel"
_SAMPLER = "paceline.data", "PaddedDistributedSampler"
OURS_BY_TORCHS = {
    ("torch.nn.parallel", "DistributedDataParallel"): _DDP,
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): _DDP,
    ("torch.nn", "DataParallel"): _DP,
    ("torch.nn.parallel", "DataParallel"): _DP,
    ("torch.nn", "SyncBatchNorm"): ("paceline.ddp.sync_batch_norm", "SyncBatchNorm"),
    ("torch.utils.data", "DistributedSampler"): _SAMPLER,
    ("torch.utils.data.distributed", "DistributedSampler"): _SAMPLER,
}

_KEEP_TORCHS = {"torch", "paceline"}
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def prepare_spawned(store_port: int, as_torch: bool) -> None:
    """Prepare a process that a worker has spawned as the worker was."""
    when_imported("multiprocessing.spawn", lambda: prepare_spawning(store_port, as_torch))
    when_imported("torch", lambda: prepare_torch(store_port, as_torch))


def prepare_spawning(store_port: int, as_torch: bool) -> None:
    """Make every process that multiprocessing spawns call `prepare_spawned` before all else."""
    from multiprocessing import spawn

    original = spawn.get_command_line
    call = f"prepare_spawned({store_port}, {as_torch})"
    prefix = f"from {__name__} import prepare_spawned; {call}; "

    def get_command_line(**kwargs: Any) -> list[str]:
        command = original(**kwargs)
        if "-c" in command[:-1]:
            at = command.index("-c") + 1
            command[at] = prefix + command[at]
        return command

    spawn.get_command_line = get_command_line


def prepare_torch(store_port: int, as_torch: bool) -> None:
    """Do what must be done as soon as torch has been imported."""
    import torch.distributed

    if torch.distributed.is_available():
        # An import statement would find the function of the same name.
        serve_other_stores(import_module("torch.distributed.rendezvous"), store_port)
        if env.read_survival() is not None:
            swap(torch.distributed, "init_process_group", join_group)
    if as_torch:
        swap_classes()


def serve_other_stores(rendezvous: ModuleType, store_port: int) -> None:
    """Let rank 0 serve a store of the script's own: the launcher serves only its own."""
    original: Callable[..., Any] | None = getattr(rendezvous, "_create_c10d_store", None)
    if original is None:
        return

    def create_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if port == store_port or _AGENT_STORE not in os.environ:
            return original(hostname, port, *args, **kwargs)
        before = os.environ.pop(_AGENT_STORE)
        try:
            return original(hostname, port, *args, **kwargs)
        finally:
            os.environ[_AGENT_STORE] = before

    vars(rendezvous)["_create_c10d_store"] = create_store


def join_group(*args: Any, **kwargs: Any) -> None:
    """torch's `init_process_group`, in a worker that another may have to replace."""
    from paceline.comm.world import init_as_torch

    init_as_torch(*args, **kwargs)


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
