"""The parameters that each replica uses, and how their gradients reach the module's.

In a forward pass these are the module's parameters, or copies on another device: views of one flat
buffer per dtype, filled by one copy. To autograd the copies are functions of the parameters, whose
backward sums the copies' gradients on the parameters' device.

For the loss on the replicas they are leaves: tensors that share a parameter's memory but not its
gradient. Every thread accumulates gradients in its own leaves, without locks; when all have
succeeded, these are summed and added to the parameters once, so that hooks see the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.dp.devices import ReplicaDevice, move
from paceline.torch_private import (
    accumulated_grad_hooks,
    foreach_add_,
    foreach_copy_,
    mark_as_parameters,
    tensor_hooks,
)
from paceline.transport import ALIGNMENT, dense_layout, round_up

Parameters = Mapping[int, Tensor]
"""What a replica uses in place of a parameter, by the parameter's `id`."""

Layout = tuple[torch.Size, tuple[int, ...]]
"""Shape and strides."""


class ParameterSource:
    """Provides parameters to replicas, on the device where each of them computes.

    Replicas on the module's device use the module's own, unless `share` is off; replicas on another
    device share one copy there.
    """

    def __init__(
        self, devices: Sequence[ReplicaDevice], groups: Sequence[Sequence[int]], share: bool
    ) -> None:
        home = devices[0].device
        self._home, self._groups = home, groups
        self._copies: dict[int, FlatCopies] = {}
        by_device: dict[torch.device, FlatCopies] = {}
        for number, place in enumerate(devices[1:], start=1):
            if not share:
                self._copies[number] = FlatCopies(place.device)
            elif place.device != home:
                shared = by_device.setdefault(place.device, FlatCopies(place.device))
                self._copies[number] = shared

    def link(
        self, params: Sequence[Tensor], replicas: Sequence[int]
    ) -> dict[int, Parameters | None]:
        """Parameters for a forward pass, by replica; None means the module's own."""
        used = self._refresh(params, replicas)
        linked = _broadcast(params, [copies.tensors for copies in used])
        table_by_copies = {
            id(copies): _table(params, tensors)
            for copies, tensors in zip(used, linked, strict=True)
        }
        return {number: table_by_copies.get(id(self._copies.get(number))) for number in replicas}

    def detach(
        self, params: Sequence[Tensor], replicas: Sequence[int]
    ) -> tuple[dict[int, Parameters], list[list[nn.Parameter]]]:
        """Leaves by replica, and as lists, for a forward pass with separate gradients."""
        self._refresh(params, replicas)
        tables: dict[int, Parameters] = {}
        leaves: dict[tuple[int, int], list[nn.Parameter]] = {}
        for thread, group in enumerate(self._groups):
            for number in (number for number in group if number in replicas):
                copies = self._copies.get(number)
                # Replicas of one thread and one copy take turns, so they can share leaves.
                key = (thread, id(copies))
                if key not in leaves:
                    leaves[key] = _leaves(params if copies is None else copies.tensors, params)
                tables[number] = _table(params, leaves[key])
        return tables, list(leaves.values())

    def collect(self, params: Sequence[Tensor], leaves: Sequence[Sequence[nn.Parameter]]) -> None:
        """Sum the gradients of all leaves and add them to those of the parameters."""
        grads = [[leaf.grad for leaf in own] for own in leaves]
        for own in leaves:
            for leaf in own:
                leaf.grad = None  # the leaves live until the next call
        with torch.no_grad():
            _accumulate(params, _sum_on_device(grads, self._home))

    def _refresh(self, params: Sequence[Tensor], replicas: Sequence[int]) -> list[FlatCopies]:
        """The copies that these replicas use, each once, refreshed."""
        used = {id(c): c for number, c in self._copies.items() if number in replicas}
        for copies in used.values():
            copies.refresh(params)
        return list(used.values())


class FlatCopies:
    """Copies of parameters on one device, as the parameters were at the last refresh."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self._seen: list[tuple[int, int, int]] | None = None

    def refresh(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters, unless it is certain that they have not changed."""
        # A write through `param.data` does not change the version, and training loops do that. So
        # with gradients on they are always copied; see decision 0011. Into a new buffer every time,
        # because graphs of earlier forward passes still refer to the old one.
        is_training = torch.is_grad_enabled()
        seen = [(id(p), p.data_ptr(), -1 if p.is_inference() else p._version) for p in params]
        if seen == self._seen and not is_training:
            return
        self.tensors = []  # free the old ones before the new ones are allocated
        self.tensors = copy_flat([param.detach() for param in params], self.device)
        self._seen = None if is_training else seen


