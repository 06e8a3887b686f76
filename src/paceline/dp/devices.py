"""Where replicas compute: `device_ids` as devices, and which of them share a thread.

Replicas on `"cpu:0"`, `"cpu:1"` share memory but have a thread each. Replicas on one accelerator
share a thread: kernels are only queued, so a second thread would contend with the first (see
decision 0010).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, accelerator, nn

from paceline.errors import DeviceError

Device = int | str | torch.device


@dataclass(frozen=True, slots=True)
class ReplicaDevice:
    """One entry of `device_ids`: its name, and the device that tensors there are on."""

    name: str
    device: torch.device

    @property
    def torch_id(self) -> int | torch.device:
        """The entry in the `device_ids` of torch's class: an index for an accelerator."""
        return torch.device(self.name) if self.device.type == "cpu" else self.device.index


def find_devices(device_ids: Sequence[Device] | None) -> list[ReplicaDevice]:
    """One device for every entry of `device_ids`, by default every accelerator."""
    if device_ids is None:
        accelerators = [find_device(index, "device") for index in range(accelerator.device_count())]
        if not accelerators:
            warnings.warn(
                "DataParallel found no accelerator, so the module runs alone on the CPU, as if it "
                'were not wrapped. Pass device_ids=["cpu:0", "cpu:1"] for two replicas.',
                stacklevel=3,
            )
        return accelerators or [find_device("cpu", "device")]
    is_list = not isinstance(device_ids, (str, int, torch.device))
    entries = enumerate(device_ids) if is_list else ()
    devices = [find_device(entry, f"device_ids[{number}]") for number, entry in entries]
    if not devices:
        raise DeviceError(
            f"device_ids is {device_ids!r}, which is not a list of devices.",
            advice='Leave it out to use every accelerator, or pass ["cpu:0", "cpu:1"].',
        )
    return devices


def find_device(entry: Device, what: str) -> ReplicaDevice:
    """The device for an entry of `device_ids`; it must exist."""
    found = accelerator.current_accelerator(check_available=True)
    kind, count = "no accelerator" if found is None else found.type, accelerator.device_count()
    try:
        device = torch.device(f"{kind}:{entry}" if isinstance(entry, int) else entry)
    except (RuntimeError, TypeError):
        device = torch.device("meta")  # which is refused below
    if device.type == "cpu":
        return ReplicaDevice(f"cpu:{device.index or 0}", torch.device("cpu"))
    is_current = device.type == kind and device.index is None
    index = accelerator.current_device_index() if is_current else device.index
    if device.type != kind or index >= count:
        names = ", ".join(f"{kind}:{number}" for number in range(count))
        raise DeviceError(
            f"{what} is {entry!r}, but this machine has no such device.",
            f"It has {names} and the CPU." if names else "It has no accelerator, only the CPU.",
            "Name devices that exist; one may be named several times. Replicas on the CPU are "
            'named "cpu:0", "cpu:1" and so on.',
        )
    return ReplicaDevice(f"{kind}:{index}", torch.device(kind, index))


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; only a copy to the CPU blocks."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def group_by_thread(devices: Sequence[ReplicaDevice], *, one_each: bool) -> list[list[int]]:
    """For every thread, the numbers of the replicas that share it.

    With `one_each` every replica has its own thread, for replicas that wait for each other.
    """
    groups: dict[object, list[int]] = {}
    for number, place in enumerate(devices):
        is_alone = one_each or place.device.type == "cpu"
        groups.setdefault(number if is_alone else place.device, []).append(number)
    return list(groups.values())


def away_from_home(module: nn.Module, home: ReplicaDevice) -> DeviceError:
    """The error for a parameter or buffer that is not on the first replica's device."""
    named = [*module.named_parameters(), *module.named_buffers()]
    name, tensor = next((name, tensor) for name, tensor in named if tensor.device != home.device)
    return DeviceError(
        f"{name!r} is on {tensor.device}, but the first replica computes on {home.name}.",
        f"Its shape is {tuple(tensor.shape)}.",
        f'Move the whole model with `.to("{home.device}")`, or name its device first in '
        "device_ids.",
    )
