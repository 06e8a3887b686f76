"""Values with one item per sample: a tensor or a list, or a tuple or dictionary of such.

Score functions and encoders return them for a batch; they are put together for all batches and
handed to a function, a tuple as its arguments and a dictionary as its named ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError


def check_rows(value: Any, rows: int, who: str) -> None:
    """Refuse what has not one item per sample of a batch of `rows`; `who` returned it."""
    for leaf in value.values() if isinstance(value, dict) else _arguments(value):
        if not isinstance(leaf, Tensor | list) or (isinstance(leaf, Tensor) and not leaf.dim()):
            problem = f"returned {leaf!r:.60}"
        elif len(leaf) != rows:
            problem = f"returned {len(leaf)} items for a batch of {rows} samples"
        else:
            continue
        raise UsageError(
            f"{who} {problem}.",
            advice="Return tensors or lists with one item per sample, alone, in a tuple or in a "
            "dictionary, such as (out.softmax(1), y).",
        )


def join(parts: list[Any]) -> Any:
    """The values of all samples, from those of batches."""
    match parts[0]:
        case dict():
            return {name: join([part[name] for part in parts]) for name in parts[0]}
        case tuple():
            return tuple(join(list(items)) for items in zip(*parts, strict=True))
        case Tensor():
            return torch.cat(parts)
    return [item for part in parts for item in part]


def call(function: Callable[..., Any], value: Any) -> Any:
    """What the function makes of the values of all samples."""
    if isinstance(value, dict):
        return function(**value)
    return function(*_arguments(value))


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
