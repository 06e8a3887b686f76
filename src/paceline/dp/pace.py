"""Whether a GPU waits for Python: how long its work takes there, and how long it takes to start.

Two events are put around the work, and nothing waits for them. A GPU that is kept waiting ends
when Python ends; one that is busy ends later, and if it has not ended by the next call, it is far
behind. Memory that the work leaves behind is noted on the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WAITS_BELOW = 1.25
"""A GPU that needs at most this many times as long as Python needs to start the work waits."""


class Pace:
    """One measured call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._host_s = 0.0
        self._allocated = 0
        self.kept_bytes = 0
        """What the work left in memory: outputs, and what backward needs."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        self._allocated = torch.cuda.memory_allocated(self._device)
        start = time.perf_counter()
        self._begin.record(torch.cuda.current_stream(self._device))
        yield
        self._end.record(torch.cuda.current_stream(self._device))
        self._host_s = time.perf_counter() - start
        self.note_memory()

    def note_memory(self) -> None:
        """Look how much memory is kept, here or at the end: whatever is more."""
        grown = torch.cuda.memory_allocated(self._device) - self._allocated
        self.kept_bytes = max(self.kept_bytes, grown)

    def is_waiting_for_python(self) -> bool:
        if not self._host_s or not self._end.query():  # type: ignore[no-untyped-call]
            return False
        device_s: float = self._begin.elapsed_time(self._end) / 1e3
        return device_s <= WAITS_BELOW * self._host_s
