"""Splitting a batch among replicas along one dimension, and joining their outputs.

Chunks are views where the tensor is already on the chunk's device. Tensors without dimensions, and
all that is not a tensor, go to every replica unchanged.

Outputs are joined on one device. Tensors without dimensions, such as losses, become a vector with
one element per replica. Anything else must be equal in all replicas, and is returned once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from paceline.dp.devices import ReplicaDevice, move
from paceline.errors import UsageError
from paceline.group import children_of, is_container, map_tensors, with_children

Contents = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional inputs, keyword inputs, targets."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One replica's share of a batch."""

    replica: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    """The length of the batch's first tensor in this chunk, along the split dimension."""
    targets: Any = None
    """The targets for the loss function."""

    @property
    def contents(self) -> Contents:
        return self.args, self.kwargs, self.targets

    def describe(self) -> str:
        """The shapes in the chunk, for messages."""
        named = _named_tensors(self.contents)
        shapes = [f"{path} of shape {tuple(tensor.shape)}" for path, tensor in named]
        return ", ".join(shapes[:4]) + (", ..." if len(shapes) > 4 else "") or "no inputs"


def scatter(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    devices: Sequence[ReplicaDevice],
    dim: int = 0,
    weights: Sequence[float] | None = None,
    targets: Any = None,
) -> list[Chunk]:
    """Split a batch into a chunk for every replica that gets rows, in order.

    An empty batch is one empty chunk, and no inputs at all are one chunk without any.
    """
    if not args and not kwargs:
        whole = map_tensors(lambda tensor: move(tensor, devices[0].device), targets)
        return [Chunk(0, (), {}, 0, whole)]
    contents = (args, kwargs, targets)
    named = _named_tensors(contents)
    cut = [(path, tensor) for path, tensor in named if tensor.dim() > 0]
    sizes_of = {id(t): _sizes(path, t, len(devices), dim, weights) for path, t in cut}
    if not cut:
        raise UsageError(
            "None of the inputs is a tensor with a dimension, so there is nothing to split.",
            f"Tensors without a dimension: {', '.join(path for path, _ in named) or 'none'}.",
            "Pass the batch as tensors, or call `.module` directly.",
        )
    _check_same_replicas(cut, sizes_of, dim)
    chunks = []
    for replica, rows in sizes_of[id(cut[0][1])].items():

        def part(tensor: Tensor, replica: int = replica) -> Tensor:
            own = _part(tensor, sizes_of[id(tensor)], dim, replica) if tensor.dim() > 0 else tensor
            return move(own, devices[replica].device)

        own_args, own_kwargs, own_targets = map_tensors(part, contents)
        chunks.append(Chunk(replica, own_args, own_kwargs, rows, own_targets))
    return chunks


