"""Tensors in another memory: one flat buffer per dtype, filled by one copy, seen through views.

`FlatCopies` does that for parameters. To autograd, `Broadcast` makes the copies functions of the
parameters: its backward sums the copies' gradients, flat again, where the parameters are. It is
made of differentiable operations, so gradients of gradients work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.dp.devices import move

Layout = tuple[torch.Size, tuple[int, ...]]

ALIGNMENT = 64
"""Every view starts at a multiple of this many elements: matrix kernels are slow elsewhere."""


def copy_flat(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """A copy of every tensor on `device`, each dense one a view of one new buffer per dtype."""
    copies: dict[int, Tensor] = {}
    dense = [index for index, tensor in enumerate(tensors) if tensor.layout is torch.strided]
    # A replica that is first made in inference mode must still be able to train later.
    with torch.inference_mode(False), torch.no_grad():
        for index in set(range(len(tensors))).difference(dense):  # a sparse one has no one memory
            copies[index] = tensors[index].to(device, copy=True)
        for positions in _by_dtype([tensors[index] for index in dense]):
            indices = [dense[position] for position in positions]
            group = [tensors[index] for index in indices]
            layouts = [layout_of(tensor) for tensor in group]
            total = sum(_aligned(shape.numel()) for shape, _ in layouts)
            packed = group[0].new_empty(total)
            torch._foreach_copy_(list(_views(packed, layouts)), group)
            flat = move(packed, device)
            copies.update(zip(indices, _views(flat, layouts), strict=True))
    return [copies[index] for index in range(len(tensors))]


def layout_of(tensor: Tensor) -> Layout:
    """Shape and strides that a copy has: the tensor's own if it is dense, else row by row."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]))[::-1]
    if tensor.detach().permute(order).is_contiguous():
        return tensor.shape, tensor.stride()
    return tensor.shape, torch.empty(tensor.shape, device="meta").stride()


class FlatCopies:
    """Copies of parameters on one device, as the parameters were at the last refresh."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self._seen: list[tuple[int, int, int]] | None = None

    def refresh(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters, unless it is certain that they have not changed.

        A write through `param.data` leaves no trace, and training loops do that. So with gradients
        on, they count as changed; see decision 0011. The buffer is a new one every time: graphs of
        earlier forward passes still look at the old.
        """
        is_training = torch.is_grad_enabled()
        seen = [(id(p), p.data_ptr(), -1 if p.is_inference() else p._version) for p in params]
        if seen == self._seen and not is_training:
            return
        self.tensors = []  # give the old ones up before the new ones are made
        self.tensors = copy_flat([param.detach() for param in params], self.device)
        self._seen = None if is_training else seen


def broadcast(params: Sequence[Tensor], copies: Sequence[FlatCopies]) -> list[list[Tensor]]:
    """The copies, one list for each of `copies`, as functions of the parameters where gradients
    are recorded."""
    moving = [i for i, param in enumerate(params) if param.requires_grad]
    if not (moving and torch.is_grad_enabled()):
        return [each.tensors for each in copies]
    flat = [each.tensors[index].detach() for each in copies for index in moving]
    linked: tuple[Tensor, ...] = _Broadcast.apply(flat, *(params[index] for index in moving))  # type: ignore[no-untyped-call]
    by_device = []
    for number, each in enumerate(copies):
        tensors = list(each.tensors)
        start = number * len(moving)
        for index, tensor in zip(moving, linked[start : start + len(moving)], strict=True):
            tensor._is_param = True
            tensors[index] = tensor
        by_device.append(tensors)
    return by_device


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home, ctx.count = params[0].device, len(params)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *sum_at_home(
            [grads[i : i + ctx.count] for i in range(0, len(grads), ctx.count)], ctx.home
        )


def sum_at_home(
    grads_by_device: Sequence[Sequence[Tensor | None]], home: torch.device
) -> list[Tensor | None]:
    """The sums over devices, in their order; each device's gradients travel in one piece."""
    totals: list[Tensor | None] = [None] * len(grads_by_device[0])
    for grads in grads_by_device:
        for index, grad in enumerate(_bring_home(grads, home)):
            total = totals[index]
            totals[index] = grad if total is None else total if grad is None else total + grad
    return totals


def _bring_home(grads: Sequence[Tensor | None], home: torch.device) -> list[Tensor | None]:
    moved: list[Tensor | None] = list(grads)
    if all(grad is None or grad.device == home for grad in grads):
        return moved
    dense = {i: g for i, g in enumerate(grads) if g is not None and g.layout is torch.strided}
    for index, grad in enumerate(grads):
        if grad is not None and index not in dense:
            moved[index] = grad.to(home)
    tensors = list(dense.values())
    for group in _by_dtype(tensors):
        parts = [tensors[position].reshape(-1) for position in group]
        flat = move(torch.cat(parts), home)
        pieces = torch.split(flat, [part.numel() for part in parts])
        for position, piece in zip(group, pieces, strict=True):
            moved[list(dense)[position]] = piece.view(tensors[position].shape)
    return moved


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())


def _views(flat: Tensor, layouts: Sequence[Layout]) -> Iterator[Tensor]:
    start = 0
    for shape, stride in layouts:
        yield flat[start : start + shape.numel()].as_strided(shape, stride)
        start += _aligned(shape.numel())


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT
