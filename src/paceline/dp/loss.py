"""The loss on the replicas: how much each chunk's loss counts in that of the whole batch.

A mean over chunks of different sizes is not the mean of their means. Each chunk's loss gets a
factor, and the sum over chunks of factor times loss is the loss of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from paceline.dp.devices import Place
from paceline.dp.scatter import Chunk
from paceline.errors import UsageError

Reduction = Literal["mean", "sum"]
Count = Callable[[Any], Tensor | float]


def plan_factors(
    chunks: Sequence[Chunk], reduction: Reduction, count: Count | None, places: Sequence[Place]
) -> list[Tensor]:
    """Each chunk's factor, a float64 on its own device; nothing waits for a device."""
    if reduction not in get_args(Reduction):
        raise UsageError(
            f"reduction is {reduction!r}.",
            advice="Say 'mean' or 'sum', whichever loss_fn computes over its chunk.",
        )
    devices = [places[chunk.replica].device for chunk in chunks]
    if reduction == "sum" and count is None:
        return [torch.ones((), dtype=torch.float64, device=device) for device in devices]
    if count is None:
        return _by_rows([chunk.rows for chunk in chunks], devices)
    counts = [
        _as_count(count(chunk.targets), device)
        for chunk, device in zip(chunks, devices, strict=True)
    ]
    total = torch.stack([own.to(devices[0]) for own in counts]).sum()
    if reduction == "sum":
        return [total.reciprocal().to(device) for device in devices]
    return [own / total.to(device) for own, device in zip(counts, devices, strict=True)]


def _as_count(value: Tensor | float, device: torch.device) -> Tensor:
    own = torch.as_tensor(value, device=device).detach().to(torch.float64)
    if own.dim() != 0:
        raise UsageError(
            f"count returned a tensor of shape {tuple(own.shape)}, but a count is one number.",
            advice="Return how many items of the chunk count, such as `(targets != -100).sum()`.",
        )
    return own


def _by_rows(rows: Sequence[int], devices: Sequence[torch.device]) -> list[Tensor]:
    total = sum(rows)
    shares = [own / total if total else 1.0 for own in rows]
    return [
        torch.full((), share, dtype=torch.float64, device=device)
        for share, device in zip(shares, devices, strict=True)
    ]


def compute_loss(chunk: Chunk, module: nn.Module, loss_fn: Callable[..., Tensor]) -> Tensor:
    """The loss of a chunk, checked."""
    output = module(*chunk.args, **chunk.kwargs)
    loss = loss_fn(output) if chunk.targets is None else loss_fn(output, chunk.targets)
    check_loss(loss)
    return loss


def differentiate(loss: Tensor, factor: Tensor) -> Tensor:
    """Run backward from `factor` times the loss; the loss itself, without its graph."""
    loss.backward(factor.to(loss.dtype))  # type: ignore[no-untyped-call]
    return loss.detach()


def check_loss(loss: Any) -> None:
    """Raise unless a loss function returned something to differentiate."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.dim() != 0:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise UsageError(
            f"loss_fn returned {what}, but a loss is one number.",
            advice="Return a tensor without dimensions: the mean or the sum over the chunk.",
        )
    if not loss.requires_grad:
        raise UsageError(
            "loss_fn returned a tensor that does not depend on any parameter.",
            advice="Compute it from the module's output, without detach(), item() or no_grad().",
        )


def total_loss(losses: Sequence[Tensor], factors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The loss of the whole batch. A chunk that does not count may have no loss (0 / 0)."""
    parts = [
        torch.where(factor > 0, loss.detach() * factor.to(loss.dtype), 0).to(device)
        for loss, factor in zip(losses, factors, strict=True)
    ]
    return torch.stack(parts).sum()
