"""Where replicas compute: from `device_ids` to devices, and which of them share a thread.

Every `"cpu:1"` shares the CPU's one memory but has a thread of its own. Replicas on one accelerator
share a thread: its kernels are queued and not waited for, so a second thread could only get in the
way of the first (see decision 0010).
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
        """What torch's class would have in `device_ids`: an index for an accelerator."""
        return torch.device(self.name) if self.device.type == "cpu" else self.device.index


def find_devices(device_ids: Sequence[Device] | None) -> list[ReplicaDevice]:
    """One device for every entry of `device_ids`, by default every accelerator."""
    if device_ids is None:
        accelerators = [find_device(index, "device") for index in range(accelerator.device_count())]
        return accelerators or [_cpu_alone()]
    if isinstance(device_ids, (str, int, torch.device)):
        raise DeviceError(
            f"device_ids is {device_ids!r}, which is not a list.",
            advice=f"Pass [{device_ids!r}, ...], one entry per replica.",
        )
    devices = [find_device(entry, f"device_ids[{i}]") for i, entry in enumerate(device_ids)]
    if not devices:
        raise DeviceError(
            "device_ids is empty, so there would be no replica.",
            advice='Leave it out to use every accelerator, or pass ["cpu:0", "cpu:1"].',
        )
    return devices


def find_device(entry: Device, what: str) -> ReplicaDevice:
    """The device that an entry of `device_ids` stands for; it must exist."""
    device = _as_torch_device(entry, what)
    if device.type == "cpu":
        return ReplicaDevice(f"cpu:{device.index or 0}", torch.device("cpu"))
    is_known = device.type == _accelerator_type()
    is_current = is_known and device.index is None
    index = torch.accelerator.current_device_index() if is_current else device.index
    if not is_known or index >= accelerator.device_count():
        raise DeviceError(
            f"{what} is {device}, but this machine has no such device.",
            f"It has {_describe_machine()}.",
            "Name devices that exist; one may be named several times. Replicas on the CPU are "
            'named "cpu:0", "cpu:1" and so on.',
        )
    return ReplicaDevice(f"{device.type}:{index}", torch.device(device.type, index))


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; the host waits only where it will read the tensor itself."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def group_by_thread(devices: Sequence[ReplicaDevice], *, one_each: bool) -> list[list[int]]:
    """The numbers of the replicas that share a thread, for every thread.

    With `one_each` every replica has its own, for replicas that wait for each other.
    """
    groups: dict[object, list[int]] = {}
    for number, place in enumerate(devices):
        is_alone = one_each or place.device.type == "cpu"
        groups.setdefault(number if is_alone else place.device, []).append(number)
    return list(groups.values())


def away_from_home(module: nn.Module, home: ReplicaDevice) -> DeviceError:
    """What to raise where a parameter or buffer does not lie where the first replica computes."""
    named = [*module.named_parameters(), *module.named_buffers()]
    name, tensor = next((name, tensor) for name, tensor in named if tensor.device != home.device)
    return DeviceError(
        f"{name!r} is on {tensor.device}, but the first replica computes on {home.name}.",
        f"Its shape is {tuple(tensor.shape)}.",
        f'Move the whole model with `.to("{home.device}")`, or name its device first in '
        "device_ids.",
    )


def _as_torch_device(entry: Device, what: str) -> torch.device:
    if isinstance(entry, int) and not isinstance(entry, bool):
        kind = _accelerator_type()
        if kind is None:
            raise DeviceError(
                f"{what} is {entry}, but this machine has no accelerator.",
                advice='Replicas on the CPU are named "cpu:0", "cpu:1" and so on.',
            )
        if entry < 0:
            raise DeviceError(f"{what} is {entry}.", advice="Devices are counted from 0 up.")
        return torch.device(kind, entry)
    try:
        return torch.device(entry)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"{what} is {entry!r}, which is not a device.",
            advice='A device is an accelerator\'s number, or a name such as "cuda:0" or "cpu:1".',
        ) from error


def _cpu_alone() -> ReplicaDevice:
    warnings.warn(
        "DataParallel found no accelerator, so the module runs alone on the CPU, as if it were not "
        'wrapped. Pass device_ids=["cpu:0", "cpu:1"] for two replicas in two threads.',
        stacklevel=4,
    )
    return ReplicaDevice("cpu:0", torch.device("cpu"))


def _accelerator_type() -> str | None:
    found = accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def _describe_machine() -> str:
    kind = _accelerator_type()
    if kind is None:
        return "the CPU only"
    return (
        f"{', '.join(f'{kind}:{index}' for index in range(accelerator.device_count()))} and the CPU"
    )
