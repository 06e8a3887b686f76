"""Watching one step from outside: hooks on the module, its outputs, its parameters, the optimizer.

The engine is not touched and takes its usual way. The module's own hooks fire in every replica of
`DataParallel` too, because a replica takes over the module's attributes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm import tree
from paceline.ddp.wrapper import bare
from paceline.record.inside import BucketFacts, buckets_of, loss_weight_of


@dataclass(frozen=True, slots=True)
class Memory:
    """A piece of memory: two tensors in it share bytes."""

    device: str
    address: int
    offset: int = field(compare=False, default=0)
    """How far into it the tensor begins."""

    @classmethod
    def of(cls, tensor: Tensor) -> Memory:
        start = tensor.untyped_storage().data_ptr()
        return cls(str(tensor.device), start, tensor.data_ptr() - start)


@dataclass(slots=True)
class Call:
    """One forward pass of the module, or of one replica."""

    module: nn.Module
    args: Any
    kwargs: Any
    arrive_ns: int
    """Before anything was written down."""
    random_state: list[Tensor]
    """Of the generators, before the pass."""
    memories: list[Memory] = field(default_factory=list)
    """Where the tensors of the input lay."""
    weights: set[Memory] = field(default_factory=set)
    """Where the parameters lay that were used."""
    turn: int = 0
    """How many times this module, or this replica, was called before in the step."""
    begin_ns: int = 0
    output: Any = None
    end_ns: int = 0
    leave_ns: int = 0
    """After everything was written down."""
    is_random: bool = False
    """Whether the pass has drawn random numbers."""
    grads: dict[int, Tensor] = field(default_factory=dict)
    """The gradient of the loss with respect to the n-th tensor of the output."""

    @property
    def inputs(self) -> list[Tensor]:
        return list(tree.tensors((self.args, self.kwargs)))

    @property
    def outputs(self) -> list[Tensor]:
        return list(tree.tensors(self.output))


@dataclass(slots=True)
class Times:
    """When things happened, in nanoseconds; 0 for what did not."""

    begin: int = 0
    backward_begin: int = 0
    last_gradient: int = 0
    backward_end: int = 0
    update_begin: int = 0
    update_end: int = 0
    watching: int = 0
    """What watching took of the time between the first and the last gradient."""


class Watch:
    """Sees one step: enter, let the step happen, leave.

    `local` are the gradients of this worker alone, before anybody averages; `averaged` are those
    that backward left behind, `applied` those that the optimizer found.
    """

    def __init__(self, model: Any, optimizer: Optimizer | None, *, keeps_tensors: bool) -> None:
        self.times = Times()
        self.calls: list[Call] = []
        self.whole: Call | None = None
        """The first forward pass as the wrapper saw it: the whole batch of `DataParallel`."""
        self.buckets: list[BucketFacts] = []
        self.loss_weight: float | None = None
        self.local: dict[str, Tensor] = {}
        self.averaged: dict[str, Tensor] = {}
        self.applied: dict[str, Tensor] = {}
        self.has_older_gradients = False
        self.is_indirect = False
        """Whether the loss itself looks at gradients, which says more than those of the outputs."""
        self.autocast: tuple[str, torch.dtype] | None = None
        self._model = model
        self._optimizer = optimizer
        self._keeps_tensors = keeps_tensors
        self._handles: list[Any] = []
        self._by_module: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._is_followed = False

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in bare(self._model).named_parameters() if p.requires_grad]

    def __enter__(self) -> Watch:
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        self.times.begin = _now()
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._by_module.clear()

    def _attach(self) -> None:
        model, inner = self._model, self._model.module
        add = self._handles.append
        add(model.register_forward_pre_hook(self._on_whole, with_kwargs=True))
        add(model.register_forward_hook(self._on_whole_done))
        add(inner.register_forward_pre_hook(self._on_call, with_kwargs=True))
        add(inner.register_forward_hook(self._on_called))
        for name, param in self.named:
            add(param.register_hook(self._on_gradient(name, param)))  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            add(self._optimizer.register_step_pre_hook(self._on_update))
            add(self._optimizer.register_step_post_hook(self._on_updated))

    def _on_whole(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.whole is not None:
            return
        arrive_ns = _now()
        memories = [Memory.of(tensor) for tensor in tree.tensors((args, kwargs))]
        args, kwargs = self._kept((args, kwargs))
        self.whole = Call(module, args, kwargs, arrive_ns, [], memories)
        self.whole.begin_ns = _now()

    def _on_whole_done(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self.whole is not None and not self.whole.end_ns:
            self.whole.end_ns = _now()
            self.whole.output = self._kept(output)
            self.whole.leave_ns = _now()

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        arrive_ns = _now()
        memories = [Memory.of(tensor) for tensor in tree.tensors((args, kwargs))]
        weights = {Memory.of(param) for param in module.parameters()}
        args, kwargs = self._kept((args, kwargs))
        call = Call(module, args, kwargs, arrive_ns, _random_state(), memories, weights)
        device = next((t.device.type for t in call.inputs), "cpu")
        with self._lock:
            if torch.is_autocast_enabled(device):
                self.autocast = (device, torch.get_autocast_dtype(device))
            call.turn = sum(earlier.module is module for earlier in self.calls)
            self.calls.append(call)
            self._by_module[id(module)] = call
        call.begin_ns = _now()

    def _on_called(self, module: nn.Module, _args: Any, output: Any) -> Any:
        end_ns = _now()
        with self._lock:
            call = self._by_module.pop(id(module))
        call.end_ns = end_ns
        call.is_random = any(
            not torch.equal(a, b) for a, b in zip(call.random_state, _random_state(), strict=True)
        )
        call.output = self._kept(output)
        output = _kept_apart(output)
        for number, tensor in enumerate(tree.tensors(output)):
            if tensor.requires_grad:
                hook = self._on_output_grad(call, number)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        call.leave_ns = _now()
        return output

    def _on_output_grad(self, call: Call, number: int) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if self._is_inner():
                return
            begin = _now()
            if not self.times.backward_begin:
                self.times.backward_begin = begin
            if not self.buckets:
                self.buckets = buckets_of(self._model)
            self.loss_weight = loss_weight_of(self._model)
            if self._keeps_tensors:
                kept = grad.detach().clone()
                call.grads[number] = call.grads[number] + kept if number in call.grads else kept
            self._follow_to_end()
            self.times.watching += _now() - begin

        return hook

    def _on_gradient(self, name: str, param: nn.Parameter) -> Callable[[Tensor], None]:
        def hook(grad: Tensor) -> None:
            if self._is_inner():
                return
            begin = _now()
            self._follow_to_end()
            own = _dense(grad.detach())
            if name in self.local:
                self.local[name] = self.local[name] + own
            else:
                self.has_older_gradients |= _is_something(param.grad)
                self.local[name] = own.clone()
            self.times.last_gradient = _now()
            self.times.watching += self.times.last_gradient - begin

        return hook

    def _is_inner(self) -> bool:
        """Whether these are gradients that a loss is computed from: they record theirs in turn."""
        self.is_indirect |= torch.is_grad_enabled()
        return torch.is_grad_enabled()

    def _follow_to_end(self) -> None:
        """Look at the gradients when the backward pass is over, averages included.

        The engine's own callback may have been queued before or after this one. One that is queued
        from a callback comes after all of them.
        """
        if self._is_followed:
            return
        self._is_followed = True
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._on_backward_end))

    def _on_backward_end(self) -> None:
        self._is_followed = False
        self.times.backward_end = _now()
        self.averaged = self._gradients()

    def _on_update(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.applied = self._gradients() if self._keeps_tensors else {}
        if not self.averaged:  # a worker without rows takes part without a backward pass
            self.averaged = self.applied or self._gradients()
        self.times.update_begin = _now()

    def _on_updated(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.times.update_end = _now()

    def _gradients(self) -> dict[str, Tensor]:
        return {n: _dense(p.grad.detach()).clone() for n, p in self.named if p.grad is not None}

    def _kept(self, value: Any) -> Any:
        """The tensors as they are now: the caller may change them later."""
        if self._keeps_tensors:
            return tree.map_tensors(lambda tensor: tensor.detach().clone(), value)
        return tree.map_tensors(Tensor.detach, value)


def _kept_apart(output: Any) -> Any:
    """The output, with each of several tensors behind a view of its own.

    One output may be computed from another. Its gradient would then be counted for both, when what
    is wanted is what the loss alone says of each.
    """
    if sum(tensor.requires_grad for tensor in tree.tensors(output)) < 2:
        return output
    return tree.map_tensors(lambda t: t.view_as(t) if t.requires_grad else t, output)


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()


def _is_something(grad: Tensor | None) -> bool:
    return grad is not None and bool(_dense(grad).any())


def _now() -> int:
    """The time when everything queued on an accelerator is done."""
    if _uses_cuda():
        torch.accelerator.synchronize()
    return time.perf_counter_ns()


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if _uses_cuda():
        states.append(torch.cuda.get_rng_state())
    return states


def _uses_cuda() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]
