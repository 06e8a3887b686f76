"""Persistent copies of a module: built once, refreshed before every forward pass.

A replica has its own module objects, because a forward pass may set attributes on them. Their
parameters come from `parameters`.

Forward passes write to buffers. The first replica that has rows uses the module's own, so that they
are updated once, as by `nn.DataParallel`; every other replica uses copies.
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

        built --(refresh)--> equal to source --(forward)--> used --(refresh)--> equal to source ...

    Invariant: only the module objects and the copies of buffers survive a refresh. All else that a
    forward pass has set on a replica is removed, as in torch, whose replicas live for one pass.
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
        """The source's parameters, and buffers that require gradients, each once."""
        found: dict[int, Tensor] = {}
        for link in self._links:
            for param in link.source._parameters.values():
                if param is not None:
                    found[id(param)] = param
        found.update({id(buffer): buffer for buffer in self.buffers() if buffer.requires_grad})
        return list(found.values())

    def buffers(self) -> list[Tensor]:
        """The source's buffers; a shared one occurs several times."""
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
        """Copy the source's attributes; use `parameters` in place of its own, unless None."""
        for link in self._links:
            # One replica uses the source's dictionary itself: buffers assigned in forward are kept.
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
        seen = [(name, _version_of(buffer)) for _, name, buffer in named]
        # Batch normalisation updates its statistics without changing their versions.
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


class _ModulePair:
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
        """Attributes that only the copy has."""
        self.children_seen = dict(source._modules)
        self.children: dict[str, nn.Module | None] = {}
        self.buffers: dict[str, Tensor | None] = {}
        self.is_recurrent = isinstance(source, nn.RNNBase)
        self.attributes_seen = 0
        self.bound: list[str] = []

    def refresh(self, parameters: Parameters | None, buffers: dict[str, Tensor | None]) -> None:
        state, copied = self.source.__dict__, self.copy.__dict__
        if len(state) != self.attributes_seen:  # checking all attributes in each pass is slow
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
        if self.is_recurrent:  # an RNN also keeps a list of its parameters, for cuDNN
            names = cast(nn.RNNBase, self.source)._flat_weights_names
            copied["_flat_weights"] = [own.get(name) for name in names]

    def rebind(self, links: Sequence[_ModulePair]) -> None:
        """Rebind bound methods, which the source has as attributes, to the copy."""
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


def _link(source: nn.Module, number: int, exchange: StatisticsExchange | None) -> list[_ModulePair]:
    """The module and all its submodules, each once, each with a copy."""
    links = []
    for name, module in source.named_modules():
        link = _ModulePair(name, module)
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


def _version_of(buffer: Tensor | None) -> object:
    """A value that changes when a buffer is replaced, written to, or set to require gradients."""
    if buffer is None:
        return None
    if buffer.is_inference() or buffer.layout is not torch.strided:
        return object()  # changes cannot be detected: equal to nothing, so always copied
    return buffer.data_ptr(), buffer._version, buffer.requires_grad
