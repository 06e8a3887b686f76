"""What each replica uses as its parameters, and how gradients get back to the module's own.

In a forward pass it is the module's own parameters, or flat copies linked to them by autograd. For
the loss on the replicas it is leaves: tensors that share a parameter's memory but not its gradient.
Every lane collects gradients on its own leaves, undisturbed by the others; only when all lanes have
succeeded are they summed, and delivered to the parameters once, so that hooks see the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.dp.devices import Place
from paceline.dp.flat import FlatCopies, broadcast, sum_at_home
from paceline.dp.replicate import Parameters


class ParameterSets:
    """Hands out parameters to replicas, from the memory each of them computes in."""

    def __init__(self, places: Sequence[Place], lanes: Sequence[Sequence[int]], share: bool):
        home = places[0].device
        self._home = home
        self._lanes = lanes
        self._copies: dict[int, FlatCopies] = {}
        """By replica; replicas on one device have the same. Those at home are not in here."""
        by_device: dict[torch.device, FlatCopies] = {}
        for number, place in enumerate(places[1:], start=1):
            if not share:
                self._copies[number] = FlatCopies(place.device)
            elif place.device != home:
                shared = by_device.setdefault(place.device, FlatCopies(place.device))
                self._copies[number] = shared
        self._leaves: list[list[nn.Parameter]] = [[] for _ in lanes]

    def link(
        self, params: Sequence[Tensor], replicas: Sequence[int]
    ) -> dict[int, Parameters | None]:
        """Parameters for a forward pass; None means the module's own."""
        copies = self._refresh(params, replicas)
        if not copies:
            return dict.fromkeys(replicas)
        linked = broadcast(params, copies)
        tables = [_table(params, tensors) for tensors in linked]
        by_copies = {id(each): table for each, table in zip(copies, tables, strict=True)}
        return {
            number: by_copies[id(self._copies[number])] if number in self._copies else None
            for number in replicas
        }

    def detach(
        self, params: Sequence[Tensor], replicas: Sequence[int]
    ) -> dict[int, Parameters | None]:
        """Leaves for a forward pass whose gradients are collected apart."""
        self._refresh(params, replicas)
        tables: dict[int, Parameters | None] = {}
        for lane, members in enumerate(self._lanes):
            used = [number for number in members if number in replicas]
            if not used:  # its leaves may be those of another model by now
                self._leaves[lane] = []
            else:
                held = self._copies.get(used[0])
                leaves = _leaves(
                    params if held is None else held.tensors, params, self._leaves[lane]
                )
                self._leaves[lane] = leaves
                tables |= dict.fromkeys(used, _table(params, leaves))
        return tables

    def collect(self, params: Sequence[Tensor]) -> None:
        """Sum the leaves' gradients over the lanes and add them to the parameters' own."""
        grads = [[leaf.grad for leaf in leaves] for leaves in self._leaves if leaves]
        self.forget_gradients()
        with torch.no_grad():
            _deliver(params, sum_at_home(grads, self._home))

    def forget_gradients(self) -> None:
        for leaves in self._leaves:
            for leaf in leaves:
                leaf.grad = None

    def _refresh(self, params: Sequence[Tensor], replicas: Sequence[int]) -> list[FlatCopies]:
        used = {id(c): c for number, c in self._copies.items() if number in replicas}
        for copies in used.values():
            copies.refresh(params)
        return list(used.values())


def _deliver(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Add gradients to the parameters as a backward pass would, which is what hooks expect."""
    hooked: list[tuple[Tensor, Tensor]] = []
    sums: list[Tensor] = []
    added: list[Tensor] = []
    for param, grad in zip(params, grads, strict=True):
        if grad is None:
            continue
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            hooked.append((param, grad))
        elif param.grad is None:
            param.grad = grad
        elif param.grad.layout is torch.strided and grad.layout is torch.strided:
            sums.append(param.grad)
            added.append(grad)
        else:
            param.grad = param.grad + grad
    if sums:
        torch._foreach_add_(sums, added)
    if hooked:
        roots, their_grads = zip(*hooked, strict=True)
        torch.autograd.backward(roots, their_grads)


def _table(params: Sequence[Tensor], used: Sequence[Tensor]) -> Parameters:
    return {id(param): tensor for param, tensor in zip(params, used, strict=True)}


def _leaves(
    memory: Sequence[Tensor], params: Sequence[Tensor], before: list[nn.Parameter]
) -> list[nn.Parameter]:
    """A leaf for every tensor of `memory`, the one from before where it still fits."""
    if len(before) != len(memory):
        before = []
    leaves = []
    for index, (tensor, param) in enumerate(zip(memory, params, strict=True)):
        leaf = before[index] if before else None
        if leaf is None or not _fits(leaf, tensor, param):
            leaf = nn.Parameter(tensor.detach(), requires_grad=param.requires_grad)
        leaves.append(leaf)
    return leaves


def _fits(leaf: Tensor, tensor: Tensor, param: Tensor) -> bool:
    return (
        leaf.data_ptr() == tensor.data_ptr()
        and leaf.requires_grad == param.requires_grad
        and leaf.dtype == tensor.dtype
        and leaf.shape == tensor.shape
        and leaf.stride() == tensor.stride()
    )
