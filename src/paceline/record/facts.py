"""What a recording keeps of live tensors: `TensorFacts`, and values of one row or one weight."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import lt
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError, did_you_mean
from paceline.files import dtype_name
from paceline.group import find_tensors, named_tensors
from paceline.record.stages import Stats, TensorFacts

FIRST_VALUES = 6
"""How many values of a tensor are kept, where values are asked for."""
FEWEST_FOR_STATS = 8
"""Statistics of fewer values would reveal the values."""

WeightRef = tuple[str, tuple[int, ...]]
"""A parameter's name, and which of its elements."""


def tree_facts(name: str, value: Any, *, values: bool) -> list[TensorFacts]:
    """The facts of every tensor in a tree; a single one has the tree's name.

    Of values only the first are kept, and only if `values` were asked for; without them,
    statistics of a few values are left out too.
    """
    named = list(named_tensors(value, name))
    if len(named) == 1:
        named = [(name, named[0][1])]
    return [
        TensorFacts(
            name=path,
            shape=list(tensor.shape),
            dtype=dtype_name(tensor),
            device=str(tensor.device),
            bytes=tensor_bytes(tensor),
            stats=_stats(tensor) if values or tensor.numel() >= FEWEST_FOR_STATS else None,
            first=first_values(tensor) if values else None,
        )
        for path, tensor in named
    ]


def flat_facts(name: str, tensors: Iterable[Tensor], *, values: bool) -> list[TensorFacts]:
    """The facts of all tensors as one flat tensor; empty where none has real numbers."""
    parts = [t.detach().reshape(-1) for t in tensors if not t.is_complex()]
    if not parts:
        return []
    row = torch.cat([part.to(parts[0].device, parts[0].dtype) for part in parts])
    return tree_facts(name, row, values=values)


def _stats(tensor: Tensor) -> Stats | None:
    """Smallest, mean and largest value and the share of zeros; None without real numbers."""
    if tensor.numel() == 0 or not _has_real_numbers(tensor):
        return None
    numbers = tensor.detach().double()
    zeros = (numbers == 0).double().mean()
    known = torch.stack([numbers.min(), numbers.mean(), numbers.max(), zeros]).tolist()
    return Stats(min=known[0], mean=known[1], max=known[2], zeros=known[3])


def first_values(tensor: Tensor) -> list[float] | None:
    """The first few values in row order; None where they are not real numbers."""
    if not _has_real_numbers(tensor):
        return None
    return [float(v) for v in tensor.detach().reshape(-1)[:FIRST_VALUES].double().tolist()]


def row_values(tensors: Sequence[Tensor], row: int, rows: int) -> list[float] | None:
    """The first values of one row of the first tensor that has `rows` rows."""
    found = next((t for t in tensors if t.dim() and t.shape[0] == rows), None)
    return None if found is None else first_values(found[row])


def tensor_bytes(value: Any) -> int:
    """The bytes of all tensors in a tree."""
    return sum(tensor.numel() * tensor.element_size() for tensor in find_tensors(value))


def dataset_rows(dataset: Any) -> int | None:
    """The dataset's length; None where there is none."""
    try:
        return None if dataset is None else len(dataset)
    except TypeError:
        return None


def _has_real_numbers(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_plain and not tensor.is_complex()


def read_weight(weight: WeightRef | None, tensors: Mapping[str, Tensor]) -> float | None:
    """A weight's value in `tensors`, by name; None where it is missing or complex."""
    tensor = None if weight is None else tensors.get(weight[0])
    if weight is None or tensor is None or tensor.is_complex():
        return None
    return float(tensor.detach()[weight[1]])


def find_weight(text: str | None, parameters: Mapping[str, Tensor]) -> WeightRef | None:
    """Parse a weight such as `name[1,2]`; without text the first of all, or None."""
    if text is None:
        real = [(n, p) for n, p in parameters.items() if p.numel() and not p.is_complex()]
        return (real[0][0], (0,) * real[0][1].dim()) if real else None
    name, bracket, rest = text.strip().partition("[")
    if name not in parameters:
        raise UsageError(
            f"The model has no trained parameter {name!r}.{did_you_mean(name, parameters)}",
            advice=f"One is {next(iter(parameters))!r}.",
        )
    shape = tuple(parameters[name].shape)
    index = tuple(map(int, re.findall(r"\d+", rest))) or (0,) * len(shape)
    is_written_well = not bracket or re.fullmatch(r"[\d,\s]*\]", rest)
    is_inside = len(index) == len(shape) and all(map(lt, index, shape))
    if not is_written_well or not is_inside:
        raise UsageError(
            f"{text!r} is not one element of {name!r}, whose shape is {shape}.",
            advice=f"Write it like {name}{[0] * len(shape) or ''}.",
        )
    return name, index
