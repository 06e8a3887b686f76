"""`paceline run --as-torch` and `paceline.enable()`: our classes under torch's names.

The names are exchanged right after torch has been imported and before the script continues, so
`from torch.nn.parallel import DistributedDataParallel` finds ours everywhere: in the script, in
its own modules and in the libraries it uses. torch's own code keeps torch's classes, because it
relies on their insides. Modules that got hold of torch's classes before `enable()` was called are
given ours; what cannot be exchanged any more is named in a warning.

Scripts that call `torch.multiprocessing.spawn` train in processes of their own, often with a
MASTER_PORT of their own. So what a worker is prepared for here holds in what it spawns as well.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import FrameType, ModuleType
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


@cache
def enable() -> None:
    """Give this process Paceline's classes under torch's names, as `paceline run --as-torch` does.

    Call it once, at the top of a script or notebook, before or after torch and the libraries that
    use it are imported. `DistributedDataParallel`, `DataParallel`, `SyncBatchNorm` and
    `DistributedSampler` of torch are then ours for everybody but torch itself: also where they were
    imported by name or subclassed before, and in processes that multiprocessing spawns. A model
    that is wrapped already stays as it is, and a warning says so.
    """
    store_port = env.read_int(os.environ, "MASTER_PORT", default=0)
    when_imported("multiprocessing.spawn", lambda: prepare_spawning(store_port, True))
    when_imported("torch", swap_classes)


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


@cache
def swap_classes() -> None:
    """Exchange every name of the table, once. torch must be fully imported."""
    ours_by_torchs: dict[type, type] = {}
    for (torch_module, name), (our_module, our_name) in OURS_BY_TORCHS.items():
        module, ours = import_module(torch_module), getattr(import_module(our_module), our_name)
        ours_by_torchs[vars(module)[name]] = ours
        swap(module, name, ours)
    rebind(ours_by_torchs)
    late = [
        *(words for theirs, ours in ours_by_torchs.items() for words in rebase(theirs, ours)),
        *find_locals(ours_by_torchs, sys._getframe()),
    ]
    if late:
        warnings.warn(
            f"paceline.enable() was called too late for {'; '.join(late)}. What is named here "
            "stays torch's. Call enable() before it, best at the top of the script.",
            stacklevel=4,  # past when_imported() and enable()
        )


def rebind(ours_by_torchs: dict[type, type]) -> None:
    """Give ours to the modules that have torch's classes under names of their own."""
    for module_name, module in list(sys.modules.items()):
        if _keeps_torchs(module_name) or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in ours_by_torchs:
                vars(module)[name] = ours_by_torchs[value]


def rebase(theirs: type, ours: type) -> Iterator[str]:
    """Let classes that derive from torch's derive from ours; what has to stay as it is, in words.

    An object that exists has what torch's constructor gave it, which is of no use to our methods.
    """
    models = sum(type(each) is theirs for each in gc.get_referrers(theirs))
    if models and not issubclass(ours, theirs):
        yield f"{models} model{'s' * (models > 1)} wrapped in torch's {theirs.__name__}"
    subclasses: list[type] = theirs.__subclasses__()
    for derived in subclasses:
        if _keeps_torchs(derived.__module__):
            continue
        name = f"{derived.__module__}.{derived.__qualname__}"
        if any(isinstance(each, derived) for each in gc.get_referrers(derived)):
            yield f"{name}, which derives from torch's {theirs.__name__} and is in use"
            continue
        bases = tuple(ours if base is theirs else base for base in derived.__bases__)
        try:
            derived.__bases__ = bases
        except TypeError:  # the layout or the order of its bases does not allow it
            yield f"{name}, which derives from torch's {theirs.__name__}"


def find_locals(ours_by_torchs: dict[type, type], frame: FrameType | None) -> Iterator[str]:
    """Names inside the functions being called that still mean torch's classes, in words."""
    while frame is not None:
        if frame.f_locals is not frame.f_globals and not _keeps_torchs(
            frame.f_globals.get("__name__", "")
        ):
            for name, value in frame.f_locals.items():
                if isinstance(value, type) and value in ours_by_torchs:
                    yield f"the name {name} inside {frame.f_code.co_qualname}()"
        frame = frame.f_back


def _keeps_torchs(module_name: str) -> bool:
    return module_name.partition(".")[0] in _KEEP_TORCHS


def swap(module: ModuleType, name: str, ours: Any) -> None:
    """Make `module.name` be `ours` for everybody but torch and Paceline themselves.

    A property of the module's class comes before the module's own dictionary, which stays as it
    is: code inside the module, which looks there, still sees the original.
    """
    originals = vars(module)

    def look_up(_: ModuleType) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        return originals[name] if _keeps_torchs(asker) else ours

    def assign(_: ModuleType, value: Any) -> None:
        nonlocal ours
        ours = value  # somebody else's patch goes over ours, as it would over torch's

    kind: Any = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: property(look_up, assign)})
