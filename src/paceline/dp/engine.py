"""The engine behind `DataParallel`: replicas, their parameters, and the threads they run in.

Everything that is not part of the model's state is here, so the wrapper can be copied, saved and
forked without it, and build a new engine whenever this one no longer fits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.dp.batch_norm import (
    AbsentError,
    Meeting,
    has_batch_norm,
    is_replaced,
    whole_batch_class,
)
from paceline.dp.devices import Place, check_tensors_at_home, group_into_lanes
from paceline.dp.loss import compute_loss, differentiate
from paceline.dp.options import DPOptions
from paceline.dp.parallel_apply import Climate, Crew, Outcome, blame, refuse_transforms
from paceline.dp.parameters import ParameterSets
from paceline.dp.replicate import Parameters, Replica, as_it_is
from paceline.dp.scatter import Chunk
from paceline.errors import UsageError

Work = Callable[[Chunk, nn.Module], Any]


class Engine:
    """One module's replicas on one set of places.

        built --(forward | backward)--> used ... --(module or threads changed)--> dropped

    A call takes a chunk for each replica that has rows: replicas are refreshed in the calling
    thread, then every lane does its replicas' work. Calls from several threads take turns.
    """

    def __init__(self, module: nn.Module, places: list[Place], options: DPOptions) -> None:
        self._source = module
        self._places = places
        # Replicas that wait for each other in a layer cannot take turns.
        self._meeting = (
            Meeting(places) if options.batch_norm == "whole" and has_batch_norm(module) else None
        )
        self._lanes = group_into_lanes(places, one_each=self._meeting is not None)
        self._parameters = ParameterSets(places, self._lanes, options.share_parameters)
        self._replicas = [self._build(number) for number in range(len(places))]
        self._crew = None if len(self._lanes) == 1 else self._hire(options.cpu_threads)
        # Reentrant, because a hook on a parameter may call the model again.
        self._lock = threading.RLock()

    def is_usable(self, module: nn.Module) -> bool:
        """Whether module, submodules and threads are still those this engine was built with."""
        is_manned = self._crew is None or self._crew.is_alive
        return is_manned and module is self._source and self._replicas[0].is_current()

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        """The replicas' outputs, in the order of the chunks."""
        with self._turn(chunks) as params:
            self._refresh(self._parameters.link(params, [chunk.replica for chunk in chunks]))
            return self._apply(chunks, _call)

    def backward(
        self, chunks: Sequence[Chunk], loss_fn: Callable[..., Tensor], factors: Sequence[Any]
    ) -> list[Tensor]:
        """The chunks' losses; their gradients, times the factors, are added to the parameters'."""
        if not torch.is_grad_enabled():
            raise UsageError(
                "backward() was called where gradients are switched off.",
                advice="Call it outside torch.no_grad() and torch.inference_mode().",
            )
        with self._turn(chunks) as params:
            return self._run_loss(chunks, loss_fn, factors, params)

    def _run_loss(
        self,
        chunks: Sequence[Chunk],
        loss_fn: Callable[..., Tensor],
        factors: Sequence[Any],
        params: Sequence[Tensor],
    ) -> list[Tensor]:
        factor_by_replica = {c.replica: factor for c, factor in zip(chunks, factors, strict=True)}
        is_joint = self._meeting is not None  # one graph for all replicas

        def work(chunk: Chunk, module: nn.Module) -> Tensor:
            loss = compute_loss(chunk, module, loss_fn)
            return loss if is_joint else differentiate(loss, factor_by_replica[chunk.replica])

        self._refresh(self._parameters.detach(params, [chunk.replica for chunk in chunks]))
        try:
            losses = self._apply(chunks, work)
            if is_joint:
                weights = [f.to(loss.dtype) for f, loss in zip(factors, losses, strict=True)]
                torch.autograd.backward(losses, weights)
        except BaseException:
            self._parameters.forget_gradients()
            raise
        self._parameters.collect(params)
        return losses

    def _refresh(self, tables: Mapping[int, Parameters | None]) -> None:
        for number, table in tables.items():
            self._replicas[number].refresh(table)

    @contextmanager
    def _turn(self, chunks: Sequence[Chunk]) -> Iterator[list[Tensor]]:
        """One call's time with the replicas, to itself; the parameters that it is about."""
        crew = self._crew
        if crew is not None:
            refuse_transforms()
        if crew is not None and crew.is_calling:
            raise UsageError(
                "The model was called from inside one of its replicas, which would wait forever.",
                advice="In forward and in hooks, call `self` or the module that the hook is given, "
                "not the DataParallel around them.",
            )
        with self._lock:
            if crew is not None and crew.finish_interrupted():
                self._parameters.forget_gradients()  # those of a backward() that was broken off
            self._share_buffers([chunk.replica for chunk in chunks])
            yield self._check_home()

    def _share_buffers(self, used: Sequence[int]) -> None:
        """Let the first replica that has rows, in the module's memory, write to its buffers."""
        home = self._places[0].device
        writer = next((number for number in used if self._places[number].device == home), None)
        for number in used:
            self._replicas[number].has_own_buffers = number != writer

    def _check_home(self) -> list[Tensor]:
        """The parameters, which all lie where the first replica is, or it is an error."""
        params = self._replicas[0].parameters()
        home = self._places[0]
        tensors = [*params, *self._replicas[0].buffers()]
        if any(tensor.device != home.device for tensor in tensors):
            check_tensors_at_home(self._source.named_parameters(), home)
            check_tensors_at_home(self._source.named_buffers(), home)
        return params

    def _apply(self, chunks: Sequence[Chunk], work: Work) -> list[Any]:
        """Do the work on every chunk, each lane's chunks one after the other."""
        climate = Climate(self._places)
        chunk_by_replica = {chunk.replica: chunk for chunk in chunks}
        if self._meeting is not None:
            self._meeting.open(list(chunk_by_replica))

        def lane_job(members: Sequence[int]) -> Callable[[], dict[int, Any]] | None:
            own = [chunk_by_replica[number] for number in members if number in chunk_by_replica]
            return (lambda: self._run_lane(own, work, climate)) if own else None

        jobs = [lane_job(members) for members in self._lanes]
        if self._crew is None:
            assert jobs[0] is not None  # a batch has at least one chunk
            results = jobs[0]()
        else:
            results = _merge(self._crew.run(jobs))
        return [results[chunk.replica] for chunk in chunks]

    def _run_lane(self, chunks: Sequence[Chunk], work: Work, climate: Climate) -> dict[int, Any]:
        results = {}
        for chunk in chunks:
            replica = self._replicas[chunk.replica]
            try:
                with climate.around(replica.place):
                    results[chunk.replica] = work(chunk, replica.module)
            except BaseException as error:
                blame(error, chunk.replica, self._places, chunk.describe())
                raise
            finally:
                if self._meeting is not None:
                    self._meeting.leave(chunk.replica)
        return results

    def _build(self, number: int) -> Replica:
        meeting = self._meeting

        def meet(name: str, module: nn.Module) -> tuple[type[nn.Module], dict[str, Any]]:
            if not is_replaced(module):
                return as_it_is(name, module)
            extras = {"meeting": meeting, "replica": number, "layer": name}
            return whole_batch_class(type(module)), extras  # type: ignore[arg-type]

        specialise = as_it_is if meeting is None else meet
        place = self._places[number]
        return Replica(self._source, place, specialise)

    def _hire(self, cpu_threads: int | None) -> Crew:
        cpu_lanes = sum(place.device.type == "cpu" for place in self._places)
        available = torch.get_num_threads()
        share = max(1, available // cpu_lanes) if cpu_lanes else available
        names = [f"paceline replica {self._places[lane[0]].name}" for lane in self._lanes]
        return Crew(names, cpu_threads or share, shares_processors=cpu_lanes > 1)


def _call(chunk: Chunk, module: nn.Module) -> Any:
    return module(*chunk.args, **chunk.kwargs)


def _merge(outcomes: Sequence[Outcome | None]) -> dict[int, Any]:
    """All lanes' results; or the first lane's error that is not the echo of another's."""
    errors = [outcome.error for outcome in outcomes if outcome and outcome.error is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, AbsentError)), errors[0])
    return {k: v for outcome in outcomes if outcome for k, v in outcome.value.items()}
