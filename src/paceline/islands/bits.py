"""Differences of parameters in fewer bits: packed on one island, unpacked to equal bits on all.

    32   unchanged
    16   bfloat16, whose range is that of float32
     8   whole numbers from -127 to 127, with one scale for every 1,024 of them

Rounding is to the nearest, so packing the same numbers gives the same bytes on every worker.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.islands.options import BLOCK, SCALE_BYTES


def pack(values: Tensor, bits: int) -> Tensor:
    """The bytes of a flat tensor, on the host."""
    if bits == 32:
        packed = values
    elif bits == 16:
        packed = values.to(torch.bfloat16)
    else:
        return _pack_8(values)
    return packed.contiguous().cpu().view(torch.uint8)


def unpack(data: Tensor, like: Tensor, bits: int) -> Tensor:
    """The values in the bytes of a tensor such as `like`, on its device."""
    if bits == 8:
        return _unpack_8(data, like)
    dtype = like.dtype if bits == 32 else torch.bfloat16
    # A copy, because bytes in the middle of a message may not be aligned for the dtype.
    return data.clone().view(dtype).to(like.device, like.dtype)


def packed_bytes(count: int, dtype: torch.dtype, bits: int) -> int:
    """How many bytes `count` values take."""
    if bits == 8:
        return count + SCALE_BYTES * -(-count // BLOCK)
    return count * (dtype.itemsize if bits == 32 else 2)


def _pack_8(values: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(values.float(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1) / 127
    steps = torch.where(scales > 0, scales, torch.ones_like(scales))
    numbers = (blocks / steps[:, None]).round().to(torch.int8).view(-1)[: values.numel()]
    return torch.cat([scales.cpu().view(torch.uint8), numbers.cpu().view(torch.uint8)])


def _unpack_8(data: Tensor, like: Tensor) -> Tensor:
    count = like.numel()
    split = SCALE_BYTES * -(-count // BLOCK)
    scales = data[:split].clone().view(torch.float32).to(like.device)
    numbers = data[split:].view(torch.int8).to(like.device)
    each = scales.repeat_interleave(BLOCK)[:count]
    return (numbers * each).to(like.dtype)
