"""Gradients without a place in a bucket: sparse ones, and those of parameters just unfrozen.

An embedding's gradient holds a few rows of a large table, different ones on each rank, so it
does not fit a bucket: ranks exchange their row counts, then their rows, padded to the longest. A
parameter that was frozen when the model was wrapped has no place yet: in the step in which ranks
notice that it wants a gradient, it is averaged alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.ddp.buffer import ParamRef, set_value
from paceline.errors import DesyncError
from paceline.group import Group, all_gather, all_reduce, exchange


def average_sparse(
    group: Group, ref: ParamRef, share: float | Tensor, what: str, *, is_shadow: bool
) -> None:
    """Give a parameter the sum of all ranks' sparse gradients, times `share`; none to a shadow."""
    param = ref.get()
    if param is None:
        raise DesyncError(
            f"Parameter {ref.name!r} was removed after the model was wrapped.",
            advice="Change the model first, then wrap it.",
        )
    grad = None if is_shadow else param.grad
    if grad is None:  # shape, dtype and device come from the parameter
        indices = torch.empty(1, 0, dtype=torch.long, device=param.device)
        values = torch.empty(0, *param.shape[1:], dtype=param.dtype, device=param.device)
    else:
        sparse = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
        indices, values = sparse.indices(), sparse.values()
    count = indices.shape[1]
    mine = torch.tensor([count, int(grad is not None)], device=param.device)
    told = [tuple(each.tolist()) for each in all_gather(group, mine, what)]
    longest = max(size for size, _ in told)
    if longest:
        padded_indices = indices.new_zeros(indices.shape[0], longest)
        padded_indices[:, :count] = indices
        padded_values = values.new_zeros(longest, *values.shape[1:])
        padded_values[:count] = values
        by_rank = zip(all_gather(group, padded_indices, what), told, strict=True)
        indices = torch.cat([theirs[:, :size] for theirs, (size, _) in by_rank], dim=1)
        by_rank = zip(all_gather(group, padded_values, what), told, strict=True)
        values = torch.cat([theirs[:size] for theirs, (size, _) in by_rank])
    if not is_shadow and any(is_used for _, is_used in told):
        total = torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)
        param.grad = total.coalesce() * share


def average_unfrozen(
    group: Group,
    newly: Sequence[ParamRef],
    dense: Sequence[ParamRef],
    factor: float | Tensor,
    device: torch.device,
    step: int,
) -> None:
    """Give each dense one of these the mean of all ranks' gradients, times `factor`.

    Raises on every rank if others are unfrozen on one than on rank 0.
    """
    names = exchange(group, [ref.name for ref in newly], device, "Unfreezing")
    for rank, theirs in enumerate(names):
        if theirs != names[0]:
            odd = sorted(set(theirs) ^ set(names[0]))[0]
            one, other = (0, rank) if odd in names[0] else (rank, 0)
            raise DesyncError(
                f"Step {step}: {odd!r} requires grad on rank {one} but not on rank {other}.",
                advice="Freeze and unfreeze the same parameters on every rank.",
            )
    for ref in dense:
        param = ref.get()
        assert param is not None  # it required a gradient a moment ago
        flat = torch.zeros(param.numel() + 1, dtype=param.dtype, device=param.device)
        if param.grad is not None:
            # Divided as in buckets, which is what `factor` starts from; the last element counts who
            # has one.
            flat[:-1] = param.grad.to_dense().reshape(-1) / group.size()
            flat[-1] = 1
        all_reduce(group, flat, f"Step {step}: the sum of the gradient of {ref.name!r}")
        if flat[-1] != 0:
            mean = (flat[:-1] * factor).view(param.shape)
            if param.grad is not None and param.grad.requires_grad:
                set_value(param.grad, mean)
            else:
                param.grad = mean
