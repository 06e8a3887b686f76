"""Joining the replicas' outputs: tensors are joined along one dimension, on one device.

Tensors without dimensions, such as losses, become a vector with one element per replica. What is
no tensor must be equal in all replicas, and is returned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from paceline.comm import tree
from paceline.dp.devices import Place, move
from paceline.errors import UsageError

_ADVICE = "Make the module return the same structure for every chunk of a batch."


def gather(
    outputs: Sequence[Any], places: Sequence[Place], device: torch.device, dim: int = 0
) -> Any:
    """One output like each of `outputs`; `places` say where these come from, for messages."""
    return _Join(places, device, dim).join("output", outputs)


class _Join:
    def __init__(self, places: Sequence[Place], device: torch.device, dim: int) -> None:
        self.places, self.device, self.dim = places, device, dim

    def join(self, path: str, values: Sequence[Any]) -> Any:
        first = values[0]
        for value, place in zip(values, self.places, strict=True):
            if _kind(value) is not _kind(first):
                raise UsageError(
                    f"{path} is a {_name(first)} from {self.places[0].name}, but a "
                    f"{_name(value)} from {place.name}.",
                    advice=_ADVICE,
                )
        if isinstance(first, Tensor):
            return self.join_tensors(path, values)
        if isinstance(first, PackedSequence):
            raise UsageError(
                f"{path} is a packed sequence, whose rows lie mixed and cannot be joined.",
                advice="Return it padded, with pad_packed_sequence(..., total_length=...).",
            )
        if isinstance(first, (set, frozenset)):
            self.check_set(path, values)
        elif tree.is_container(first):
            return self.join_containers(path, values)
        return self.one_of(path, values)

    def join_tensors(self, path: str, parts: Sequence[Tensor]) -> Tensor:
        here = [move(part, self.device) for part in parts]
        if all(part.dim() == 0 for part in here) and self.dim in (0, -1):
            return torch.stack(here)
        try:
            return torch.cat(here, self.dim)
        except (RuntimeError, IndexError) as error:
            raise UsageError(
                f"{path} cannot be joined along dim {self.dim}.",
                f"Its parts are {self._list(tuple(part.shape) for part in parts)}.",
                "Parts may differ in that dimension only: pad them, or return a list instead.",
            ) from error

    def join_containers(self, path: str, values: Sequence[Any]) -> Any:
        keys = [[key for key, _ in tree.children(value)] for value in values]
        for number, own in enumerate(keys):
            if own != keys[0] and (len(own) != len(keys[0]) or set(own) != set(keys[0])):
                raise UsageError(
                    f"{path} does not hold the same on {self.places[0].name} and "
                    f"{self.places[number].name}.",
                    f"It holds {_enumerate(keys[0])} and {_enumerate(own)}.",
                    _ADVICE,
                )
        by_key = [dict(tree.children(value)) for value in values]
        joined = [self.join(path + key, [items[key] for items in by_key]) for key in keys[0]]
        return tree.with_children(values[0], joined)

    def check_set(self, path: str, sets: Sequence[Any]) -> None:
        if any(True for value in sets for _ in tree.tensors(value)):
            raise UsageError(
                f"{path} is a set of tensors, of which nobody can tell which belong together.",
                advice="Return a tuple, a list or a dictionary.",
            )

    def one_of(self, path: str, values: Sequence[Any]) -> Any:
        first = values[0]
        if not all(value is first or _equal(value, first) for value in values[1:]):
            raise UsageError(
                f"{path} differs between replicas and is no tensor, so it cannot be joined.",
                f"It is {self._list(map(_shorten, values))}.",
                "Return it as a tensor to get one element or row per replica.",
            )
        return first

    def _list(self, descriptions: Any) -> str:
        pairs = zip(descriptions, self.places, strict=True)
        return ", ".join(f"{description} from {place.name}" for description, place in pairs)


def _kind(value: Any) -> type:
    return Tensor if isinstance(value, Tensor) else type(value)


def _name(value: Any) -> str:
    return "tensor" if isinstance(value, Tensor) else type(value).__name__


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)  # a NaN is not even equal to itself
    except (RuntimeError, ValueError, TypeError):  # arrays and the like have no one answer
        return False


def _enumerate(keys: list[str]) -> str:
    return ", ".join(keys) if keys else "nothing"


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
