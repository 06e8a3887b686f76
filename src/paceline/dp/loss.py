"""The loss on the replicas: how much each chunk's loss counts in that of the whole batch.

A mean over chunks of different sizes is not the mean of their means. Each chunk's loss gets a
factor, and the sum over chunks of factor times loss is the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from paceline.dp.devices import ReplicaDevice
from paceline.dp.scatter import Chunk
from paceline.errors import UsageError

LossReduction = Literal["mean", "sum"]
Count = Callable[[Any], Tensor | float]


def plan_factors(
    chunks: Sequence[Chunk],
    reduction: LossReduction,
    count: Count | None,
    devices: Sequence[ReplicaDevice],
) -> list[Tensor]:
    """Each chunk's factor, a float64 on its own device; nothing waits for a device."""
    if reduction not in get_args(LossReduction):
        raise UsageError(
            f"reduction is {reduction!r}.",
            advice="Say 'mean' or 'sum', whichever loss_fn computes over its chunk.",
        )
    homes = [devices[chunk.replica].device for chunk in chunks]
    if count is None:
        total = sum(chunk.rows for chunk in chunks)
        is_sum = reduction == "sum" or total == 0
        shares = [1.0 if is_sum else chunk.rows / total for chunk in chunks]
        return [
            torch.full((), share, dtype=torch.float64, device=device)
            for share, device in zip(shares, homes, strict=True)
        ]
    counts = [
        _as_count(count(chunk.targets), device) for chunk, device in zip(chunks, homes, strict=True)
    ]
    whole = torch.stack([own.to(homes[0]) for own in counts]).sum()
    if reduction == "sum":
        return [whole.reciprocal().to(device) for device in homes]
    return [own / whole.to(device) for own, device in zip(counts, homes, strict=True)]


def _as_count(value: Tensor | float, device: torch.device) -> Tensor:
    own = torch.as_tensor(value, device=device).detach().to(torch.float64)
    if own.dim() != 0:
        raise UsageError(
            f"count returned a tensor of shape {tuple(own.shape)}, but a count is one number.",
            advice="Return how many items of the chunk count, such as `(targets != -100).sum()`.",
        )
    return own


def compute_loss(chunk: Chunk, module: nn.Module, loss_fn: Callable[..., Tensor]) -> Tensor:
    """The loss of a chunk, which must be something to differentiate."""
    output = module(*chunk.args, **chunk.kwargs)
    loss = loss_fn(output) if chunk.targets is None else loss_fn(output, chunk.targets)
    is_number = isinstance(loss, Tensor) and loss.dim() == 0
    if not is_number or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        lacks = "does not depend on any parameter" if is_number else "is not one number"
        raise UsageError(
            f"loss_fn returned {what}, which {lacks}.",
            advice="Return the mean or the sum over the chunk, computed from the module's output "
            "without detach(), item() or no_grad().",
        )
    return loss


def total_loss(losses: Sequence[Tensor], factors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The loss of the whole batch. A chunk that does not count may have no loss (0 / 0)."""
    parts = [
        torch.where(factor > 0, loss.detach() * factor.to(loss.dtype), 0).to(device)
        for loss, factor in zip(losses, factors, strict=True)
    ]
    return torch.stack(parts).sum()