def copy_flat(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """A copy of every tensor on `device`, each dense one a view of one new buffer per dtype."""
    copies = list(tensors)
    # Not as inference tensors: a replica first made in inference mode must be able to train later.
    with torch.inference_mode(False), torch.no_grad():
        for indices in _dense_by_dtype(tensors):
            group = [tensors[index] for index in indices]
            layouts = [dense_layout(tensor) for tensor in group]
            packed = group[0].new_empty(
                sum(round_up(shape.numel(), ALIGNMENT) for shape, _ in layouts)
            )
            foreach_copy_(list(_views(packed, layouts)), group)
            views = _views(move(packed, device), layouts)
            for index, view in zip(indices, views, strict=True):
                copies[index] = view
        for index, tensor in enumerate(tensors):
            if tensor.layout is not torch.strided:  # a sparse tensor is not one block of memory
                copies[index] = tensor.to(device, copy=True)
    return copies


def _broadcast(
    params: Sequence[Tensor], copies: Sequence[Sequence[Tensor]]
) -> Sequence[Sequence[Tensor]]:
    """The copies as functions of the parameters, where gradients are recorded."""
    is_learning = torch.is_grad_enabled() and any(param.requires_grad for param in params)
    if not copies or not is_learning:
        return copies
    flat = [tensor.detach() for own in copies for tensor in own]
    linked: tuple[Tensor, ...] = _Broadcast.apply(flat, *params)  # type: ignore[no-untyped-call]
    mark_as_parameters(linked)
    return [linked[i : i + len(params)] for i in range(0, len(linked), len(params))]


class _Broadcast(torch.autograd.Function):
    """Made of differentiable operations, so gradients of gradients work."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], *params: Tensor) -> tuple[Tensor, ...]:
        # A parameter that no replica has used keeps no gradient, instead of zeros.
        ctx.set_materialize_grads(False)
        ctx.home, ctx.count = params[0].device, len(params)
        learns = ctx.needs_input_grad[1:] * (len(copies) // len(params))
        ctx.mark_non_differentiable(
            *(copy for copy, is_learning in zip(copies, learns, strict=True) if not is_learning)
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        by_copies = [grads[i : i + ctx.count] for i in range(0, len(grads), ctx.count)]
        return None, *_sum_on_device(by_copies, ctx.home)


def _sum_on_device(
    grads_by_source: Sequence[Sequence[Tensor | None]], home: torch.device
) -> list[Tensor | None]:
    """The sums over sources, in their order; each source's gradients are copied as one tensor."""
    totals: list[Tensor | None] = [None] * len(grads_by_source[0])
    for grads in grads_by_source:
        for index, grad in enumerate(_copy_to(grads, home)):
            total = totals[index]
            totals[index] = grad if total is None else total if grad is None else total + grad
    return totals


def _copy_to(grads: Sequence[Tensor | None], home: torch.device) -> Sequence[Tensor | None]:
    if all(grad is None or grad.device == home for grad in grads):
        return grads
    moved = [
        grad if grad is None or grad.layout is torch.strided else grad.to(home) for grad in grads
    ]
    for indices in _dense_by_dtype(grads):
        parts = [grads[index].reshape(-1) for index in indices]  # type: ignore[union-attr]
        pieces = move(torch.cat(parts), home).split([part.numel() for part in parts])  # type: ignore[no-untyped-call]
        for index, piece in zip(indices, pieces, strict=True):
            moved[index] = piece.view(grads[index].shape)  # type: ignore[union-attr]
    return moved


def _accumulate(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Add gradients to the parameters; where one has hooks, by a backward pass that runs them."""
    hooked: list[tuple[Tensor, Tensor]] = []
    sums: list[Tensor] = []
    added: list[Tensor] = []
    for param, grad in zip(params, grads, strict=True):
        if grad is None:
            continue
        if tensor_hooks(param) or accumulated_grad_hooks(param):
            hooked.append((param, grad))
        elif param.grad is None:
            param.grad = grad
        elif param.grad.layout is torch.strided and grad.layout is torch.strided:
            sums.append(param.grad)
            added.append(grad)
        else:
            param.grad = param.grad + grad
    if sums:
        foreach_add_(sums, added)
    if hooked:
        roots, their_grads = zip(*hooked, strict=True)
        torch.autograd.backward(roots, their_grads)


def _leaves(memory: Sequence[Tensor], params: Sequence[Tensor]) -> list[nn.Parameter]:
    return [
        nn.Parameter(tensor.detach(), requires_grad=param.requires_grad)
        for tensor, param in zip(memory, params, strict=True)
    ]


def _table(params: Sequence[Tensor], used: Sequence[Tensor]) -> Parameters:
    return {id(param): tensor for param, tensor in zip(params, used, strict=True)}


def _dense_by_dtype(tensors: Sequence[Tensor | None]) -> list[list[int]]:
    """The positions of the dense tensors, those of each dtype together."""
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.layout is torch.strided:
            groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())


def _views(flat: Tensor, layouts: Sequence[Layout]) -> Iterator[Tensor]:
    start = 0
    for shape, stride in layouts:
        yield flat[start : start + shape.numel()].as_strided(shape, stride)
        start += round_up(shape.numel(), ALIGNMENT)
