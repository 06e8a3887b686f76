"""Which tensors of two states differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """One name that is not the same on both sides."""

    name: str
    words: str
    largest: float = math.inf
    """The largest absolute difference; infinite where the two cannot be subtracted."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is equal to the last bit, and what is not, the largest difference first."""

    equal: int
    differing: list[Difference]
    only_in_first: list[str]
    only_in_second: list[str]

    @property
    def is_equal(self) -> bool:
        return not (self.differing or self.only_in_first or self.only_in_second)


def compare_states(first: Mapping[str, Any], second: Mapping[str, Any]) -> Comparison:
    """Compare values by name."""
    shared = [name for name in first if name in second]
    found = [_difference(name, first[name], second[name]) for name in shared]
    differing = [each for each in found if each is not None]
    return Comparison(
        equal=len(shared) - len(differing),
        differing=sorted(differing, key=lambda each: -each.largest),
        only_in_first=[name for name in first if name not in second],
        only_in_second=[name for name in second if name not in first],
    )


def flatten(state: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor and value of a nested state, by its path."""
    match state:
        case Mapping():
            for key, value in state.items():
                yield from flatten(value, (*keys, str(key)))
        case list() | tuple():
            for index, value in enumerate(state):
                yield from flatten(value, (*keys, str(index)))
        case _:
            yield ".".join(keys), state


def _difference(name: str, first: Any, second: Any) -> Difference | None:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        same = first == second or (first != first and second != second)
        return None if same is True else Difference(name, f"{first!r:.40} and {second!r:.40}")
    if first.shape != second.shape:
        return Difference(name, f"shape {tuple(first.shape)} and {tuple(second.shape)}")
    kinds = [str(each.dtype).removeprefix("torch.") for each in (first, second)]
    prefix = "" if kinds[0] == kinds[1] else f"{kinds[0]} and {kinds[1]}, "
    a, b = _as_numbers(first), _as_numbers(second)
    is_same = (a == b) | (a.isnan() & b.isnan())
    count = int((~is_same).sum())
    if count == 0:
        return Difference(name, f"{prefix}equal values", 0.0) if prefix else None
    gap = torch.where(is_same, 0.0, (a - b).abs())
    largest = float(gap.nan_to_num(nan=math.inf).max())
    relative = largest / max(float(a.abs().nan_to_num(posinf=0.0).max()), 1e-300)
    words = f"{prefix}{count:,} of {a.numel():,} differ, by at most {largest:.3g}"
    return Difference(name, f"{words} ({relative:.2g} of the largest value)", largest)


def _as_numbers(tensor: Tensor) -> Tensor:
    """In a type that holds the values of all others, so that they can be subtracted."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
