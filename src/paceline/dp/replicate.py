"""Copies of a module that persist: built once, brought up to date before every forward pass.

A replica has module objects of its own, because a forward pass may set attributes on them. What
they hold as parameters is decided in `parameters`.

Buffers are written to in forward passes. The first replica that has rows has the module's own, so
that they are updated once, as by `nn.DataParallel`; every other replica has copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from paceline.ddp import Wrapper
from paceline.dp.batch_norm import StatisticsExchange, is_replaced, whole_batch_class
from paceline.dp.devices import ReplicaDevice
from paceline.dp.parameters import Parameters, copy_flat
from paceline.errors import UsageError


class Replica:
    """One copy of `source`, on `device`; `number` is its place in `device_ids`.

        built --(refresh)--> like the source --(forward)--> used --(refresh)--> like the source ...

    Invariant: a replica keeps nothing from one refresh to the next but its module objects and its
    copies of buffers. Whatever else a forward pass set on it is gone, as torch's replicas are.
    """

    def __init__(
        self,
        source: nn.Module,
        device: ReplicaDevice,
        number: int,
        exchange: StatisticsExchange | None = None,
    ) -> None:
        self.device = device.device
        self._links = _link(source, number, exchange)
        self._buffers_seen: list[tuple[str, object]] | None = None

    @property
    def module(self) -> nn.Module:
        return self._links[0].copy

    def parameters(self) -> list[Tensor]:
        """What the source learns: its parameters, and buffers that require gradients, each once."""
        found: dict[int, Tensor] = {}
        for link in self._links:
            for param in link.source._parameters.values():
                if param is not None:
                    found[id(param)] = param
        found.update({id(buffer): buffer for buffer in self.buffers() if buffer.requires_grad})
        return list(found.values())

    def buffers(self) -> list[Tensor]:
        """The source's buffers; one that is used in several places several times."""
        return [
            buffer
            for link in self._links
            for buffer in link.source._buffers.values()
            if buffer is not None
        ]

    def is_current(self) -> bool:
        """Whether the source still has the submodules that were copied."""
        return all(link.source._modules == link.children_seen for link in self._links)

    def refresh(self, parameters: Parameters | None, *, copy_buffers: bool) -> None:
        """Take over the source's attributes, buffers, and parameters or what stands for them."""
        for link in self._links:
            # One replica has the source's dictionary itself: what is assigned in forward counts.
            link.refresh(parameters, {} if copy_buffers else link.source._buffers)
        if copy_buffers:
            self._refresh_buffers(parameters or {})
        for link in self._links:
            if link.bound:
                link.rebind(self._links)

    def _refresh_buffers(self, parameters: Parameters) -> None:
        links = [link for link in self._links if link.source._buffers]
        named = [
            (link, name, buffer) for link in links for name, buffer in link.source._buffers.items()
        ]
        seen = [(name, _stamp(buffer)) for _, name, buffer in named]
        # Batch normalisation writes to its statistics without a trace in their versions.
        is_training = any(link.source.training for link in links)
        if is_training or seen != self._buffers_seen:
            self._buffers_seen = None if is_training else seen
            buffers = [buffer for _, _, buffer in named if buffer is not None]
            copied = iter(copy_flat(buffers, self.device))
            for link, name, buffer in named:
                link.buffers[name] = None if buffer is None else next(copied)
        for link, name, buffer in named:
            if buffer is not None and buffer.requires_grad:
                link.buffers[name] = parameters.get(id(buffer), buffer)
        for link in links:
            own = {name: link.buffers[name] for name in link.source._buffers}
            link.copy.__dict__["_buffers"] = own


