"""Recording a replica's work on a GPU once, as a CUDA graph, and replaying it afterwards.

A small model on a fast GPU waits for Python, which starts one kernel after the other. A replay
starts them all at once. What Python does in a forward pass happens only while recording, so this
is an option, and whatever a replay could not know of is part of a `signature`: shapes, modes,
values that are no tensors, where parameters lie. Another signature is another recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from paceline import tree
from paceline.dp.replicate import Replica
from paceline.dp.scatter import Chunk
from paceline.errors import UsageError

WARM_UP = 2
"""Calls of one signature that run as usual before the next is recorded: libraries set up in them
what they may not while recording."""

MOST_RECORDINGS = 16
"""Further signatures are not recorded: batches of ever new shapes would fill the memory."""


Buffers = Sequence[tuple[Tensor, Tensor]]
"""A replica's own copy of each buffer, to be refreshed before a replay, and its source."""


@dataclass(slots=True)
class _Entry:
    calls: int = 0
    recording: Any = None
    keeps: list[object] = field(default_factory=list)
    """What the signature refers to by its `id`."""


class Recorder:
    """The recordings of one engine, by signature."""

    def __init__(self, source: nn.Module) -> None:
        self._modules = list(source.modules())
        self._entries: dict[Hashable, _Entry] = {}

    def find(self, key: Hashable, record: Callable[[], Any], keeps: Sequence[object] = ()) -> Any:
        """The recording for a signature; None if this call is still to run as usual."""
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= MOST_RECORDINGS:
                return None
            entry = self._entries[key] = _Entry(keeps=list(keeps))
        entry.calls += 1
        if entry.recording is None and entry.calls > WARM_UP:
            entry.recording = self._record(record)
        return entry.recording

    def can_record(self) -> bool:
        """Whether no hook would be left out by a replay."""
        return not any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
            for m in self._modules
        )

    def shape(self, chunks: Sequence[Chunk]) -> Hashable:
        """The inputs' part of a signature: everything but the values of tensors."""
        return tuple((chunk.replica, _shape(chunk.contents)) for chunk in chunks)

    def state(self, tensors: Sequence[Tensor]) -> Hashable:
        """The part that all inputs have in common: modes, and where the model's tensors lie."""
        return (
            tuple(module.training for module in self._modules),
            tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
        )

    def _record(self, record: Callable[[], Any]) -> Any:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        try:
            # Half-precision copies that autocast keeps would be of memory that is not recorded.
            torch.clear_autocast_cache()
            return record()
        except RuntimeError as error:
            # The generator would wait for the end of the recording for good.
            generator.graphsafe_set_state(random_state)
            raise UsageError(
                "This model's work cannot be recorded as a CUDA graph.",
                f"Recording it failed: {str(error).splitlines()[0]}",
                "Leave cuda_graphs off; models that wait for the GPU in forward need that.",
            ) from error
        finally:
            torch.clear_autocast_cache()


class ForwardRecording:
    """One replica's forward pass and its backward pass, each a graph.

    The memory of a forward pass is needed until its backward pass has run. Until then, or until
    its outputs are gone, the recording is busy.
    """

    def __init__(self, chunk: Chunk, replica: Replica, params: Sequence[Tensor]) -> None:
        # Autograd keeps the stream on which a parameter was first used, and would make it wait for
        # the recording's. Leaves that nobody has used yet share the parameters' memory alone.
        leaves = [nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in params]
        replica.refresh({id(p): leaf for p, leaf in zip(params, leaves, strict=True)})
        self._buffers = replica.copied_buffers()
        pool = torch.cuda.graph_pool_handle()
        static = _static(chunk)
        self._inputs = list(tree.tensors(static.contents))
        self._lease: weakref.ref[_Lease] | None = None
        self._forward = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool):
            output = replica.module(*static.args, **static.kwargs)
        self._output = tree.map_tensors(Tensor.detach, output)
        ends = [tensor for tensor in tree.tensors(output) if tensor.requires_grad]
        self._places = [i for i, t in enumerate(tree.tensors(output)) if t.requires_grad]
        wanted = [tensor for tensor in (*self._inputs, *leaves) if tensor.requires_grad]
        self._params = [param for param in params if param.requires_grad]
        self._backward: torch.cuda.CUDAGraph | None = None
        if ends:
            self._grad_outputs = [torch.zeros_like(tensor) for tensor in ends]
            self._backward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._backward, pool=pool):
                self._grads = torch.autograd.grad(
                    ends, wanted, self._grad_outputs, allow_unused=True
                )

    @property
    def is_busy(self) -> bool:
        lease = None if self._lease is None else self._lease()
        return lease is not None and not lease.is_over

    def replay(self, chunk: Chunk) -> Any:
        inputs = list(tree.tensors(chunk.contents))
        _copy_all(zip(self._inputs, inputs, strict=True), self._buffers)
        if self._backward is None:
            self._forward.replay()
            return tree.map_tensors(Tensor.clone, self._output)
        live = [tensor for tensor in inputs if tensor.requires_grad]
        outputs = _Replay.apply(self, *live, *self._params)  # type: ignore[no-untyped-call]
        remaining = iter(outputs)
        return tree.map_tensors(lambda _: next(remaining), self._output)

    def forward(self) -> tuple[list[Tensor], _Lease]:
        self._forward.replay()
        lease = _Lease()
        self._lease = weakref.ref(lease)
        return [tensor.detach() for tensor in tree.tensors(self._output)], lease

    def backward(self, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        given = [grads[place] for place in self._places]
        for static, grad in zip(self._grad_outputs, given, strict=True):
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)
        assert self._backward is not None  # only differentiable outputs have a backward pass
        self._backward.replay()
        return self._grads

    def non_differentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [t for place, t in enumerate(outputs) if place not in self._places]


