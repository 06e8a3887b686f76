"""The number of items over which torch's losses average: rows, or the targets that count.

A chunk's mean is weighted by its divisor. `cross_entropy` divides by the weights of the targets
that are not ignored, whose sum differs between chunks with equally many rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UsageError

Count = Callable[[Any], Tensor | float]

_COUNTING = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}


def find_count(loss_fn: Callable[..., Tensor], reduction: str) -> Count | None:
    """A function that counts the items of a mean; None for rows, and for an unknown loss.

    Raises if the loss has a different reduction than `reduction`.
    """
    function, options = _take_apart(loss_fn)
    own = options.get("reduction", reduction)
    if own in ("mean", "sum") and own != reduction:
        raise UsageError(
            f"loss_fn returns the {own} of a chunk, but backward() got reduction={reduction!r}.",
            advice=f"Pass reduction={own!r} to backward(), or another loss.",
        )
    if reduction != "mean" or function not in _COUNTING.values():
        return None
    return partial(_count_targets, options.get("ignore_index", -100), options.get("weight"))


def _take_apart(loss_fn: Callable[..., Tensor]) -> tuple[Any, dict[str, Any]]:
    """torch's function that a loss calls, if it is known, and its options."""
    if isinstance(loss_fn, nn.Module):
        return _COUNTING.get(type(loss_fn)), {
            name: getattr(loss_fn, name)
            for name in ("reduction", "ignore_index", "weight")
            if hasattr(loss_fn, name)
        }
    if isinstance(loss_fn, partial):
        function, options = _take_apart(loss_fn.func)
        return None if loss_fn.args else function, options | loss_fn.keywords
    if getattr(loss_fn, "__module__", None) != F.__name__:
        return None, {}
    options = {
        name: parameter.default
        for name, parameter in inspect.signature(loss_fn).parameters.items()
        if name in ("reduction", "ignore_index", "weight")
    }
    return loss_fn, options


def _count_targets(ignored: int, weight: Tensor | None, targets: Any) -> Tensor | float:
    if not isinstance(targets, Tensor):
        return 1.0  # the loss itself will raise
    if targets.is_floating_point():
        return float(targets.numel())  # probabilities of classes: a mean over rows
    counts = targets != ignored
    if weight is None:
        return counts.sum()
    by_class = weight.detach().to(targets.device, torch.float64)
    return (by_class[targets.where(counts, 0)] * counts).sum()
