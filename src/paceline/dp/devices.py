"""Where replicas compute: from `device_ids` to places, and which of them take turns.

A place is a memory (`device`) and a name. Every `"cpu:1"` shares the CPU's one memory but has a
thread of its own. Several places on one accelerator share a thread: its kernels are queued and
not waited for, so a second thread could only get in the way of the first (see decision 0010).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import DeviceError

Device = int | str | torch.device


@dataclass(frozen=True, slots=True)
class Place:
    """One replica's place: its name, as in `device_ids`, and the device its tensors are on."""

    name: str
    device: torch.device

    @property
    def torch_id(self) -> int | torch.device:
        """What torch's class would have in `device_ids`: an index for an accelerator."""
        is_cpu = self.device.type == "cpu"
        return torch.device(self.name) if is_cpu else self.device.index


def find_places(device_ids: Sequence[Device] | None) -> list[Place]:
    """One place for every entry of `device_ids`, by default one for every accelerator."""
    if device_ids is None:
        return _all_accelerators() or [_lonely_cpu()]
    if isinstance(device_ids, (str, int, torch.device)):
        raise DeviceError(
            f"device_ids is {device_ids!r}, which is not a list.",
            advice=f"Pass [{device_ids!r}, ...], one entry per replica.",
        )
    device_ids = list(device_ids)
    if not device_ids:
        raise DeviceError(
            "device_ids is empty, so there would be no replica.",
            advice='Leave it out to use every accelerator, or pass ["cpu:0", "cpu:1"].',
        )
    return [find_place(entry, f"device_ids[{i}]") for i, entry in enumerate(device_ids)]


def find_place(entry: Device, what: str) -> Place:
    """The place that an entry of `device_ids` stands for; it must exist."""
    device = _as_device(entry, what)
    if device.type == "cpu":
        return Place(f"cpu:{device.index or 0}", torch.device("cpu"))
    accelerator = torch.accelerator.current_accelerator() if _count_accelerators() else None
    if accelerator is None or device.type != accelerator.type:
        raise DeviceError(
            f"{what} is {device}, but this machine has no {device.type} device.",
            f"It has {_describe_machine()}.",
            'Replicas on the CPU are named "cpu:0", "cpu:1" and so on.',
        )
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= _count_accelerators():
        raise DeviceError(
            f"{what} is {device}, but this machine has no such device.",
            f"It has {_describe_machine()}.",
            "Name devices that exist; one may be named several times.",
        )
    return Place(f"{device.type}:{index}", torch.device(device.type, index))


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; the host waits only where it will read the tensor itself."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def group_into_lanes(places: Sequence[Place], *, one_each: bool) -> list[list[int]]:
    """The numbers of the places that share a thread, for every thread.

    With `one_each` every place has its own, for replicas that wait for each other.
    """
    lanes: dict[object, list[int]] = {}
    for number, place in enumerate(places):
        is_alone = one_each or place.device.type == "cpu"
        lanes.setdefault(number if is_alone else place.device, []).append(number)
    return list(lanes.values())


def check_tensors_at_home(named: Iterable[tuple[str, Tensor]], home: Place) -> None:
    """Raise unless every parameter and buffer lies where the first replica computes."""
    for name, tensor in named:
        if tensor.device != home.device:
            raise DeviceError(
                f"{name!r} is on {tensor.device}, but the first replica computes on {home.name}.",
                f"Its shape is {tuple(tensor.shape)}.",
                f'Move the whole model with `.to("{home.device}")`, or name its device first in '
                "device_ids.",
            )


def _as_device(entry: Device, what: str) -> torch.device:
    is_known = isinstance(entry, (int, str, torch.device)) and not isinstance(entry, bool)
    if isinstance(entry, int) and is_known:
        if not _count_accelerators():
            raise DeviceError(
                f"{what} is {entry}, but this machine has no accelerator.",
                advice='Replicas on the CPU are named "cpu:0", "cpu:1" and so on.',
            )
        if entry < 0:
            raise DeviceError(f"{what} is {entry}.", advice="Devices are counted from 0 up.")
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None  # there is at least one
        return torch.device(accelerator.type, entry)
    try:
        return torch.device(entry)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"{what} is {entry!r}, which is not a device.",
            advice='A device is an accelerator\'s number, or a name such as "cuda:0" or "cpu:1".',
        ) from error


def _all_accelerators() -> list[Place]:
    return [find_place(index, "device") for index in range(_count_accelerators())]


def _lonely_cpu() -> Place:
    warnings.warn(
        "DataParallel found no accelerator, so the module runs alone on the CPU, as if it were not "
        'wrapped. Pass device_ids=["cpu:0", "cpu:1"] for two replicas in two threads.',
        stacklevel=4,
    )
    return Place("cpu:0", torch.device("cpu"))


def _count_accelerators() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _describe_machine() -> str:
    count = _count_accelerators()
    accelerator = torch.accelerator.current_accelerator() if count else None
    if accelerator is None:
        return "the CPU only"
    names = [f"{accelerator.type}:{index}" for index in range(count)]
    return f"{', '.join(names)} and the CPU"
