"""Recording a replica's work on a GPU once, as a CUDA graph, and replaying it afterwards.

A small model on a fast GPU waits for Python, which starts one kernel after the other. A replay
starts them all at once. `recorder` decides what is recorded; here is how.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import tree
from paceline.dp.replicate import Replica
from paceline.dp.scatter import Chunk

Buffers = Sequence[tuple[Tensor, Tensor]]
"""A replica's own copy of each buffer, to be refreshed before a replay, and its source."""

Again = Callable[[Sequence[Chunk], Tensor | None], list[Tensor]]
"""Computes chunks' outputs as usual, from where random numbers were at the time; see `_Replay`."""


class ForwardRecording:
    """The forward passes of all replicas on one GPU and their backward passes, two graphs.

    The memory of a forward pass is needed until its backward pass has run. Until then, or until
    its outputs are gone, the recording is busy.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        replicas: Sequence[Replica],
        params: Sequence[Tensor],
        *,
        again: Again | None = None,
        needed: Sequence[Tensor] = (),
        is_random: bool = False,
    ) -> None:
        # Autograd keeps the stream on which a parameter was first used, and would make it wait for
        # the recording's. Leaves that nobody has used yet share the parameters' memory alone.
        leaves = [nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in params]
        for replica in replicas:
            replica.refresh({id(p): leaf for p, leaf in zip(params, leaves, strict=True)})
        self._buffers = list(chain.from_iterable(r.copied_buffers() for r in replicas))
        self._chunks = [_static(chunk) for chunk in chunks]
        self._inputs = [t for chunk in self._chunks for t in tree.tensors(chunk.contents)]
        self._pass: weakref.ref[Any] | None = None
        self._forward = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        with _recorded(self._forward, pool):
            outputs = [
                replica.module(*chunk.args, **chunk.kwargs)
                for chunk, replica in zip(self._chunks, replicas, strict=True)
            ]
        self._outputs = tree.map_tensors(Tensor.detach, outputs)
        ends = [tensor for tensor in tree.tensors(outputs) if tensor.requires_grad]
        self._places = [i for i, t in enumerate(tree.tensors(outputs)) if t.requires_grad]
        wanted = [tensor for tensor in (*self._inputs, *leaves) if tensor.requires_grad]
        self.params = [param for param in params if param.requires_grad]
        self.again = again
        self.needed = list(needed)
        """What backward reads, besides inputs: writing to it in between is an error."""
        self.is_random = is_random
        self._backward: torch.cuda.CUDAGraph | None = None
        if ends:
            self._grad_outputs = [torch.zeros_like(tensor) for tensor in ends]
            self._backward = torch.cuda.CUDAGraph()
            with _recorded(self._backward, pool):
                self._grads = torch.autograd.grad(
                    ends, wanted, self._grad_outputs, allow_unused=True
                )

    @property
    def is_busy(self) -> bool:
        """Whether a forward pass still waits for its backward pass, or was told to keep its graph.

        Autograd frees what a pass saved once it is no longer needed.
        """
        waiting = None if self._pass is None else self._pass()
        if waiting is None:
            return False
        try:
            return waiting.saved_tensors is not None
        except RuntimeError as error:
            return "second time" not in str(error)

    def replay(self, chunks: Sequence[Chunk]) -> list[Any]:
        """The chunks' outputs, in memory that the next replay writes to."""
        inputs = [tensor for chunk in chunks for tensor in tree.tensors(chunk.contents)]
        _copy_all(zip(self._inputs, inputs, strict=True), self._buffers)
        if self._backward is None:
            self._forward.replay()
            return list(tree.map_tensors(Tensor.clone, self._outputs))
        live = [tensor for tensor in inputs if tensor.requires_grad]
        outputs = _Replay.apply(self, len(live), *live, *self.params)  # type: ignore[no-untyped-call]
        remaining = iter(outputs)
        return list(tree.map_tensors(lambda _: next(remaining), self._outputs))

    def forward(self, context: Any) -> list[Tensor]:
        self._forward.replay()
        self._pass = weakref.ref(context)
        return [tensor.detach() for tensor in tree.tensors(self._outputs)]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients, copied: autograd may keep what it is given, and a replay overwrites it.

        This writes to the memory of the forward pass, so it can be done once only.
        """
        given = [grads[place] for place in self._places]
        for static, grad in zip(self._grad_outputs, given, strict=True):
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)
        assert self._backward is not None  # only differentiable outputs have a backward pass
        self._backward.replay()
        return _copies(self._grads)

    def inputs(self, given: Sequence[Tensor] | None) -> list[Chunk]:
        """The inputs of the last replay; those with gradients are linked to what was given."""
        links = None if given is None else iter(given)

        def copy(tensor: Tensor) -> Tensor:
            if links is not None and tensor.requires_grad:
                return _as_it_was(next(links), tensor)
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        chunks = []
        for chunk in self._chunks:
            args, kwargs, targets = tree.map_tensors(copy, chunk.contents)
            chunks.append(Chunk(chunk.replica, args, kwargs, chunk.rows, targets))
        return chunks

    def non_differentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [t for place, t in enumerate(outputs) if place not in self._places]


class _Replay(torch.autograd.Function):
    """Recorded forward passes, to autograd.

    Gradients of gradients are not recorded, and a backward pass can be replayed once. Where more is
    asked for, the outputs are computed again as usual, if that is proven to give the same.
    """

    @staticmethod
    def forward(
        ctx: Any, recording: ForwardRecording, count: int, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        is_random = recording.is_random
        ctx.random_state = torch.cuda.get_rng_state(inputs[0].device) if is_random else None
        outputs = recording.forward(ctx)
        ctx.recording, ctx.live, ctx.is_spent = recording, inputs[:count], False
        ctx.versions = [param._version for param in recording.params]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*recording.non_differentiable(outputs))
        ctx.save_for_backward(*recording.needed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        recording: ForwardRecording = ctx.recording
        _ = ctx.saved_tensors  # raises if they are freed or were written to
        wants_more = torch.is_grad_enabled()
        if not (wants_more or ctx.is_spent):
            ctx.is_spent = True
            return None, None, *recording.backward(grads)
        if recording.again is None:
            raise RuntimeError(
                "A replayed forward pass has one backward pass, and no gradients of gradients. "
                "Leave cuda_graphs off."
            )
        if ctx.versions != [param._version for param in recording.params]:
            raise RuntimeError(
                "A parameter was written to after a forward pass that is to be differentiated "
                "again. Pass DPOptions(cuda_graphs=False) to keep what such a pass computed."
            )
        chunks = recording.inputs(ctx.live if wants_more else None)
        inputs = [t for chunk in chunks for t in tree.tensors(chunk.contents) if t.requires_grad]
        outputs = recording.again(chunks, ctx.random_state)
        asked = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
        return (
            None,
            None,
            *torch.autograd.grad(
                [output for output, _ in asked],
                [*inputs, *recording.params],
                [grad for _, grad in asked],
                create_graph=wants_more,
                allow_unused=True,
            ),
        )


class _AsItWas(torch.autograd.Function):
    """An input with the value that it had, to autograd the one that was given."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, value: Tensor) -> Tensor:
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _as_it_was(given: Tensor, value: Tensor) -> Tensor:
    linked: Tensor = _AsItWas.apply(given, value)  # type: ignore[no-untyped-call]
    return linked


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
        self._buffers = buffers
        copies = []
        for chunk in chunks:
            copies.append(_static(chunk))
            self._inputs += tree.tensors(copies[-1].contents)
        self._factors = [factor.clone() for factor in factors]
        self._graph = torch.cuda.CUDAGraph()
        with _recorded(self._graph, torch.cuda.graph_pool_handle()):
            self._losses = [
                work(chunk, factor) for chunk, factor in zip(copies, self._factors, strict=True)
            ]
        self._leaves = leaves  # the graph reads their memory
        self._grads = [leaf.grad for leaf in leaves]
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
        return [loss.clone() for loss in self._losses], _copies(self._grads)


@contextmanager
def _recorded(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Record what happens inside; other threads, such as a data loader's, go on as they like."""
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        torch.cuda.set_stream(stream)  # torch does not go back to it from a recording that fails


@torch.no_grad()
def _copy_all(*pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write the second tensor of every pair into the first."""
    all_pairs = list(chain.from_iterable(pairs))
    torch._foreach_copy_([to for to, _ in all_pairs], [of for _, of in all_pairs])


@torch.no_grad()
def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    dense = [t for t in tensors if t is not None and t.layout is torch.strided]
    copied = iter(torch._foreach_mul(dense, 1.0) if dense else ())
    return [
        None if t is None else next(copied) if t.layout is torch.strided else t.clone()
        for t in tensors
    ]


def _static(chunk: Chunk) -> Chunk:
    """A chunk of the same values in memory of its own."""
    args, kwargs, targets = tree.map_tensors(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad), chunk.contents
    )
    return Chunk(chunk.replica, args, kwargs, chunk.rows, targets)
