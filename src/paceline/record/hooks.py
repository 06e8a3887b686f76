"""Recording one step while it runs: its forward passes, its gradients, and their times.

Hooks on the module, its outputs, its parameters and the optimizer observe it from outside; the
engine runs as usual. The module's hooks fire in every replica of `DataParallel` too, because a
replica copies the module's attributes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.ddp import DistributedDataParallel, Reducer, bare
from paceline.dp import DataParallel
from paceline.group import find_tensors, map_tensors
from paceline.record import facts
from paceline.record.stages import Part, Trace
from paceline.torch_private import at_backward_end


@dataclass(slots=True, kw_only=True)
class BatchPart:
    """The rows of one forward pass and the loss's gradients: enough to compute the pass again."""

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    """Of the loss, by output."""
    random_state: list[Tensor] = field(default_factory=list)
    """Of the generators before the pass; empty where it drew no random numbers."""
    targets: list[Tensor] = field(default_factory=list)
    """What the loss compares the outputs with, where that is known."""

    @property
    def rows(self) -> int:
        return next((tensor.shape[0] for tensor in self.inputs if tensor.dim()), 0)


@dataclass(slots=True, kw_only=True)
class ForwardPass(BatchPart):
    """One call of the module, of a replica, or of `DataParallel` with the whole batch."""

    module: nn.Module
    arguments: Any
    """args and kwargs, whose tensors are the inputs."""
    output: Any = None
    memories: set[int]
    """Of the inputs."""
    weights: frozenset[int]
    """Memories of the parameters that were used."""
    turn: int
    """How many times this module, or this replica, was called before in the step."""
    begin_ns: int
    end_ns: int = 0

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(eq=False, repr=False, kw_only=True)
class StepRecording:
    """One step being recorded. `note_batch` and `note_loss` add what hooks cannot observe.

    `trace` is set when the block has ended. `local` are this worker's gradients before they are
    averaged; `averaged` are the gradients after backward, `applied` those before the optimizer's
    step.
    """

    model: Any
    optimizer: Optimizer | None
    step: int
    dataset: Any
    sample: int | None
    weight_text: InitVar[str | None]
    values: bool
    loss_fn: Callable[[Any, Any], Tensor] | None
    keeps_tensors: bool
    """Whether tensors are copied, to compute the step again."""
    trace: Trace | None = None
    indices: list[int] | None = None
    """Which rows of the dataset this process has."""
    why_passes: str = ""
    """Why a worker's rows go through the model in several passes, where they do."""
    loss: Tensor | None = None
    """The sum of all losses."""
    loss_weight: float | None = None
    """Over how many items it is a sum; None if the caller has not said so."""
    weighted_items: float | None = None
    """The same, as passed to `weighted()`."""
    engine_weight: float | None = None
    """The engine's weight for this worker's gradients."""
    targets: list[Any] = field(default_factory=list)
    """One for each loss."""
    calls: list[ForwardPass] = field(default_factory=list)
    whole: ForwardPass | None = None
    """The first call of `DataParallel` itself, with the whole batch."""
    buckets: list[Part] = field(default_factory=list)
    """The reducer's, as they were when backward began."""
    bucket_starts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By parameter: which bucket it is in, and its first element there."""
    local: dict[str, Tensor] = field(default_factory=dict)
    averaged: dict[str, Tensor] = field(default_factory=dict)
    applied: dict[str, Tensor] = field(default_factory=dict)
    has_older_gradients: bool = False
    is_indirect: bool = False
    """Whether the loss itself is computed from gradients: those of the outputs do not suffice."""
    autocast: tuple[str, torch.dtype] | None = None

    def __post_init__(self, weight_text: str | None) -> None:
        self.weight = facts.find_weight(weight_text, self.trained)
        self.weight_before = facts.read_weight(self.weight, self.trained)
        is_replicas = isinstance(self.model, DataParallel)
        self._outermost = self.model if is_replicas else self.model.module
        self._handles: list[Any] = []
        self._running: dict[nn.Module, ForwardPass] = {}
        self._lock = threading.RLock()
        self._awaits_end = False
        self._ns: dict[str, int] = {}
        self._overhead_ns = 0

    def note_batch(self, indices: Sequence[int]) -> None:
        """Record which rows of the dataset this worker's batch has, in order."""
        self.indices = [int(index) for index in indices]

    def note_loss(self, loss: Tensor, weight: float | None = None, targets: Any = None) -> None:
        """Record the loss, before backward; of several, their sum is shown.

        `weight` is over how many items it is a sum, where that was not passed to `weighted()`.
        With `targets`, and a `loss_fn` for the whole step, the check computes the loss of the whole
        batch too.
        """
        self.targets.append(map_tensors(lambda tensor: tensor.detach().clone(), targets))
        value = loss.detach().clone()
        self.loss = value if self.loss is None else self.loss + value
        if weight is not None:
            self.loss_weight = (self.loss_weight or 0.0) + weight

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
        """How long each stage took in this process; None for one that was not observed. Forward
        passes have their own times."""
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
        return max(0, self._ns[end] - self._ns[begin]) / 1e9

    def __enter__(self) -> StepRecording:
        add = self._handles.append
        for module in {self._outermost, self.model.module}:
            add(module.register_forward_pre_hook(self._hook(self._on_call), with_kwargs=True))
            add(module.register_forward_hook(self._hook(self._on_return)))
        for name, param in self.trained.items():
            hook = partial(self._hook(self._on_gradient), name, param)
            add(param.register_hook(hook))  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            before = self.optimizer.register_step_pre_hook(self._hook(self._on_update))
            # First of all hooks: one that shards the update leaves those after it a part only.
            hooks: Any = self.optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(before.id, last=False)
            add(before)
            add(self.optimizer.register_step_post_hook(self._hook(self._on_updated)))
        self._ns["begin"] = _now()
        return self

    def __exit__(self, *_: object) -> None:
        self._ns["end"] = _now() - self._overhead_ns
        for handle in self._handles:
            handle.remove()

    def free_tensors(self) -> None:
        """Keep only the trace: the caller may keep the recording."""
        for kept in (self.local, self.averaged, self.applied, self.calls, self.targets):
            kept.clear()
        self.whole = self.loss = None

    def _hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a hook: it gets the time, on a clock that is stopped while hooks run."""

        def hook(*args: Any) -> Any:
            with self._lock:
                begin_ns = _now()
                try:
                    return function(begin_ns - self._overhead_ns, *args)
                finally:
                    self._overhead_ns += _now() - begin_ns

        return hook

    def _on_call(self, now_ns: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = list(find_tensors((args, kwargs)))
        kept = self._keep((args, kwargs))
        call = ForwardPass(
            module=module,
            arguments=kept,
            inputs=list(find_tensors(kept)),
            memories=memories(given),
            weights=frozenset(memories(module.parameters())),
            random_state=_random_state(),
            turn=sum(earlier.module is module for earlier in self.calls),
            begin_ns=now_ns,
        )
        device = given[0].device.type if given else "cpu"
        if torch.is_autocast_enabled(device):
            self.autocast = (device, torch.get_autocast_dtype(device))
        if module is self._outermost:
            self._ns.setdefault("called", now_ns)
        if module is self.model:
            self.whole = self.whole or call
        else:
            self.calls.append(call)
        self._running[module] = call

    def _on_return(self, now_ns: int, module: nn.Module, _args: Any, output: Any) -> Any:
        call = self._running.pop(module)
        call.end_ns = now_ns
        # Unchanged generators: the pass drew no random numbers, so it can be computed with any
        # state.
        if all(map(torch.equal, call.random_state, _random_state())):
            call.random_state = []
        call.output = self._keep(output)
        call.outputs = list(find_tensors(call.output))
        call.grads = [None] * len(call.outputs)
        if module is self._outermost and "backward" not in self._ns:
            self._ns["returned"] = now_ns
        if module is self.model:
            return output
        output = _separate(output)
        for number, tensor in enumerate(find_tensors(output)):
            if tensor.requires_grad:
                hook = partial(self._hook(self._on_output_grad), call, number)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return output

    def _on_output_grad(self, now_ns: int, call: ForwardPass, number: int, grad: Tensor) -> None:
        if self._is_inner():
            return
        self._ns.setdefault("backward", now_ns)
        self.record_buckets()
        reducer = self.reducer
        if reducer is not None:
            self.weighted_items = reducer.weight.value if reducer.weight.is_set else None
            # With one worker a `Run` divides the gradients itself.
            is_plain = reducer.size == 1 and not reducer.weight.is_set
            self.engine_weight = 1.0 if is_plain else reducer.weight.value
        if self.keeps_tensors:
            earlier = call.grads[number]
            call.grads[number] = grad.detach().clone() if earlier is None else earlier + grad

    def _on_gradient(self, now_ns: int, name: str, param: nn.Parameter, grad: Tensor) -> None:
        if self._is_inner():
            return
        self._ns["gradient"] = now_ns
        own = dense(grad.detach())
        if name in self.local:
            self.local[name] = self.local[name] + own
        else:
            self.has_older_gradients |= param.grad is not None and bool(dense(param.grad).any())
            self.local[name] = own.clone()

    def _is_inner(self) -> bool:
        """Whether this is a backward pass inside the loss, whose gradients are part of the graph.

        For any other, read the gradients when the backward pass has ended, including the averaging.
        The engine's own callback may be queued before or after this one; a callback that is queued
        by a callback runs after all of them.
        """
        if torch.is_grad_enabled():
            self.is_indirect = True
        elif not self._awaits_end:
            self._awaits_end = True
            at_backward_end(lambda: at_backward_end(self._hook(self._on_backward_end)))
        return torch.is_grad_enabled()

    def _on_backward_end(self, now_ns: int) -> None:
        self._awaits_end = False
        self._ns["averaged"] = now_ns
        self.averaged = self._gradients()

    def _on_update(self, now_ns: int, *_: Any) -> None:
        self._ns["update"] = now_ns
        self.applied = self._gradients()
        # A worker without rows takes part in the sums without a backward pass.
        self.averaged = self.averaged or self.applied

    def _on_updated(self, now_ns: int, *_: Any) -> None:
        self._ns["updated"] = now_ns

    def record_buckets(self) -> None:
        """Record the reducer's buckets, in the order they start; none in a world of one."""
        reducer = self.reducer
        if self.buckets or reducer is None or reducer.size == 1:
            return
        for number, bucket in enumerate(reducer.buckets):
            plan, names, title = bucket.plan, list(bucket.names), f"bucket {number}"
            flat = torch.empty(plan.numel + plan.trailer, dtype=plan.dtype, device="meta")
            (buffer,) = facts.tree_facts(title, flat, values=False)
            buffer = replace(buffer, device=str(plan.device))
            text = " to ".join(dict.fromkeys((*names[:1], *names[-1:]))) or "no gradients"
            if plan.trailer:
                text += f", then {plan.trailer} control numbers"
            part = Part(title=title, device=buffer.device, tensors=[buffer], text=text)
            self.buckets.append(part)
            for name, slot in zip(names, plan.slots, strict=True):
                self.bucket_starts[name] = (number, slot.start)

    @property
    def reducer(self) -> Reducer | None:
        """The reducer that averages the gradients; `DataParallel` has none."""
        return self.model.reducer if isinstance(self.model, DistributedDataParallel) else None

    def _gradients(self) -> dict[str, Tensor]:
        trained = self.trained.items()
        return {n: dense(p.grad.detach()).clone() for n, p in trained if p.grad is not None}

    def _keep(self, value: Any) -> Any:
        """Copies of the tensors, because the caller may change them later."""
        keep = torch.clone if self.keeps_tensors else Tensor.detach
        return map_tensors(lambda tensor: keep(tensor.detach()), value)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name without a wrapper's prefix."""
    return {n: p for n, p in bare(model).named_parameters() if p.requires_grad}


