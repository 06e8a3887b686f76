"""Differences of parameters in fewer bits: packed on one island, unpacked to equal bits on all.

    32   unchanged
    16   bfloat16, whose range is that of float32
     8   whole numbers from -127 to 127, with one scale for every 1,024 of them

Rounding is to the nearest, so packing the same numbers gives the same bytes on every worker. All
of it is computed on the device of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, SCALE_BYTES = 1024, 4
"""With 8 bits, how many values share a scale, and the scale's bytes."""


def pack(values: Tensor, bits: int) -> Tensor:
    """The bytes of a flat tensor."""
    if bits == 8:
        return _pack_8(values)
    packed = values if bits == 32 else values.to(torch.bfloat16)
    return packed.contiguous().view(torch.uint8)


def unpack(data: Tensor, like: Tensor, bits: int) -> Tensor:
    """The values in the bytes of a tensor such as `like`."""
    if bits == 8:
        return _unpack_8(data, like)
    dtype = like.dtype if bits == 32 else torch.bfloat16
    return _view(data, dtype).to(like.dtype)


def packed_bytes(count: int, dtype: torch.dtype, bits: int) -> int:
    """How many bytes `count` values take."""
    if bits == 8:
        return count + SCALE_BYTES * -(-count // BLOCK)
    return count * (dtype.itemsize if bits == 32 else 2)


def _pack_8(values: Tensor) -> Tensor:
    count = values.numel()
    if missing := -count % BLOCK:
        values = torch.nn.functional.pad(values, (0, missing))
    blocks = values.float().view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1) / 127
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))
    numbers = (blocks / steps[:, None]).round_().to(torch.int8).view(-1)[:count]
    return torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)])


def _unpack_8(data: Tensor, like: Tensor) -> Tensor:
    count = like.numel()
    split = SCALE_BYTES * -(-count // BLOCK)
    each = _view(data[:split], torch.float32).repeat_interleave(BLOCK)[:count]
    return each.mul_(data[split:].view(torch.int8)).to(like.dtype)


def _view(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as numbers; copied if they are not aligned for the dtype."""
    is_odd = data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize
    return (data.clone() if is_odd else data).view(dtype)
