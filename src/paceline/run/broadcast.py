"""Rank 0's values on every worker: tensors as they are, everything else as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import comm

_CHUNK_BYTES = 64 * 2**20


@torch.no_grad()
def copy_from_rank_0(
    group: Any, tensors: Sequence[Tensor], device: torch.device, what: str
) -> None:
    """Overwrite the tensors with rank 0's, by way of `device`, a few megabytes at a time."""
    chunk: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        chunk.append(tensor)
        filled += tensor.numel() * tensor.itemsize
        if filled > _CHUNK_BYTES:
            _copy_chunk(group, chunk, device, what)
            chunk, filled = [], 0
    if chunk:
        _copy_chunk(group, chunk, device, what)


def _copy_chunk(group: Any, chunk: list[Tensor], device: torch.device, what: str) -> None:
    flat = torch.cat([_as_bytes(tensor).to(device) for tensor in chunk])
    comm.broadcast(group, flat, 0, what)
    if group.rank() == 0:
        return
    sizes = [tensor.numel() * tensor.itemsize for tensor in chunk]
    for tensor, part in zip(chunk, torch.split(flat, sizes), strict=True):
        # A fresh start, because a view needs bytes that are aligned for its type.
        plain = torch.empty(tensor.shape, dtype=tensor.dtype)
        _as_bytes(plain).copy_(part)
        tensor.copy_(plain)


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().contiguous()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.view(-1).view(torch.uint8)
