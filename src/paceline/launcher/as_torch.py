"""`paceline run --as-torch` and `paceline.enable()`: our classes under torch's names.

The names are exchanged right after torch has been imported and before the script continues, so
`from torch.nn.parallel import DistributedDataParallel` finds ours everywhere: in the script, in
its own modules and in the libraries it uses. torch's own code keeps torch's classes, because it
relies on their insides. A module that has imported one of them already would keep torch's, so
`enable()` refuses to be called after that.

Scripts that call `torch.multiprocessing.spawn` train in processes of their own, often with a
MASTER_PORT of their own. So what a worker is prepared for here holds in what it spawns as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from paceline import env
from paceline.errors import UsageError
from paceline.launcher.worker import when_imported

_DDP = "paceline.ddp", "DistributedDataParallel"
_DP = "paceline.dp", "DataParallel"
_SAMPLER = "paceline.data", "PaddedDistributedSampler"
_NAMED_AS_TORCHS = {_DDP: ("paceline.ddp.as_torch", _DDP[1]), _DP: ("paceline.dp.as_torch", _DP[1])}
"""For a script that is not modified, and knows parameters by the names that torch's give them."""
OURS_BY_TORCHS = {
    ("torch.nn.parallel", "DistributedDataParallel"): _DDP,
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): _DDP,
    ("torch.nn", "DataParallel"): _DP,
    ("torch.nn.parallel", "DataParallel"): _DP,
    ("torch.nn", "SyncBatchNorm"): ("paceline.ddp.sync_batch_norm", "SyncBatchNorm"),
    ("torch.utils.data", "DistributedSampler"): _SAMPLER,
    ("torch.utils.data.distributed", "DistributedSampler"): _SAMPLER,
}

AsTorch = bool | Literal["enable"]
"""Whether a process is given our classes: by `--as-torch`, or by a call in the script."""

_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
_KEEP_TORCHS = {"torch", "paceline"}
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@cache
def enable() -> None:
    """Give this process Paceline's classes under torch's names, as `paceline run --as-torch` does.

    Call it at the top of a script or notebook, before torch's classes are imported by name and
    before libraries that use them are. `DistributedDataParallel`, `DataParallel`, `SyncBatchNorm`
    and `DistributedSampler` of torch are then ours everywhere but in torch itself, also in
    processes that multiprocessing spawns.
    """
    if "torch" in sys.modules:
        check_unused()
    store_port = env.read_int(os.environ, "MASTER_PORT", default=0)
    when_imported("multiprocessing.spawn", lambda: prepare_spawning(store_port, "enable"))
    when_imported("torch", swap_classes)


def prepare_spawned(store_port: int, as_torch: AsTorch) -> None:
    """Prepare a process that a worker has spawned as the worker was."""
    when_imported("multiprocessing.spawn", lambda: prepare_spawning(store_port, as_torch))
    when_imported("torch", lambda: prepare_torch(store_port, as_torch))


def prepare_spawning(store_port: int, as_torch: AsTorch) -> None:
    """Make every process that multiprocessing spawns call `prepare_spawned` before all else."""
    from multiprocessing import spawn

    original = spawn.get_command_line
    call = f"prepare_spawned({store_port}, {as_torch!r})"
    prefix = f"from {__name__} import prepare_spawned; {call}; "

    def get_command_line(**kwargs: Any) -> list[str]:
        command = original(**kwargs)
        # A frozen program is started again without any code to run.
        if "-c" in command[:-1]:
            at = command.index("-c") + 1
            command[at] = prefix + command[at]
        return command

    spawn.get_command_line = get_command_line


def prepare_torch(store_port: int, as_torch: AsTorch) -> None:
    """Do what must be done as soon as torch has been imported."""
    import torch.distributed

    if torch.distributed.is_available():
        serve_other_stores(store_port)
        if env.read_launched().survives:
            swap(torch.distributed, "init_process_group", join_group)
    if as_torch:
        swap_classes(is_modified=as_torch == "enable")


def tell_if_alone(tell: Callable[[], None]) -> None:
    """Call back if this process steps an optimizer before it is in a process group."""
    import torch.distributed

    from paceline.telemetry import follow_optimizers

    def look(_optimizer: object) -> None:
        stop()
        is_possible = torch.distributed.is_available()
        if not (is_possible and torch.distributed.is_initialized()):
            tell()

    stop = follow_optimizers(look)


def serve_other_stores(store_port: int) -> None:
    """Let rank 0 serve a store of the script's own: the launcher serves only its own."""
    from paceline.torch_private import wrap_store_creation

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
            if port == store_port or _AGENT_STORE not in os.environ:
                return original(hostname, port, *args, **kwargs)
            before = os.environ.pop(_AGENT_STORE)
            try:
                return original(hostname, port, *args, **kwargs)
            finally:
                os.environ[_AGENT_STORE] = before

        return create_store

    wrap_store_creation(wrap)


def join_group(*args: Any, **kwargs: Any) -> None:
    """torch's `init_process_group`, in a worker that another may have to replace."""
    from paceline.group import init_as_torch

    init_as_torch(*args, **kwargs)


@cache
def swap_classes(*, is_modified: bool = True) -> None:
    """Exchange every name of the table, once. torch must be fully imported."""
    for (torch_module, name), ours in OURS_BY_TORCHS.items():
        our_module, our_name = ours if is_modified else _NAMED_AS_TORCHS.get(ours, ours)
        swap(import_module(torch_module), name, getattr(import_module(our_module), our_name))
    if not is_modified:
        when_imported(_CHECKPOINT, strip_names)


def strip_names() -> None:
    """Have torch.distributed.checkpoint cut `module.` off for our class as it does for torch's."""
    module, name = _NAMED_AS_TORCHS[_DDP]
    names = vars(import_module(_CHECKPOINT))
    names["DDP"] = names["DDP"], getattr(import_module(module), name)


def check_unused() -> None:
    """Refuse to exchange classes that a module outside torch has already: it would keep torch's."""
    for user, name in find_users():
        library = "torch's classes" if user == "__main__" else user.partition(".")[0]
        raise UsageError(
            f"paceline.enable() was called too late: {user} has torch's {name} already.",
            advice=f"Call it first, before the script imports {library}; in a notebook restart "
            "the kernel.",
        )


def find_users() -> Iterator[tuple[str, str]]:
    """Modules outside torch that hold one of its classes or derive from it, with its name."""
    name_by_id = {}
    for torch_module, name in OURS_BY_TORCHS:
        theirs = vars(import_module(torch_module))[name]
        name_by_id[id(theirs)] = name
        for derived in theirs.__subclasses__():
            if not _keeps_torchs(derived.__module__):
                yield derived.__module__, name
    for user, module in list(sys.modules.items()):
        if not _keeps_torchs(user) and isinstance(module, ModuleType):
            for value in list(vars(module).values()):
                if id(value) in name_by_id:
                    yield user, name_by_id[id(value)]


def _keeps_torchs(module_name: str) -> bool:
    return module_name.partition(".")[0] in _KEEP_TORCHS


def swap(module: ModuleType, name: str, ours: Any) -> None:
    """Make `module.name` be `ours` for all modules but those of torch and Paceline themselves.

    A property of the module's class comes before the module's own dictionary, which stays as it
    is: code inside the module, which looks there, still sees the original.
    """
    originals = vars(module)

    def look_up(_: ModuleType) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return originals[name] if _keeps_torchs(asker) else ours

    def assign(_: ModuleType, value: Any) -> None:
        nonlocal ours
        ours = value  # a script's own patch goes over ours, as it would over torch's

    kind: Any = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: property(look_up, assign)})