def plan_sizes(rows: int, count: int, weights: Sequence[float] | None = None) -> dict[int, int]:
    """How many rows each of `count` replicas gets, without those that get none.

    Without weights, parts are those of `torch.chunk`: equal, but the last one smaller, possibly
    fewer than `count`. With weights, each border between two parts is rounded to the nearest row.
    """
    if weights is None:
        size = -(-rows // count)
        sizes = [max(0, min(size, rows - i * size)) for i in range(count)]
    else:
        total = sum(weights)
        borders = [round(rows * part / total) for part in accumulate(weights, initial=0.0)]
        sizes = [stop - start for start, stop in pairwise(borders)]
    return {i: size for i, size in enumerate(sizes) if size > 0} or {0: 0}


def check_weights(weights: Sequence[float] | None, replicas: int) -> None:
    """Raise unless `split` says how to share a batch among the replicas."""
    if weights is None:
        return
    is_list = isinstance(weights, Sequence) and not isinstance(weights, str)
    numbers: list[Any] = list(weights) if is_list else []
    are_numbers = all(isinstance(each, Real) and float(each) >= 0 for each in numbers)
    if not are_numbers or len(numbers) != replicas or not 0 < sum(numbers) < inf:
        raise UsageError(
            f"split is {weights!r}, for {replicas} replicas.",
            advice="Pass a weight from 0 up for each entry of device_ids, one of them above 0: "
            "[3, 1] gives the first replica three quarters of the rows.",
        )


def _part(tensor: Tensor, sizes: dict[int, int], dim: int, replica: int) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        # Autograd refuses in-place writes to the outputs of `split`. Writes to views made one by
        # one would change the graph of the tensor they share, from two threads at once.
        parts = torch.split(tensor, list(sizes.values()), dim)
        return parts[list(sizes).index(replica)]
    start = sum(size for other, size in sizes.items() if other < replica)
    return tensor.detach().narrow(dim, start, sizes[replica])


def _named_tensors(contents: Contents) -> list[tuple[str, Tensor]]:
    pairs = zip(contents, ("inputs", "kwargs", "targets"), strict=True)
    return [named for value, name in pairs for named in _find_tensors(value, name)]


def _find_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, PackedSequence):
        raise UsageError(
            f"{path} is a packed sequence, whose rows are interleaved and cannot be split.",
            f"It has {len(value.data):,} items of {int(value.batch_sizes[0])} sequences.",
            "Pass the padded batch and its lengths, and pack in forward.",
        )
    if isinstance(value, Tensor):
        yield path, value
    for key, item in children_of(value):
        yield from _find_tensors(item, path + key)


def _sizes(
    path: str, tensor: Tensor, count: int, dim: int, weights: Sequence[float] | None
) -> dict[int, int]:
    if tensor.layout is not torch.strided:  # sparse, or nested
        raise UsageError(
            f"{path} is a tensor of layout {tensor.layout}, which cannot be split.",
            advice="Pass it as a dense tensor, or keep it as a buffer of the module.",
        )
    if not -tensor.dim() <= dim < tensor.dim():
        raise UsageError(
            f"{path} has the shape {tuple(tensor.shape)}, which cannot be split along dim {dim}.",
            advice="Give every input a batch dimension there, or pass another `dim`.",
        )
    return plan_sizes(tensor.shape[dim], count, weights)


def _check_same_replicas(
    cut: list[tuple[str, Tensor]], sizes_of: dict[int, dict[int, int]], dim: int
) -> None:
    first_path, first = cut[0]
    for path, tensor in cut[1:]:
        if sizes_of[id(tensor)].keys() != sizes_of[id(first)].keys():
            raise UsageError(
                f"{first_path} would be split for {len(sizes_of[id(first)])} replicas along dim "
                f"{dim}, but {path} for {len(sizes_of[id(tensor)])}.",
                f"Their shapes are {tuple(first.shape)} and {tuple(tensor.shape)}.",
                f"Make both as long along dim {dim}; what every replica needs whole can be "
                "expanded to the batch, or kept as a buffer of the module.",
            )


def gather(
    outputs: Sequence[Any],
    sources: Sequence[ReplicaDevice],
    device: torch.device,
    dim: int = 0,
    path: str = "output",
) -> Any:
    """Join `outputs` into one of the same structure; `sources` are their devices, for messages."""

    def refuse(what: str, describe: Callable[[Any], object], advice: str) -> UsageError:
        pairs = zip(outputs, sources, strict=True)
        described = ", ".join(
            f"{describe(value)!s:.60} from {source.name}" for value, source in pairs
        )
        return UsageError(f"{path} {what}.", f"It is {described}.", advice)

    first = outputs[0]
    if isinstance(first, PackedSequence):
        raise UsageError(
            f"{path} is a packed sequence, whose rows are interleaved and cannot be joined.",
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
        return bool(a == b) or bool(a != a and b != b)  # a NaN does not equal itself
    except (RuntimeError, ValueError, TypeError):  # arrays compare elementwise
        return False
