"""Flat memory: what a buffer holds, how tensors lie in it, and which slice of it is whose.

Plain arithmetic, the same on every rank. Buckets of gradients, shared segments and copies of
parameters are all laid out with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ALIGNMENT = 64
"""Elements: borders between slices, and starts of tensors, where kernels give the same bits as on
the whole and run at full speed."""


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer: `numel` elements, then a trailer of a few more that are never scaled."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    trailer: int = 0

    @property
    def length(self) -> int:
        """All elements."""
        return self.numel + self.trailer

    @property
    def nbytes(self) -> int:
        return self.length * self.dtype.itemsize


def slices(length: int, count: int) -> list[tuple[int, int]]:
    """`count` slices that cover a buffer, with aligned borders; the last ones may be empty."""
    share = round_up(-(-length // count), ALIGNMENT)
    starts = [min(length, number * share) for number in range(count + 1)]
    return list(pairwise(starts))


def dense_layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and strides of a copy without gaps: the tensor's own order of dimensions if it has
    no gaps itself, else row by row."""
    if tensor.is_contiguous():
        return tensor.shape, tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]))[::-1]
    if tensor.detach().permute(order).is_contiguous():
        return tensor.shape, tensor.stride()
    return tensor.shape, torch.empty(tensor.shape, device="meta").stride()


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to
