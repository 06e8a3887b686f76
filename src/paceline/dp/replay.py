"""What replicas on one GPU do with a call: run it as usual, time it, watch it, or replay it.

`recorder` says which; see the life of a signature there. Whatever happens, the caller gets the
outputs, losses and gradients of this call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import tree
from paceline.dp.devices import Place
from paceline.dp.loss import compute_loss, differentiate
from paceline.dp.options import DPOptions, can_replay
from paceline.dp.parallel_apply import Climate
from paceline.dp.parameters import ParameterSets, deliver
from paceline.dp.record import ForwardRecording, LossRecording
from paceline.dp.recorder import (
    MOST_BYTES,
    Entry,
    Recorder,
    Stage,
    identity_of,
    unwritten,
)
from paceline.dp.replicate import Replica
from paceline.dp.scatter import Chunk

Usual = Callable[[Callable[[Chunk, nn.Module], Any]], list[Any]]
"""Computes what is wanted of each chunk as usual, given how to compute it of one."""


def make_replayer(
    module: nn.Module,
    places: Sequence[Place],
    replicas: Sequence[Replica],
    parameters: ParameterSets,
    options: DPOptions,
) -> Replayer | None:
    """A replayer, if the options ask for one or leave it open where one may pay."""
    is_automatic = options.cuda_graphs is None
    if options.cuda_graphs is False or not can_replay(options, places):
        return None
    if is_automatic and len(places) * _grad_bytes(list(module.parameters())) > MOST_BYTES:
        return None
    recorder = Recorder(module, places[0].device, is_automatic=is_automatic)
    return Replayer(recorder, places, replicas, parameters)


class Replayer:
    """Replays what was recorded for the replicas of one GPU."""

    def __init__(
        self,
        recorder: Recorder,
        places: Sequence[Place],
        replicas: Sequence[Replica],
        parameters: ParameterSets,
    ) -> None:
        self._recorder = recorder
        self._places, self._replicas, self._parameters = places, replicas, parameters

    def outputs(self, chunks: Sequence[Chunk], params: Sequence[Tensor], usual: Usual) -> list[Any]:
        """The chunks' outputs; what the caller gets of them must be copies."""
        tensors = [*params, *self._replicas[0].buffers()]
        entry, stage = self._plan("forward", chunks, tensors)
        if stage is Stage.REPLAYED:
            with Climate(self._places).around(self._places[0]):
                recording: ForwardRecording | None = self._recorder.record(
                    entry, lambda: self._record_forward(entry, chunks, params)
                )
            if recording is not None and not recording.is_busy:
                self._forget_buffers(chunks)
                return recording.replay(chunks)
        if stage is Stage.WATCHED:
            return self._watch_forward(entry, chunks, tensors, usual)
        if stage is Stage.TIMED and entry.pace is not None:
            with entry.pace.measured():
                return usual(call)
        return usual(call)

    def _watch_forward(
        self, entry: Entry, chunks: Sequence[Chunk], tensors: Sequence[Tensor], usual: Usual
    ) -> list[Any]:
        watch, saved = self._recorder.watch(), _SavedTensors(tensors)

        def look(chunk: Chunk, module: nn.Module) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(saved.note, _as_it_is):
                return watch.run(module, chunk.args, chunk.kwargs, unwritten(chunk, module))

        outputs = usual(look)
        entry.needed = saved.found()
        if not all(isinstance(output, Tensor) for output in outputs):
            watch.refuse("its output is more than one tensor")  # each may have a backward pass
        if saved.is_empty and torch.is_grad_enabled():
            watch.refuse("it saves nothing for backward")  # which may then run any number of times
        kept = 2 * _bytes(outputs) + _bytes([c.contents for c in chunks]) + _grad_bytes(tensors)
        self._recorder.conclude(entry, watch, kept)
        return outputs

    def _record_forward(
        self, entry: Entry, chunks: Sequence[Chunk], params: Sequence[Tensor]
    ) -> ForwardRecording:
        replicas = [self._replicas[chunk.replica] for chunk in chunks]
        if entry.proof is None:  # recorded by order
            return ForwardRecording(chunks, replicas, params)
        return ForwardRecording(
            chunks,
            replicas,
            params,
            again=partial(_compute_again, self._replicas, Climate(self._places)),
            needed=entry.needed,
            is_random=entry.is_random,
        )

    def losses(
        self,
        chunks: Sequence[Chunk],
        loss_fn: Callable[..., Tensor],
        factors: Sequence[Tensor],
        params: Sequence[Tensor],
        usual: Usual,
    ) -> list[Tensor]:
        """The chunks' losses; their gradients are added to the parameters' own."""
        compute = partial(compute_loss, loss_fn=loss_fn)
        tensors = [*params, *self._replicas[0].buffers()]
        entry, stage = self._plan("loss", chunks, tensors, loss_fn)
        if stage is Stage.REPLAYED:
            with Climate(self._places).around(self._places[0]):
                recording: LossRecording | None = self._recorder.record(
                    entry, lambda: self._record_loss(chunks, compute, factors, params)
                )
            if recording is not None:
                self._forget_buffers(chunks)
                losses, grads = recording.replay(chunks, factors)
                deliver(params, grads)
                return losses
        if stage is Stage.WATCHED:
            return self._watch_loss(entry, chunks, loss_fn, params, usual)
        pace = entry.pace
        if stage is not Stage.TIMED or pace is None:
            return usual(compute)

        def look(chunk: Chunk, module: nn.Module) -> Tensor:
            loss = compute(chunk, module)
            pace.note_memory()
            return loss

        with pace.measured():
            return usual(look)

    def _watch_loss(
        self,
        entry: Entry,
        chunks: Sequence[Chunk],
        loss_fn: Callable[..., Tensor],
        params: Sequence[Tensor],
        usual: Usual,
    ) -> list[Tensor]:
        watch = self._recorder.watch()

        def look(chunk: Chunk, module: nn.Module) -> Tensor:
            args = (chunk, module, loss_fn)
            loss: Tensor = watch.run(compute_loss, args, {}, unwritten(chunk, module))
            return loss

        losses = usual(look)
        kept = _bytes([chunk.contents for chunk in chunks]) + _grad_bytes(params)
        self._recorder.conclude(entry, watch, kept, [loss_fn])
        return losses

    def _plan(
        self,
        what: str,
        chunks: Sequence[Chunk],
        tensors: Sequence[Tensor],
        function: Callable[..., Any] | None = None,
    ) -> tuple[Entry, Stage]:
        state = self._recorder.state(tensors)
        shape = None if state is None else self._recorder.shape(chunks)
        if shape is None:
            return Entry(), Stage.PLAIN
        own = None if function is None else identity_of(function)
        return self._recorder.plan((what, state, shape, own), [function, *tensors])

    def _forget_buffers(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._replicas[chunk.replica].forget_buffers()

    def _record_loss(
        self,
        chunks: Sequence[Chunk],
        compute: Callable[[Chunk, nn.Module], Tensor],
        factors: Sequence[Tensor],
        params: Sequence[Tensor],
    ) -> LossRecording:
        detach(params, [chunk.replica for chunk in chunks], self._parameters, self._replicas)
        buffers = [self._replicas[chunk.replica].copied_buffers() for chunk in chunks]
        modules = {chunk.replica: self._replicas[chunk.replica].module for chunk in chunks}
        return LossRecording(
            chunks,
            factors,
            self._parameters.leaves(0),
            list(chain.from_iterable(buffers)),
            lambda chunk, factor: differentiate(compute(chunk, modules[chunk.replica]), factor),
        )


def detach(
    params: Sequence[Tensor],
    used: Sequence[int],
    parameters: ParameterSets,
    replicas: Sequence[Replica],
) -> None:
    """Give the replicas leaves, on which gradients are collected apart."""
    tables = parameters.detach(params, used)
    for number in used:
        replicas[number].refresh(tables[number])


def call(chunk: Chunk, module: nn.Module) -> Any:
    return module(*chunk.args, **chunk.kwargs)


def _compute_again(
    replicas: Sequence[Replica],
    climate: Climate,
    chunks: Sequence[Chunk],
    random_state: Tensor | None,
) -> list[Tensor]:
    """Chunks' outputs, computed as usual; random numbers and buffers stay as they are."""
    used = [replicas[chunk.replica] for chunk in chunks]
    for replica in used:
        replica.refresh(None)
    buffers = [(b, b.clone()) for replica in used for b in replica.module.buffers()]
    device = replicas[0].place.device
    now = torch.cuda.get_rng_state(device)
    with climate.around(replicas[0].place), torch.enable_grad():
        if random_state is not None:
            torch.cuda.set_rng_state(random_state, device)
        try:
            return [call(c, replica.module) for c, replica in zip(chunks, used, strict=True)]
        finally:
            torch.cuda.set_rng_state(now, device)
            for buffer, before in buffers:
                buffer.data.copy_(before)  # autograd, which saved it, need not know


class _SavedTensors:
    """Finds out which of some tensors autograd saves for the backward pass, or a part of them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = sorted(tensors, key=Tensor.data_ptr)
        self._starts = [tensor.data_ptr() for tensor in self._tensors]
        self._found: dict[int, Tensor] = {}
        self.is_empty = True

    def note(self, saved: Tensor) -> Tensor:
        self.is_empty = False
        place = bisect_right(self._starts, saved.data_ptr()) - 1
        if place >= 0 and saved.numel():
            owner = self._tensors[place]
            if saved.data_ptr() < owner.data_ptr() + owner.nbytes:
                self._found[id(owner)] = owner
        return saved

    def found(self) -> list[Tensor]:
        return list(self._found.values())


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def _bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tree.tensors(value))


def _grad_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
