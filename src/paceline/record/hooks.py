"""Observing one step from outside: hooks on the module, its outputs, its parameters, the optimizer.

The engine is not touched and takes its usual path. The module's own hooks fire in every replica of
`DataParallel` too, because a replica takes over the module's attributes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm import tree
from paceline.ddp.wrapper import bare
from paceline.dp import DataParallel
from paceline.record.facts import ForwardPass, Memory, StepRecording
from paceline.record.stages import Part, TensorFacts


class StepHooks:
    """Observes one step: enter, let the step happen, leave.

    `local` are the gradients of this worker alone, before anybody averages; `averaged` are those
    that backward left behind, `applied` those that the optimizer found.
    """

    def __init__(self, model: Any, optimizer: Optimizer | None, notes: StepRecording) -> None:
        self.model, self.notes = model, notes
        self.calls: list[ForwardPass] = []
        self.whole: ForwardPass | None = None
        """The first call of `DataParallel` itself, with the whole batch."""
        self.buckets: list[Part] = []
        """The reducer's, as they were when backward began."""
        self.bucket_starts: dict[str, tuple[int, int]] = {}
        """By parameter: which bucket it is in, and its first element there."""
        self.loss_weight: float | None = None
        """How many items the accumulated losses are sums over; None unless the engine was told."""
        self.local: dict[str, Tensor] = {}
        self.averaged: dict[str, Tensor] = {}
        self.applied: dict[str, Tensor] = {}
        self.has_older_gradients = False
        self.is_indirect = False
        """Whether the loss itself looks at gradients, which says more than those of the outputs."""
        self.autocast: tuple[str, torch.dtype] | None = None
        self._optimizer = optimizer
        self._outermost = model if isinstance(model, DataParallel) else model.module
        self._handles: list[Any] = []
        self._running: dict[int, ForwardPass] = {}
        self._lock = threading.Lock()
        self._awaits_end = False
        self._ns: dict[str, int] = {}
        self._overhead_ns = 0

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self.model)

    @property
    def has_update(self) -> bool:
        return "updated" in self._ns

    @property
    def seconds(self) -> float:
        return self._seconds("begin", "end") or 0.0

    @property
    def seconds_by_stage(self) -> dict[str, float | None]:
        """How long this process took; None for what was not seen, nothing for forward passes."""
        is_replicas = self._outermost is self.model
        return {
            "batch": self._seconds("begin", "called"),
            "loss": self._seconds("returned", "backward"),
            "backward": self._seconds("backward", "averaged" if is_replicas else "gradient"),
            "all-reduce": self._seconds("gradient", "averaged"),
            "update": self._seconds("update", "updated"),
        }

    def _seconds(self, begin: str, end: str) -> float | None:
        if begin not in self._ns or end not in self._ns:
            return None
        overhead_ns = self._overhead_ns if begin == "backward" else 0
        return max(0, self._ns[end] - self._ns[begin] - overhead_ns) / 1e9

    def __enter__(self) -> StepHooks:
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        self._ns["begin"] = _now()
        return self

    def __exit__(self, *_: object) -> None:
        self._ns["end"] = _now()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()

    def _attach(self) -> None:
        add = self._handles.append
        for module in {self._outermost, self.model.module}:
            add(module.register_forward_pre_hook(self._on_call, with_kwargs=True))
            add(module.register_forward_hook(self._on_return))
        for name, param in self.trained.items():
            hook = partial(self._on_gradient, name, param)
            add(param.register_hook(hook))  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            add(self._optimizer.register_step_pre_hook(self._on_update))
            add(self._optimizer.register_step_post_hook(self._on_updated))

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        arrive_ns = _now()
        given = list(tree.tensors((args, kwargs)))
        kept = self._keep((args, kwargs))
        call = ForwardPass(
            module=module,
            replica=self._replica_number(module),
            arguments=kept,
            inputs=list(tree.tensors(kept)),
            memories=memories(given),
            weights=set(memories(list(module.parameters()))),
            random_state=_random_state(),
            arrive_ns=arrive_ns,
        )
        device = given[0].device.type if given else "cpu"
        with self._lock:
            if torch.is_autocast_enabled(device):
                self.autocast = (device, torch.get_autocast_dtype(device))
            if module is self._outermost:
                self._ns.setdefault("called", arrive_ns)
            if module is self.model:
                self.whole = self.whole or call
            else:
                call.turn = sum(earlier.module is module for earlier in self.calls)
                self.calls.append(call)
            self._running[id(module)] = call
        call.begin_ns = _now()

    def _on_return(self, module: nn.Module, _args: Any, output: Any) -> Any:
        end_ns = _now()
        with self._lock:
            call = self._running.pop(id(module))
        call.end_ns = end_ns
        if all(map(torch.equal, call.random_state, _random_state())):
            call.random_state = []
        call.output = self._keep(output)
        call.outputs = list(tree.tensors(call.output))
        call.grads = [None] * len(call.outputs)
        if module is not self.model:
            output = _separate(output)
            for number, tensor in enumerate(tree.tensors(output)):
                if tensor.requires_grad:
                    hook = partial(self._on_output_grad, call, number)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        call.leave_ns = _now()
        if module is self._outermost and "backward" not in self._ns:
            self._ns["returned"] = call.leave_ns
        return output

    def _on_output_grad(self, call: ForwardPass, number: int, grad: Tensor) -> None:
        if self._is_inner():
            return
        begin_ns = _now()
        self._ns.setdefault("backward", begin_ns)
        self.look_at_buckets()
        weight = getattr(getattr(self.model, "_reducer", None), "weight", None)
        self.loss_weight = weight.value if weight is not None and weight.is_set else None
        if self.notes.check:
            earlier = call.grads[number]
            call.grads[number] = grad.detach().clone() if earlier is None else earlier + grad
        self._await_end()
        self._overhead_ns += _now() - begin_ns

    def _on_gradient(self, name: str, param: nn.Parameter, grad: Tensor) -> None:
        if self._is_inner():
            return
        begin_ns = _now()
        self._await_end()
        own = dense(grad.detach())
        if name in self.local:
            self.local[name] = self.local[name] + own
        else:
            self.has_older_gradients |= param.grad is not None and bool(dense(param.grad).any())
            self.local[name] = own.clone()
        self._ns["gradient"] = _now()
        self._overhead_ns += self._ns["gradient"] - begin_ns

    def _is_inner(self) -> bool:
        """Whether these are gradients that a loss is computed from: they record theirs in turn."""
        self.is_indirect |= torch.is_grad_enabled()
        return torch.is_grad_enabled()

    def _await_end(self) -> None:
        """Look at the gradients when the backward pass is over, averages included.

        The engine's own callback may have been queued before or after this one. One that is queued
        from a callback comes after all of them.
        """
        if not self._awaits_end:
            self._awaits_end = True
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._on_backward_end))

    def _on_backward_end(self) -> None:
        self._awaits_end = False
        self._ns["averaged"] = _now()
        self.averaged = self._gradients()

    def _on_update(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.applied = self._gradients() if self.notes.check else {}
        if not self.averaged:  # a worker without rows takes part without a backward pass
            self.averaged = self.applied or self._gradients()
        self._ns["update"] = _now()

    def _on_updated(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._ns["updated"] = _now()

    def look_at_buckets(self) -> None:
        """Note the reducer's buckets, in the order in which they start; none in a world of one."""
        reducer = getattr(self.model, "_reducer", None)
        if self.buckets or getattr(reducer, "size", 1) == 1:
            return
        for number, bucket in enumerate(getattr(reducer, "buckets", [])):
            plan, names, device = bucket.plan, list(bucket.names), str(bucket.plan.device)
            facts = TensorFacts(
                name=f"bucket {number}",
                shape=[plan.numel + plan.trailer],
                dtype=str(plan.dtype).removeprefix("torch."),
                device=device,
                bytes=(plan.numel + plan.trailer) * plan.dtype.itemsize,
            )
            inside = " to ".join(dict.fromkeys((*names[:1], *names[-1:]))) or "no gradients"
            trailer = f", then {plan.trailer} control numbers" if plan.trailer else ""
            text = f"{inside}{trailer}"
            self.buckets.append(Part(title=facts.name, device=device, tensors=[facts], text=text))
            for name, slot in zip(names, plan.slots, strict=True):
                self.bucket_starts[name] = (number, slot.start)

    def _replica_number(self, module: nn.Module) -> int:
        replicas = getattr(getattr(self.model, "_engine", None), "_replicas", [])
        return next((i for i, replica in enumerate(replicas) if replica.module is module), 0)

    def _gradients(self) -> dict[str, Tensor]:
        trained = self.trained.items()
        return {n: dense(p.grad.detach()).clone() for n, p in trained if p.grad is not None}

    def _keep(self, value: Any) -> Any:
        """The tensors as they are now: the caller may change them later."""
        if self.notes.check:
            return tree.map_tensors(lambda tensor: tensor.detach().clone(), value)
        return tree.map_tensors(Tensor.detach, value)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, without a wrapper's prefix."""
    return {n: p for n, p in bare(model).named_parameters() if p.requires_grad}


def memories(tensors: Sequence[Tensor]) -> list[Memory]:
    return [(str(tensor.device), tensor.untyped_storage().data_ptr()) for tensor in tensors]


def dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _separate(output: Any) -> Any:
    """The output, with each of several tensors behind a view of its own.

    One output may be computed from another. Its gradient would then be counted for both, when what
    is wanted is what the loss alone says of each.
    """
    if sum(tensor.requires_grad for tensor in tree.tensors(output)) < 2:
        return output
    return tree.map_tensors(lambda t: t.view_as(t) if t.requires_grad else t, output)


def _now() -> int:
    """The time when everything queued on an accelerator is done."""
    if _uses_cuda():
        torch.accelerator.synchronize()
    return time.perf_counter_ns()


def _random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if _uses_cuda() else [])]


def _uses_cuda() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]
