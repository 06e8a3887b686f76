"""Splitting a batch: every tensor among the inputs is cut along one dimension, one chunk a place.

Chunks are views where the tensor already lies on the chunk's device. Tensors without dimensions,
and everything that is no tensor, go to every replica as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from paceline.comm import tree
from paceline.dp.devices import Place, move
from paceline.errors import UsageError

Contents = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional inputs, keyword inputs, targets."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One replica's share of a batch: `replica` is the number of its place."""

    replica: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    """How long the batch's first tensor is here, along the dimension that was cut."""
    targets: Any = None
    """What a loss function compares the module's output with."""

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
    places: Sequence[Place],
    dim: int = 0,
    weights: Sequence[float] | None = None,
    targets: Any = None,
) -> list[Chunk]:
    """One chunk for every place that gets rows; together they are the batch, in order.

    An empty batch is one empty chunk, and no inputs at all are one chunk without any.
    """
    if not args and not kwargs:
        whole = tree.map_tensors(lambda tensor: move(tensor, places[0].device), targets)
        return [Chunk(0, (), {}, 0, whole)]
    contents = (args, kwargs, targets)
    named = _named_tensors(contents)
    cuts = {id(t): _cut(path, t, len(places), dim, weights) for path, t in named if t.dim() > 0}
    _check_same_replicas(named, cuts, dim)
    first = next(iter(cuts.values()))
    chunks = []
    for place, (replica, rows) in zip(_used(places, first), first.items(), strict=True):
        share = _Share(cuts, dim, replica, place)
        own_args, own_kwargs, own_targets = tree.map_tensors(share, contents)
        chunks.append(Chunk(replica, own_args, own_kwargs, rows, own_targets))
    return chunks


def plan_sizes(rows: int, count: int, weights: Sequence[float] | None = None) -> dict[int, int]:
    """How many rows each of `count` replicas gets, without those that get none.

    Without weights, parts are as `torch.chunk` makes them: equal, the last one smaller, and as few
    as that takes. With weights, each border between two parts is rounded to the nearest row.
    """
    if weights is None:
        size = -(-rows // count)
        sizes = [max(0, min(size, rows - i * size)) for i in range(count)]
    else:
        total = sum(weights)
        borders = [round(rows * part / total) for part in accumulate(weights, initial=0.0)]
        sizes = [stop - start for start, stop in pairwise(borders)]
    return {i: size for i, size in enumerate(sizes) if size > 0} or {0: 0}


class _Share:
    """Gives one replica its part of a tensor."""

    def __init__(
        self, cuts: dict[int, dict[int, int]], dim: int, replica: int, place: Place
    ) -> None:
        self.cuts, self.dim, self.replica, self.place = cuts, dim, replica, place

    def __call__(self, tensor: Tensor) -> Tensor:
        part = self._part(tensor) if tensor.dim() > 0 else tensor
        return move(part, self.place.device)

    def _part(self, tensor: Tensor) -> Tensor:
        sizes = self.cuts[id(tensor)]
        if tensor.requires_grad and torch.is_grad_enabled():
            # Parts made by one function refuse to be written to. Parts that could be would change
            # the graph of the tensor they share, from two threads at once.
            parts = torch.split(tensor, list(sizes.values()), self.dim)
            return parts[list(sizes).index(self.replica)]
        start = sum(size for replica, size in sizes.items() if replica < self.replica)
        return tensor.detach().narrow(self.dim, start, sizes[self.replica])


def _named_tensors(contents: Contents) -> list[tuple[str, Tensor]]:
    names = ("inputs", "kwargs", "targets")
    pairs = zip(contents, names, strict=True)
    return [named for value, name in pairs for named in _walk(value, name)]


def _walk(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, PackedSequence):
        raise UsageError(
            f"{path} is a packed sequence, whose rows lie mixed and cannot be split.",
            f"It holds {len(value.data):,} items of {int(value.batch_sizes[0])} sequences.",
            "Pass the padded batch and its lengths, and pack in forward.",
        )
    if isinstance(value, Tensor):
        yield path, value
    for key, item in tree.children(value):
        yield from _walk(item, path + key)


def _used(places: Sequence[Place], sizes: dict[int, int]) -> list[Place]:
    return [places[replica] for replica in sizes]


def _cut(
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
    named: list[tuple[str, Tensor]], cuts: dict[int, dict[int, int]], dim: int
) -> None:
    if not cuts:
        raise UsageError(
            "None of the inputs is a tensor with a dimension, so there is nothing to split.",
            f"Tensors without a dimension: {', '.join(path for path, _ in named) or 'none'}.",
            "Pass the batch as tensors, or call `.module` directly.",
        )
    cut = [(path, tensor) for path, tensor in named if id(tensor) in cuts]
    first_path, first = cut[0]
    for path, tensor in cut[1:]:
        if cuts[id(tensor)].keys() != cuts[id(first)].keys():
            raise UsageError(
                f"{first_path} would be split for {len(cuts[id(first)])} replicas along dim {dim}, "
                f"but {path} for {len(cuts[id(tensor)])}.",
                f"Their shapes are {tuple(first.shape)} and {tuple(tensor.shape)}.",
                f"Make both as long along dim {dim}; what every replica needs whole can be "
                "expanded to the batch, or kept as a buffer of the module.",
            )