class _Lease:
    """A forward pass whose backward pass is still to come; it dies with the pass's graph."""

    __slots__ = ("__weakref__", "is_over")

    def __init__(self) -> None:
        self.is_over = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: ForwardRecording, *_inputs: Tensor) -> tuple[Tensor, ...]:
        outputs, ctx.lease = recording.forward()
        ctx.recording = recording
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*recording.non_differentiable(outputs))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.lease.is_over:
            raise RuntimeError(
                "Trying to backward a second time through a replayed forward pass. "
                "Leave cuda_graphs off to keep its memory with retain_graph=True."
            )
        result = ctx.recording.backward(grads)
        ctx.lease.is_over = True
        return None, *(None if grad is None else grad.detach() for grad in result)


class LossRecording:
    """Forward, loss and backward of all replicas on one GPU, one graph."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        factors: Sequence[Tensor],
        leaves: Sequence[Tensor],
        buffers: Buffers,
        work: Callable[[Chunk, Tensor], Tensor],
    ) -> None:
        self._inputs: list[Tensor] = []
        self._leaves, self._buffers = leaves, buffers
        copies = []
        for chunk in chunks:
            copies.append(_static(chunk))
            self._inputs += tree.tensors(copies[-1].contents)
        self._factors = [factor.clone() for factor in factors]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._losses = [
                work(chunk, factor) for chunk, factor in zip(copies, self._factors, strict=True)
            ]
        self._grads = [leaf.grad for leaf in leaves]
        self._used = [index for index, grad in enumerate(self._grads) if grad is not None]
        for leaf in leaves:
            leaf.grad = None

    def replay(
        self, chunks: Sequence[Chunk], factors: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The losses, and a copy of the gradients: the next replay overwrites its own."""
        inputs = tree.tensors([chunk.contents for chunk in chunks])
        _copy_all(
            zip(self._inputs, inputs, strict=True),
            zip(self._factors, factors, strict=True),
            self._buffers,
        )
        self._graph.replay()
        grads: list[Tensor | None] = [None] * len(self._grads)
        copies = torch._foreach_mul([self._grads[index] for index in self._used], 1.0)  # type: ignore[misc]
        for index, grad in zip(self._used, copies, strict=True):
            grads[index] = grad
        return [loss.clone() for loss in self._losses], grads


@torch.no_grad()
def _copy_all(*pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write the second tensor of every pair into the first."""
    all_pairs = list(chain.from_iterable(pairs))
    torch._foreach_copy_([to for to, _ in all_pairs], [of for _, of in all_pairs])


def identity_of(function: Callable[..., Any]) -> Hashable:
    """Equal for two functions made by the same line around the same objects, as lambdas are."""
    code = getattr(function, "__code__", None)
    if code is None:
        return id(function)
    cells = getattr(function, "__closure__", None) or ()
    return code, tuple(id(cell.cell_contents) for cell in cells), id(function.__defaults__)


def _shape(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
    if tree.is_container(value):
        return (type(value), tuple((key, _shape(item)) for key, item in tree.children(value)))
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)


def _static(chunk: Chunk) -> Chunk:
    """A chunk of the same values in memory of its own."""
    args, kwargs, targets = tree.map_tensors(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad), chunk.contents
    )
    return Chunk(chunk.replica, args, kwargs, chunk.rows, targets)