class _Link:
    """One module of the source and its copy."""

    def __init__(self, name: str, source: nn.Module) -> None:
        if isinstance(source, torch.jit.ScriptModule):
            raise UsageError(
                f"{type(source).__name__} is a compiled script, of which no replica can be made.",
                advice="Wrap the Python module, and script its parts or nothing.",
            )
        if isinstance(source, LazyModuleMixin) and source.has_uninitialized_params():
            raise UsageError(
                f"{_first_lazy(name, source)!r} has no shape yet, so no replica can be made.",
                advice="Run the module on one batch by itself first: its lazy layers then take "
                "their shapes from it.",
            )
        self.source = source
        self.copy: nn.Module = type(source).__new__(type(source))
        self.extras: dict[str, Any] = {}
        """Attributes that the copy alone has."""
        self.children_seen = dict(source._modules)
        self.children: dict[str, nn.Module | None] = {}
        self.buffers: dict[str, Tensor | None] = {}
        self.is_recurrent = isinstance(source, nn.RNNBase)
        self.attributes_seen = 0
        self.bound: list[str] = []

    def refresh(self, parameters: Parameters | None, buffers: dict[str, Tensor | None]) -> None:
        state, copied = self.source.__dict__, self.copy.__dict__
        if len(state) != self.attributes_seen:  # one may be new; looking at all takes long
            self.attributes_seen = len(state)
            self.bound = [name for name, value in state.items() if isinstance(value, MethodType)]
        copied.clear()
        copied.update(state)
        copied.update(self.extras)
        copied["_modules"] = self.children
        copied["_buffers"] = buffers
        if parameters is None:
            copied["_parameters"] = dict(state["_parameters"])
            return
        copied["_parameters"] = own = {
            name: None if param is None else parameters[id(param)]
            for name, param in state["_parameters"].items()
        }
        if self.is_recurrent:  # keeps a list of them for its kernel
            names = cast(nn.RNNBase, self.source)._flat_weights_names
            copied["_flat_weights"] = [own.get(name) for name in names]

    def rebind(self, links: Sequence[_Link]) -> None:
        """Let methods that the source keeps as attributes work on the copy."""
        for name in self.bound:
            method = self.source.__dict__.get(name)
            if isinstance(method, MethodType):
                owner = next((link for link in links if link.source is method.__self__), None)
                if owner is not None:
                    self.copy.__dict__[name] = MethodType(method.__func__, owner.copy)


def _first_lazy(name: str, module: nn.Module) -> str:
    tensors = {**module._parameters, **module._buffers}
    lazy = next(key for key, tensor in tensors.items() if tensor is not None and is_lazy(tensor))
    return f"{name}.{lazy}" if name else lazy


def _link(source: nn.Module, number: int, exchange: StatisticsExchange | None) -> list[_Link]:
    """The module and all its submodules, each once, linked with a copy."""
    links = []
    for name, module in source.named_modules():
        link = _Link(name, module)
        if exchange is not None and is_replaced(module):
            kind = whole_batch_class(type(module))  # type: ignore[arg-type]
            link.copy = kind.__new__(kind)
            link.extras = {"exchange": exchange, "replica": number, "layer": name}
        links.append(link)
    copy_by_source = {id(link.source): link.copy for link in links}
    for link in links:
        for name, child in link.children_seen.items():
            if isinstance(child, Wrapper):
                raise UsageError(
                    f"{name!r} is a {type(child).__name__} itself, in the middle of the model.",
                    advice="Wrap the whole model once, and its parts not at all.",
                )
            link.children[name] = None if child is None else copy_by_source[id(child)]
        compiler = link.source.__dict__.get("dynamo_ctx")
        if compiler is not None:  # made by torch.compile: its forward is tied to the original
            inner = copy_by_source[id(link.source._modules["_orig_mod"])]
            link.extras["forward"] = compiler(inner.__call__)
    return links


def _stamp(buffer: Tensor | None) -> object:
    """What changes when a buffer is replaced, written to or made to learn."""
    if buffer is None:
        return None
    if buffer.is_inference() or buffer.layout is not torch.strided:
        return object()  # it cannot be told, so it equals no other
    return buffer.data_ptr(), buffer._version, buffer.requires_grad
