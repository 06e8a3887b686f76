"""Memory that holds a copy of the state while it is written: one copy, reused by every save.

The copy is laid out as the file will be, so writing it is one call, and hashing it another, both
without Python's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from paceline.checkpoint.files import BLOCK_BYTES
from paceline.checkpoint.tensors import Image, dtype_of, memory_of, plan_image, storable


class Staging:
    """One buffer, as large as the largest state so far."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._image: Image | None = None
        self._slots: list[Tensor] = []

    def fill(self, tensors: Mapping[str, Tensor]) -> memoryview:
        """Copy the tensors; the bytes of their file, valid until the next call.

        Raises MemoryError where there is no room for a copy.
        """
        plain, metadata = storable(tensors)
        image = plan_image(plain, metadata)
        if self._image is None or image.prefix != self._image.prefix:
            self._lay_out(image, needs_pinning=any(each.is_cuda for each in plain.values()))
        sources = [plain[name] for name in image.places]
        if sources:
            torch._foreach_copy_(self._slots, sources, non_blocking=self._buffer.is_pinned())
        for device in {each.device for each in sources if each.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return memory_of(self._buffer)[: image.total_bytes]

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._image, self._slots = None, []

    def _lay_out(self, image: Image, needs_pinning: bool) -> None:
        self._image, self._slots = None, []
        if self._buffer.numel() < image.total_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old one first
            self._buffer = _allocate(image.total_bytes, needs_pinning)
        begin = len(image.prefix)
        memory_of(self._buffer)[:begin] = image.prefix
        for place in image.places.values():
            raw = self._buffer[begin + place.begin : begin + place.end]
            self._slots.append(raw.view(dtype_of(place)).view(place.shape))
        self._image = image


def _allocate(size: int, needs_pinning: bool) -> Tensor:
    """Memory at the start of a block, pinned where a device copies into it."""
    room = size + BLOCK_BYTES
    whole = None
    if needs_pinning:
        with suppress(RuntimeError):  # more than may be pinned
            whole = torch.empty(room, dtype=torch.uint8, pin_memory=True)
    if whole is None:
        try:
            whole = torch.empty(room, dtype=torch.uint8)
        except RuntimeError as error:  # what torch says instead
            raise MemoryError(f"{room:,} bytes are not to be had") from error
    begin = -whole.data_ptr() % BLOCK_BYTES
    return whole[begin : begin + size]
