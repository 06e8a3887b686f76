"""Datasets, and values with one item per sample: a tensor, a list, a tuple or a dictionary.

Score functions and encoders return them for a batch; they are put together for all batches and
handed to a function, a tuple as its arguments and a dictionary as its named ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.errors import UsageError


def check_dataset(dataset: Any, advice: str) -> None:
    """Refuse what has items that are not samples; `advice` is about loaders."""
    if isinstance(dataset, DataLoader):
        problem = "whose items are batches"
    elif isinstance(dataset, str | bytes | os.PathLike | Mapping):
        problem, advice = "which has no samples", "Pass what was read from there: samples by index."
    elif isinstance(dataset, Iterator):
        problem = "which can be read once, and is read again in every epoch and after a death"
        advice = "Pass a list, or an object whose __iter__ begins anew."
    else:
        return
    raise UsageError(f"dataset is a {type(dataset).__name__}, {problem}.", advice=advice)


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
