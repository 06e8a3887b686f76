"""Joining the replicas' outputs: tensors are joined along one dimension, on one device.

Tensors without dimensions, such as losses, become a vector with one element per replica. What is
not a tensor must be equal in all replicas, and is returned once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from paceline.comm import tree
from paceline.dp.devices import ReplicaDevice, move
from paceline.errors import UsageError

_ADVICE = "Make the module return the same structure for every chunk of a batch."


def gather(
    outputs: Sequence[Any], sources: Sequence[ReplicaDevice], device: torch.device, dim: int = 0
) -> Any:
    """One output like each of `outputs`; `sources` say where these come from, for messages."""
    return _Join([source.name for source in sources], device, dim).join("output", outputs)


class _Join:
    def __init__(self, sources: Sequence[str], device: torch.device, dim: int) -> None:
        self.sources, self.device, self.dim = sources, device, dim

    def join(self, path: str, values: Sequence[Any]) -> Any:
        first = values[0]
        for value, source in zip(values, self.sources, strict=True):
            if _kind(value) is not _kind(first):
                raise UsageError(
                    f"{path} is a {_kind(first).__name__} from {self.sources[0]}, but a "
                    f"{_kind(value).__name__} from {source}.",
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
            if any(True for value in values for _ in tree.tensors(value)):
                raise UsageError(
                    f"{path} is a set of tensors, of which nobody can tell which belong together.",
                    advice="Return a tuple, a list or a dictionary.",
                )
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
        by_key = [dict(tree.children(value)) for value in values]
        keys = list(by_key[0])
        for own, source in zip(by_key, self.sources, strict=True):
            if own.keys() != by_key[0].keys():
                raise UsageError(
                    f"{path} does not hold the same on {self.sources[0]} and {source}.",
                    f"It holds {', '.join(keys) or 'nothing'} and {', '.join(own) or 'nothing'}.",
                    _ADVICE,
                )
        joined = [self.join(path + key, [items[key] for items in by_key]) for key in keys]
        return tree.with_children(values[0], joined)

    def one_of(self, path: str, values: Sequence[Any]) -> Any:
        first = values[0]
        if not all(value is first or _equal(value, first) for value in values[1:]):
            raise UsageError(
                f"{path} differs between replicas and is not a tensor, so it cannot be joined.",
                f"It is {self._list(f'{value!r:.40}' for value in values)}.",
                "Return it as a tensor to get one element or row per replica.",
            )
        return first

    def _list(self, descriptions: Iterable[object]) -> str:
        pairs = zip(descriptions, self.sources, strict=True)
        return ", ".join(f"{description} from {source}" for description, source in pairs)


def _kind(value: Any) -> type:
    return Tensor if isinstance(value, Tensor) else type(value)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)  # a NaN is not even equal to itself
    except (RuntimeError, ValueError, TypeError):  # arrays and the like have no one answer
        return False
