"""Joining the replicas' outputs: tensors are joined along one dimension, on one device.

Tensors without dimensions, such as losses, become a vector with one element per replica. What is
not a tensor must be equal in all replicas, and is returned once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from paceline.dp.devices import ReplicaDevice, move
from paceline.errors import UsageError
from paceline.group import children_of, is_container, with_children


def gather(
    outputs: Sequence[Any],
    sources: Sequence[ReplicaDevice],
    device: torch.device,
    dim: int = 0,
    path: str = "output",
) -> Any:
    """One output like each of `outputs`; `sources` say where these come from, for messages."""

    def refuse(what: str, describe: Callable[[Any], object], advice: str) -> UsageError:
        pairs = zip(outputs, sources, strict=True)
        said = ", ".join(f"{describe(value)!s:.60} from {source.name}" for value, source in pairs)
        return UsageError(f"{path} {what}.", f"It is {said}.", advice)

    first = outputs[0]
    if isinstance(first, PackedSequence):
        raise UsageError(
            f"{path} is a packed sequence, whose rows lie mixed and cannot be joined.",
            advice="Return it padded, with pad_packed_sequence(..., total_length=...).",
        )
    parts = [dict(children_of(value)) for value in outputs]
    kinds = {Tensor if isinstance(value, Tensor) else type(value) for value in outputs}
    if len(kinds) > 1 or any(own.keys() != parts[0].keys() for own in parts):
        advice = "Make the module return the same structure for every chunk of a batch."
        raise refuse("is not of the same structure in all replicas", _structure, advice)
    if isinstance(first, Tensor):
        here = [move(tensor, device) for tensor in outputs]
        if all(tensor.dim() == 0 for tensor in here) and dim in (0, -1):
            return torch.stack(here)
        try:
            return torch.cat(here, dim)
        except (RuntimeError, IndexError) as error:
            advice = "Parts may differ in that dimension only: pad them, or return a list instead."
            raise refuse(f"cannot be joined along dim {dim}", _shape, advice) from error
    if is_container(first) and not isinstance(first, set | frozenset):
        joined = [
            gather([own[key] for own in parts], sources, device, dim, path + key)
            for key in parts[0]
        ]
        return with_children(first, joined)
    if not all(value is first or _equal(value, first) for value in outputs[1:]):
        advice = "Return it as a tensor, or in a list, to get one element or row per replica."
        raise refuse("differs between replicas and is not a tensor", repr, advice)
    return first


def _structure(value: Any) -> str:
    keys = [key for key, _ in children_of(value)]
    return f"a {type(value).__name__}{' of ' + ', '.join(keys) if keys else ''}"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)  # a NaN is not even equal to itself
    except (RuntimeError, ValueError, TypeError):  # arrays and the like have no one answer
        return False
