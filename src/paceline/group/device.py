"""A worker's device: which one it takes, what connects it to others, what the host reads of it.

Everything else asks the device's own module, `torch.get_device_module(device)`, and whether the
host `runs_ahead` of it: so another kind of accelerator begins here.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import env
from paceline.errors import DeviceError

CPU = torch.device("cpu")
_ON_STREAMS = frozenset({"cuda", "xpu"})


def runs_ahead(device: torch.device) -> bool:
    """Whether the host queues work on its streams, copies from pinned memory, follows by events."""
    return device.type in _ON_STREAMS


def take_device(
    backend: str | None, local_rank: int, local_size: int, device_id: torch.device | int | None
) -> torch.device:
    """The device of this worker, made torch's current one: its own GPU if there is one, or the CPU.

    More workers than GPUs share them, which NCCL refuses unless each passes for a host of its own.
    """
    device = _pick_device(backend, local_rank, local_size, device_id)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def _pick_device(
    backend: str | None, local_rank: int, local_size: int, device_id: torch.device | int | None
) -> torch.device:
    if device_id is not None:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else device_id
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise DeviceError(
                f"device_id is {device}, but this machine has {torch.cuda.device_count()} GPUs.",
                advice="Use a smaller index, or leave device_id out to get the local rank's GPU.",
            )
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return CPU
    if backend == "nccl" and local_size > count and not env.may_share_gpu():
        raise DeviceError(
            f"{local_size} workers on this machine share {count} GPUs, which NCCL refuses.",
            advice=f"To try the script here, start it with `paceline run --share-gpus`; otherwise "
            f'start at most {count} workers per machine, or pass backend="gloo".',
        )
    return torch.device("cuda", local_rank % count)


def describe_gpu_memory() -> str:
    """What this worker holds of a GPU that it shares, and what is left there, as a sentence."""
    sizes = (torch.cuda.memory_reserved(), *torch.cuda.mem_get_info())
    held, free, total = (size / 2**30 for size in sizes)
    return (
        f"This worker holds {held:.1f} GiB of a GPU that it shares, where {free:.1f} of "
        f"{total:.1f} GiB are free: start fewer workers, or take a smaller batch."
    )


def pick_backend(device: torch.device, local_size: int) -> str:
    """NCCL and Gloo for GPUs, Gloo alone for CPUs and for GPUs shared by several workers."""
    if device.type != "cuda":
        return "gloo"
    is_shared = local_size > torch.cuda.device_count()
    if not dist.is_nccl_available() or (is_shared and not env.may_share_gpu()):
        has_none = "this torch has no NCCL." if not dist.is_nccl_available() else ""
        warnings.warn(
            f"{local_size} workers use {torch.cuda.device_count()} GPUs with Gloo between them: "
            + (has_none or "NCCL wants one GPU per worker, or `paceline run --share-gpus`.")
            + " Expect little speed-up.",
            stacklevel=3,
        )
        return "gloo"
    return "cpu:gloo,cuda:nccl"


class HostCopy:
    """One tensor's values as of now, on the host later.

    Reading a number at once would make the host wait until a GPU has caught up, and then the GPU
    for the host; a few steps later the number is there for nothing.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: Any = None
        if tensor.device.type == "cpu":
            self._tensor = tensor.clone()
            return
        self._tensor = tensor.to("cpu", non_blocking=True)  # which torch makes pinned memory
        self._event = torch.get_device_module(tensor.device).Event()
        self._event.record()

    @property
    def is_here(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """The values; waits for the device where it has not come that far yet."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensor
