"""What is written down of live tensors, and where the followed sample and weight are found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import lt
from typing import Any

import torch
from torch import Tensor

from paceline.comm import tree
from paceline.errors import UsageError
from paceline.record.stages import Stats, TensorFacts

FIRST_VALUES = 6
"""How many values of a tensor are kept, where values are asked for."""
FEWEST_FOR_STATS = 8
"""Statistics of fewer values would nearly be the values."""


def facts_of(name: str, tensor: Tensor, *, values: bool) -> TensorFacts:
    """What is kept of a tensor; of its values only the first, and only if `values` were asked for.

    Without them, statistics of a few values are left out too.
    """
    has_stats = values or tensor.numel() >= FEWEST_FOR_STATS
    return TensorFacts(
        name=name,
        shape=list(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        bytes=bytes_of(tensor),
        stats=_stats(tensor) if has_stats else None,
        first=first_values(tensor) if values else None,
    )


def tree_facts(name: str, value: Any, *, values: bool) -> list[TensorFacts]:
    """The facts of every tensor in a tree; a single one has the tree's own name."""
    named = list(tree.named_tensors(value, name))
    if len(named) == 1:
        named = [(name, named[0][1])]
    return [facts_of(path, tensor, values=values) for path, tensor in named]


def flat_facts(name: str, tensors: Mapping[str, Tensor], *, values: bool) -> list[TensorFacts]:
    """All tensors as one row of numbers; none where there are no real ones."""
    parts = [t.detach().reshape(-1) for t in tensors.values() if not t.is_complex()]
    if not parts:
        return []
    flat = torch.cat([part.to(parts[0].device, parts[0].dtype) for part in parts])
    return [facts_of(name, flat, values=values)]


def dataset_rows(dataset: Any) -> int | None:
    """Its length; None where there is no dataset, or one that does not know."""
    try:
        return None if dataset is None else len(dataset)
    except TypeError:
        return None


def dataset_facts(dataset: Any, like: Sequence[TensorFacts], *, values: bool) -> list[TensorFacts]:
    """The dataset as one tensor; none where it cannot be told from its rows, which are `like`."""
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, (tuple, list)) and tensors and isinstance(tensors[0], Tensor):
        return [facts_of("inputs", tensors[0], values=values)]
    rows = dataset_rows(dataset)
    if rows is None or not like or not like[0].shape:
        return []
    one, *extents = like[0].shape
    size = like[0].bytes // max(1, one) * rows
    dtype, shape = like[0].dtype, [rows, *extents]
    return [TensorFacts(name="inputs", shape=shape, dtype=dtype, device="", bytes=size)]


@torch.no_grad()
def _stats(tensor: Tensor) -> Stats | None:
    """Smallest, mean and largest value and the share of zeros; None without numbers to order."""
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
    """The first values of one row of the first tensor that has so many rows."""
    found = next((t for t in tensors if t.dim() and t.shape[0] == rows), None)
    return None if found is None else first_values(found[row])


def bytes_of(value: Any) -> int:
    """The bytes of all tensors in a tree."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.tensors(value))


def _has_real_numbers(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_plain and not tensor.is_complex()


@dataclass(frozen=True, slots=True)
class WeightRef:
    """One element of one parameter."""

    name: str
    index: tuple[int, ...]

    def read(self, tensors: Mapping[str, Tensor]) -> float | None:
        """Its value in one of several tensors by name; None where there is no real number."""
        tensor = tensors.get(self.name)
        if tensor is None or tensor.is_complex():
            return None
        return float(tensor.detach()[self.index])

    def position_in(self, tensor: Tensor) -> int:
        """Which element it is, in row order."""
        position = 0
        for i, extent in zip(self.index, tensor.shape, strict=True):
            position = position * extent + i
        return position


def find_weight(text: str | None, parameters: Mapping[str, Tensor]) -> WeightRef | None:
    """The weight that `name[1,2]` means; without text the first of all, and None without any."""
    if text is None:
        real = ((n, p) for n, p in parameters.items() if p.numel() and not p.is_complex())
        first = next(real, None)
        return None if first is None else WeightRef(first[0], (0,) * first[1].dim())
    name, bracket, rest = text.strip().partition("[")
    if name not in parameters:
        near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.4)
        listed = list(parameters)
        raise UsageError(
            f"The model has no trained parameter {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "."),
            advice=f"Its parameters are {', '.join(listed[:8])}{', ...' if listed[8:] else ''}.",
        )
    shape = tuple(parameters[name].shape)
    index = tuple(map(int, re.findall(r"\d+", rest))) or (0,) * len(shape)
    is_written_well = not bracket or re.fullmatch(r"[\d,\s]*\]", rest)
    is_inside = len(index) == len(shape) and all(map(lt, index, shape))
    if not is_written_well or not is_inside:
        example = f"{name}[{', '.join('0' for _ in shape)}]" if shape else name
        raise UsageError(
            f"{text!r} is not one element of {name!r}, whose shape is {shape}.",
            advice=f"Write it like {example}.",
        )
    return WeightRef(name, index)
