"""What a transport is: three ways to move flat buffers between ranks, and where buckets live.

Pass any object with the three methods of `Transport` as `DDPOptions(transport=...)`. One that has
memory of its own to offer, as shared memory does, also has `place`, and `meet`: called before ranks
wait in the process group, which notices no stopped rank.

Buckets of gradients, shared segments and copies of parameters are all laid out with the arithmetic
of `Flat`, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import check_members
from paceline.group import Group, broadcast, start_all_reduce, start_broadcast

ALIGNMENT = 64
"""Elements: borders between slices, and starts of tensors, where kernels give the same bits as on
the whole and run at full speed."""


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat buffer: `numel` elements, then a trailer of a few more that are never scaled."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    trailer: int = 0

    @property
    def length(self) -> int:
        """All elements."""
        return self.numel + self.trailer

    @property
    def nbytes(self) -> int:
        return self.length * self.dtype.itemsize


def slices(length: int, count: int) -> list[tuple[int, int]]:
    """`count` slices that cover a buffer, with aligned borders; the last ones may be empty."""
    share = round_up(-(-length // count), ALIGNMENT)
    starts = [min(length, number * share) for number in range(count + 1)]
    return list(pairwise(starts))


def dense_layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and strides of a copy without gaps: the tensor's own order of dimensions if it has
    no gaps itself, else row by row."""
    if tensor.is_contiguous():
        return tensor.shape, tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]))[::-1]
    if tensor.detach().permute(order).is_contiguous():
        return tensor.shape, tensor.stride()
    return tensor.shape, torch.empty(tensor.shape, device="meta").stride()


def round_up(value: int, to: int) -> int:
    return -(-value // to) * to


class Reduction(Protocol):
    """Something under way; `wait()` returns when the buffer holds its result."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Moves flat, contiguous tensors between ranks.

    All ranks call the same methods in the same order with tensors of one length and dtype. Errors
    say `what` was being done. Rank r owns slice r of a buffer: `slices(length, size)[r]`.
    """

    def sum(self, flat: Tensor, what: str) -> Reduction:
        """Start replacing `flat` by the sum of all ranks', the same bits on every rank."""

    def gather(self, flat: Tensor, what: str) -> Reduction:
        """Start replacing every slice by that of the rank which owns it."""

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        """Replace `flat` by that of rank `root`."""


class Buckets(Protocol):
    """Where the buckets of a model live, and how each is averaged: what the reducer knows."""

    @property
    def homes(self) -> Sequence[Tensor | None]:
        """Memory for each bucket, or None where any memory is as good."""

    @property
    def applies_weights(self) -> bool:
        """Whether sums come divided by the ranks' mean weight already."""

    def divides(self, dtype: torch.dtype) -> bool:
        """Whether sums of this dtype come divided by the number of ranks already."""

    def start(self, number: int, buffer: Tensor, weight: float, what: str) -> Reduction:
        """Start summing bucket `number` in place, in the same order on every rank."""

    def gather(self, number: int, buffer: Tensor, what: str) -> Reduction:
        """Start replacing every slice of bucket `number` by that of the rank which owns it."""


METHODS = [name for name in vars(Transport) if not name.startswith("_")]


class Scattered:
    """Buckets in memory of their own, each one `sum` of a transport."""

    applies_weights = False

    def __init__(self, transport: Transport, count: int) -> None:
        self.homes: list[Tensor | None] = [None] * count
        self._transport = transport

    def divides(self, _dtype: torch.dtype) -> bool:
        return False

    def start(self, _number: int, buffer: Tensor, _weight: float, what: str) -> Reduction:
        return self._transport.sum(buffer, what)

    def gather(self, _number: int, buffer: Tensor, what: str) -> Reduction:
        return self._transport.gather(buffer, what)


def place(transport: Transport, flats: Sequence[Flat], what: str) -> Buckets:
    """Find a place for buckets; all ranks call it at the same point, with the same buffers."""
    own: Any = getattr(transport, "place", None)
    buckets: Buckets = Scattered(transport, len(flats)) if own is None else own(flats, what)
    return buckets


def describe(transport: Transport) -> str:
    """What it is and why it was chosen, in words."""
    return str(getattr(transport, "description", type(transport).__name__))


def check_methods(transport: object) -> Transport:
    """The object, or an error that names the method it lacks."""
    advice = f"Pass an object with {', '.join(METHODS)}; see paceline.transport.Transport."
    check_members("transport", transport, (), advice, METHODS)
    return transport  # type: ignore[return-value]


def mean_factor(size: int, weight: float) -> float:
    """What turns sums divided by `size` into means over all items; `weight` is their number.

    Without any item there is nothing to average, and the sums are of nothing: they become zero.
    """
    return size / weight if weight else 0.0


class C10d:
    """Leaves everything to collectives of the process group."""

    def __init__(self, group: Group, why: str) -> None:
        self.description = f"c10d: {why}"
        self._group = group
        self._is_alone = group.size() == 1  # then the group may be without a backend

    def sum(self, flat: Tensor, what: str) -> Reduction:
        if self._is_alone:
            return _All([])
        return start_all_reduce(self._group, flat, what)

    def gather(self, flat: Tensor, what: str) -> Reduction:
        """One broadcast for every slice that is not empty; none in a world of one."""
        cut = [] if self._is_alone else slices(flat.numel(), self._group.size())
        parts = [(owner, flat[start:stop]) for owner, (start, stop) in enumerate(cut)]
        return _All(
            [
                start_broadcast(self._group, part, owner, what)
                for owner, part in parts
                if part.numel()
            ]
        )

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        if not self._is_alone:
            broadcast(self._group, flat, root, what)


class _All:
    """Several collectives under way, waited for in order; or none."""

    def __init__(self, parts: Sequence[Reduction]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()
