"""From a tensor to what is written down of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.comm import tree
from paceline.record.stages import FIRST_VALUES, Stats, TensorFacts

FEWEST_FOR_STATS = 8
"""Statistics of fewer values would nearly be the values."""


def facts_of(name: str, tensor: Tensor, *, values: bool, is_number: bool = False) -> TensorFacts:
    """What is kept of a tensor; of its values only the first, and only if `values` were asked for.

    `is_number` marks one that is itself a statistic, such as a loss: it is always kept.
    """
    keeps_values = values or is_number
    return TensorFacts(
        name=name,
        shape=list(tensor.shape),
        dtype=dtype_name(tensor),
        device=str(tensor.device),
        bytes=bytes_of(tensor),
        stats=stats_of(tensor) if keeps_values or tensor.numel() >= FEWEST_FOR_STATS else None,
        first=first_values(tensor) if keeps_values else None,
    )


def tree_facts(name: str, value: Any, *, values: bool) -> list[TensorFacts]:
    """The facts of every tensor in a tree; a single one has the tree's own name."""
    named = list(tree.named_tensors(value, name))
    if len(named) == 1:
        named = [(name, named[0][1])]
    return [facts_of(path, tensor, values=values) for path, tensor in named]


@torch.no_grad()
def stats_of(tensor: Tensor) -> Stats | None:
    """Smallest, mean and largest value and the share of zeros; None without numbers to order."""
    if tensor.numel() == 0 or tensor.is_complex() or not _is_plain(tensor):
        return None
    numbers = tensor.detach().double()
    low, mean, high = numbers.min(), numbers.mean(), numbers.max()
    zeros = (numbers == 0).double().mean()
    known = torch.stack([low, mean, high, zeros]).tolist()
    return Stats(min=known[0], mean=known[1], max=known[2], zeros=known[3])


def first_values(tensor: Tensor, count: int = FIRST_VALUES) -> list[float] | None:
    """The first few values in row order; None where they are no real numbers."""
    if tensor.is_complex() or not _is_plain(tensor):
        return None
    return [float(v) for v in tensor.detach().reshape(-1)[:count].double().tolist()]


def bytes_of(value: Any) -> int:
    """The bytes of all tensors in a tree."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.tensors(value))


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
