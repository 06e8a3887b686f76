"""Random numbers that depend on the step and the shard, and not on who computes it.

Before a shard is loaded, and again before the model sees it, every generator that code commonly
draws from is seeded by (seed, step, shard): torch's for the CPU and for the model's device,
Python's, and NumPy's where it is loaded. Between two steps they are seeded by (seed, step), so
that what is drawn there is the same on every worker and after a restart too.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """A seed of 63 bits for one purpose, step and shard; equal for equal arguments only."""
    text = "/".join(map(str, (seed, purpose, *numbers)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class Generators:
    """The generators of this process that code draws from without naming one."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is the model's; without it only the CPU is touched, as in a loader's worker."""
        is_other = device is not None and device.type not in {"cpu", "meta"}
        self._device = device if is_other else None
        self._of_device: Any = torch.get_device_module(device) if is_other else None

    def seed(self, value: int) -> None:
        torch.default_generator.manual_seed(value)
        if self._of_device is not None:
            with self._of_device.device(self._device):
                self._of_device.manual_seed(value)
        random.seed(value)
        if (numpy := _numpy_random()) is not None:
            numpy.seed([value & 0xFFFFFFFF, value >> 32])

    def state(self) -> tuple[Any, ...]:
        numpy = _numpy_random()
        return (
            torch.default_generator.get_state(),
            None if self._of_device is None else self._of_device.get_rng_state(self._device),
            random.getstate(),
            None if numpy is None else numpy.get_state(),
        )

    def restore(self, state: tuple[Any, ...]) -> None:
        cpu, device, python, numpy = state
        torch.default_generator.set_state(cpu)
        if device is not None:
            self._of_device.set_rng_state(device, self._device)
        random.setstate(python)
        if numpy is not None:
            _numpy_random().set_state(numpy)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, anything may be drawn; afterwards the generators stand where they stood."""
        state = self.state()
        try:
            yield
        finally:
            self.restore(state)


def _numpy_random() -> Any:
    """NumPy's generators, if somebody in this process uses NumPy."""
    return getattr(sys.modules.get("numpy"), "random", None)