def memories(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of storages: two tensors with the same one share memory."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def fill(template: Any, tensors: Iterable[Tensor]) -> Any:
    """The tree `template` with `tensors` in place of its own."""
    left = iter(tensors)
    return map_tensors(lambda _: next(left), template)


def join(pieces: Sequence[BatchPart]) -> BatchPart | None:
    """All pieces joined along rows; None where their shapes do not fit.

    A tensor without a row dimension is taken from the first, or summed where it is a gradient.
    """
    if len(pieces) < 2:
        return pieces[0] if pieces else None

    def joined(tensors: Iterable[Tensor], *, sums: bool = False) -> Tensor:
        listed = list(tensors)
        listed = [tensor.to(listed[0].device) for tensor in listed]
        pairs = zip(listed, pieces, strict=True)
        if all(t.dim() > 0 and t.shape[0] == piece.rows for t, piece in pairs):
            return torch.cat(listed)
        return torch.stack(listed).sum(0) if sums else listed[0]

    def joined_grads(number: int) -> Tensor | None:
        grads = [(piece.grads[number], piece.outputs[number]) for piece in pieces]
        if all(grad is None for grad, _ in grads):
            return None
        known = (torch.zeros_like(out) if grad is None else grad for grad, out in grads)
        return joined(known, sums=True)

    try:
        return BatchPart(
            inputs=[joined(each) for each in zip(*(p.inputs for p in pieces), strict=True)],
            outputs=[joined(each) for each in zip(*(p.outputs for p in pieces), strict=True)],
            grads=[joined_grads(number) for number in range(len(pieces[0].outputs))],
            targets=[joined(e) for e in zip(*(p.targets for p in pieces), strict=False)],
        )
    except (RuntimeError, ValueError):  # shapes or numbers of tensors differ
        return None


def _separate(output: Any) -> Any:
    """The output, with each of several tensors replaced by a view.

    One output may be computed from another, and its gradient would then be counted for both. A hook
    on a view sees only the gradient that comes from the loss.
    """
    if sum(tensor.requires_grad for tensor in find_tensors(output)) < 2:
        return output
    return map_tensors(lambda t: t.view_as(t) if t.requires_grad else t, output)


def _now() -> int:
    """The time when all work queued on an accelerator is done, not when the host queued it."""
    if _uses_cuda():
        torch.accelerator.synchronize()
    return time.perf_counter_ns()


def _random_state() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if _uses_cuda() else [])]


def _uses_cuda() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]
