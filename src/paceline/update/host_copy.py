"""A tensor on its way to the host: asked for now, read when it has arrived.

The host runs ahead of a GPU. Reading a number at once would make it wait until the device has
caught up, and then the device for the host; a few steps later the number is there for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """One tensor's values as of now, on the host later."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._event: Any = None
        if tensor.device.type == "cpu":
            self._tensor = tensor.clone()
            return
        self._tensor = tensor.to("cpu", non_blocking=True)
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
