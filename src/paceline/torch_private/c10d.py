"""Internals of process groups: stores, backends, timeouts, and aborting.

NCCL's waits end when its communicators are aborted. The class behind the name `nccl` depends on the
version of torch: `ProcessGroupNCCL`, or from 2.15 on `ProcessGroupNCCL2`. So it is found by its
methods. Stores are public as `torch.distributed.TCPStore` and so on, but type checkers only find
them in the private module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.torch_private.lookup import find, named_if_missing

start_averaging: Callable[[Any, Tensor], torch.futures.Future[Tensor]] = find(
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks._allreduce_fut"
)
"""Average a tensor over a group in place; the future's value is the tensor."""


with named_if_missing():
    from torch._C._distributed_c10d import FileStore as FileStore
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore


Future: type[Any] = find("torch._C.Future")
"""What collectives return; `torch.futures.Future` is a subclass."""

_world: Any = find("torch.distributed.distributed_c10d._world")
# Public from torch 2.15 on, where the private one warns.
_set_timeout: Any = getattr(dist, "set_timeout", None) or find(
    "torch.distributed.distributed_c10d._set_pg_timeout"
)
_abort: Any = find("torch.distributed.distributed_c10d._abort_process_group")
for _path in ("_world.pg_map", "_world.group_count"):
    find(f"torch.distributed.distributed_c10d.{_path}")
for _path in (
    *("_get_backend", "_register_backend", "_set_default_backend"),
    "_get_sequence_number_for_group",
):
    find(f"torch.distributed.ProcessGroup.{_path}")

_CPU = torch.device("cpu")


def count_collectives(group: Any) -> Callable[[], int]:
    """A function that returns how many collectives this rank has started; 0 where unknown."""
    try:
        count: Callable[[], int] = group._get_sequence_number_for_group
        count()
    except (AttributeError, RuntimeError):  # not torch's group, or a backend that does not count
        return int
    return count


def can_abort_nccl() -> bool:
    """Whether waits in NCCL can be ended from outside."""
    return hasattr(getattr(dist, "ProcessGroupNCCL", None), "abort")


def find_nccl_backends() -> list[Any]:
    """The NCCL backend of every group of this process, including the script's groups."""
    found = []
    for group in list(_world.pg_map):
        with suppress(RuntimeError):  # the group has no backend for CUDA
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "abort") and not isinstance(backend, dist.ProcessGroupGloo):
                found.append(backend)
    return found


def has_failed(backend: Any) -> bool:
    """Whether torch has found that a communicator of this backend lost a connection."""
    with suppress(AttributeError, RuntimeError):  # not every backend knows
        return bool(backend.get_error().name != "SUCCESS")
    return False


def abort_together(backends: Sequence[Any]) -> None:
    """Abort all collectives of these backends; may be called from another thread.

    All in one NCCL group call: aborting one alone may wait for kernels of the others.
    """
    for first in backends[:1]:
        names = ("_group_start", "_group_end")
        if not hasattr(first, "_group_start"):  # ProcessGroupNCCL2
            names = ("_start_coalescing", "_end_coalescing")
        start, end = (getattr(first, name) for name in names)
        start()
        for backend in backends:
            with suppress(RuntimeError):
                backend.abort()
        with suppress(RuntimeError):
            end()


def abort_default_group() -> None:
    """Destroy all groups of this process without waiting for their other members."""
    _abort()


def reset_group_count() -> None:
    """Make torch name the next default group like the first one.

    torch numbers groups: a process whose group failed would look for the next one under another
    name than a process that has had none.
    """
    _world.group_count = 0


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of the group's collectives."""
    _set_timeout(timeout, group)


def group_timeout_s(group: Any) -> float | None:
    """The timeout of the group's collectives; None where its backend has none."""
    with suppress(Exception):  # not every backend has options
        return float(group._get_backend(_CPU).options._timeout.total_seconds())
    return None


def has_cpu_backend(group: Any) -> bool:
    """Whether the group can exchange CPU tensors."""
    try:
        group._get_backend(_CPU)
    except RuntimeError:
        return False
    return True


def gloo_like(group: Any, store: Store, rank: int, size: int) -> Any:
    """A Gloo backend with the options of the group's, not registered with torch."""
    return dist.ProcessGroupGloo(store, rank, size, group._get_backend(_CPU).options)


def unregistered_gloo_group(
    store: Store, rank: int, size: int, timeout_s: float, network: Any, threads: int
) -> dist.ProcessGroup:
    """A process group over one network device of Gloo's, in no registry of torch's."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [network]
    options._threads = threads
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return group


Create = Callable[..., Any]

# An import statement would find the function of the same name.
_module = import_module("torch.distributed.rendezvous")
find("torch.distributed.rendezvous._create_c10d_store")


def wrap_store_creation(wrap: Callable[[Create], Create]) -> None:
    """Wrap the function `create(hostname, port, ...)` that makes torch's stores."""
    vars(_module)["_create_c10d_store"] = wrap(vars(_module)["_create_c10d_store"])
