"""Summing sparse gradients: every rank gets the rows that any rank touched.

An embedding's gradient holds a few rows of a large table, different ones on each rank, so it
does not fit a bucket. Ranks exchange their row counts, then their rows, padded to the longest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Group


def sum_sparse(group: Group, grad: Tensor | None, like: Tensor, what: str) -> tuple[Tensor, bool]:
    """The sum of all ranks' sparse gradients, and whether any rank had one.

    `like` is the parameter: it gives shape, dtype and device on ranks that have no gradient.
    """
    if grad is None:
        indices, values = _nothing(like)
    else:
        sparse = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
        indices, values = sparse.indices(), sparse.values()
    count = indices.shape[1]
    mine = torch.tensor([count, int(grad is not None)], device=like.device)
    sizes = [tuple(size.tolist()) for size in comm.all_gather(group, mine, what)]
    longest = max(size for size, _ in sizes)
    is_used = any(used for _, used in sizes)
    all_indices, all_values = [], []
    if longest:
        padded_indices = indices.new_zeros(indices.shape[0], longest)
        padded_indices[:, :count] = indices
        padded_values = values.new_zeros(longest, *values.shape[1:])
        padded_values[:count] = values
        gathered_indices = comm.all_gather(group, padded_indices, what)
        gathered_values = comm.all_gather(group, padded_values, what)
        for (size, _), its_indices, its_values in zip(
            sizes, gathered_indices, gathered_values, strict=True
        ):
            all_indices.append(its_indices[:, :size])
            all_values.append(its_values[:size])
        indices, values = torch.cat(all_indices, dim=1), torch.cat(all_values)
    total = torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)
    return total.coalesce(), is_used


def _nothing(like: Tensor) -> tuple[Tensor, Tensor]:
    indices = torch.empty(1, 0, dtype=torch.long, device=like.device)
    values = torch.empty(0, *like.shape[1:], dtype=like.dtype, device=like.device)
    return indices, values
