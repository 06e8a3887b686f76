"""DataParallel: one process, one model, a replica on each device.

A forward pass is scatter, replicate, parallel apply, gather; this file calls them in order.
`backward()` computes the loss on the replicas too, so only losses and gradients are collected on
one device. A mean over chunks of different sizes is not the mean of their means: each chunk's loss
gets a factor, and the sum over chunks of factor times loss is the loss of the whole batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from paceline.ddp import Wrapper
from paceline.dp.batch_norm import StatisticsExchange, has_batch_norm
from paceline.dp.devices import (
    Device,
    ReplicaDevice,
    away_from_home,
    find_device,
    find_devices,
    group_by_thread,
    move,
)
from paceline.dp.loss_items import Count, find_count
from paceline.dp.parallel_apply import ParallelApply, refuse_transforms
from paceline.dp.parameters import Parameters, ParameterSource
from paceline.dp.replicate import Replica
from paceline.dp.scatter_gather import Chunk, check_weights, gather, scatter
from paceline.errors import UsageError, check_choice, check_kind, check_whole
from paceline.group import map_tensors
from paceline.torch_private import never_compiled

LossReduction = Literal["mean", "sum"]


def plan_factors(
    chunks: Sequence[Chunk],
    reduction: LossReduction,
    count: Count | None,
    devices: Sequence[ReplicaDevice],
) -> list[Tensor]:
    """Each chunk's factor, a float64 on the chunk's device; the host waits for no device."""
    homes = [devices[chunk.replica].device for chunk in chunks]
    if count is None:
        total = sum(chunk.rows for chunk in chunks)
        is_sum = reduction == "sum" or total == 0
        shares = [1.0 if is_sum else chunk.rows / total for chunk in chunks]
        return [
            torch.full((), share, dtype=torch.float64, device=device)
            for share, device in zip(shares, homes, strict=True)
        ]
    counts = [
        _as_count(count(chunk.targets), device) for chunk, device in zip(chunks, homes, strict=True)
    ]
    whole = torch.stack([own.to(homes[0]) for own in counts]).sum()
    if reduction == "sum":
        return [whole.reciprocal().to(device) for device in homes]
    return [own / whole.to(device) for own, device in zip(counts, homes, strict=True)]


def _as_count(value: Tensor | float, device: torch.device) -> Tensor:
    own = torch.as_tensor(value, device=device).detach().to(torch.float64)
    if own.dim() != 0:
        raise UsageError(
            f"count returned a tensor of shape {tuple(own.shape)}, but a count is one number.",
            advice="Return how many items of the chunk count, such as `(targets != -100).sum()`.",
        )
    return own


def compute_loss(chunk: Chunk, module: nn.Module, loss_fn: Callable[..., Tensor]) -> Tensor:
    """The loss of a chunk; raises unless it is one differentiable number."""
    output = module(*chunk.args, **chunk.kwargs)
    loss = loss_fn(output) if chunk.targets is None else loss_fn(output, chunk.targets)
    is_number = isinstance(loss, Tensor) and loss.dim() == 0
    if not is_number or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        lacks = "does not depend on any parameter" if is_number else "is not one number"
        raise UsageError(
            f"loss_fn returned {what}, which {lacks}.",
            advice="Return the mean or the sum over the chunk, computed from the module's output "
            "without detach(), item() or no_grad().",
        )
    return loss


def total_loss(losses: Sequence[Tensor], factors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The loss of the whole batch. A chunk with factor 0 may have the loss NaN (0 / 0)."""
    parts = [
        torch.where(factor > 0, loss.detach() * factor.to(loss.dtype), 0).to(device)
        for loss, factor in zip(losses, factors, strict=True)
    ]
    return torch.stack(parts).sum()


BatchNorm = Literal["first", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOptions:
    """Options of replicas that torch's class does not have."""

    batch_norm: BatchNorm = "first"
    """Which rows BatchNorm normalises by in training: each replica's own, with running statistics
    from the first replica (`"first"`, as torch's class does), or those of the whole batch
    (`"whole"`, as the bare module does)."""

    share_parameters: bool = True
    """Let replicas on the module's device use its parameters directly. With False each has a copy,
    for modules that write to their parameters in forward."""

    cpu_threads: int | None = None
    """Threads for the operators of one CPU replica; by default the replicas share those of the
    process."""

    def __post_init__(self) -> None:
        check_choice("batch_norm", self.batch_norm, get_args(BatchNorm))
        check_whole("cpu_threads", self.cpu_threads, or_none=True)


DEFAULT_OPTIONS = DPOptions()


class DataParallel(Wrapper):
    """Runs a module on several devices at once, each on a part of the batch.

    Takes torch's arguments and returns torch's outputs and gradients. Devices may also be parts of
    the CPU, `["cpu:0", "cpu:1"]`, each a thread. `split` divides the rows by weight, for devices of
    unequal speed; `options` has the other settings that torch's class lacks.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        split: Sequence[float] | None = None,
        options: DPOptions = DEFAULT_OPTIONS,
    ) -> None:
        check_kind("module", module, nn.Module, "Pass a torch.nn.Module.")
        check_kind("dim", dim, int, "Pass the number of a dimension.")
        check_kind("options", options, DPOptions, "Pass DPOptions(...).")
        devices = find_devices(device_ids)
        check_weights(split, len(devices))
        output = (
            devices[0] if output_device is None else find_device(output_device, "output_device")
        )
        nn.Module.__init__(self)
        # Before `module`: once that is set, assigning a name that the module has sets it there.
        self.dim = dim
        self.device_ids = [place.torch_id for place in devices]
        self.split = None if split is None else list(split)
        self._devices = devices
        self._dp_options = options
        self._output = output.device
        self.output_device = output.torch_id
        self.src_device_obj = devices[0].device
        self._engine: ReplicaEngine | None = None
        if len(devices) == 1:
            module = module.to(devices[0].device)
        self.module = module

    @never_compiled  # a graph captured by torch.compile cannot contain threads
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the replicas on their parts of the inputs, and join their outputs."""
        if len(self._devices) == 1:
            return self._run_alone(inputs, kwargs)
        chunks = scatter(inputs, kwargs, self._devices, self.dim, self.split)
        outputs = self._ready_engine().forward(chunks)
        used = [self._devices[chunk.replica] for chunk in chunks]
        return gather(outputs, used, self._output, self.dim)

    def backward(
        self,
        loss_fn: Callable[..., Tensor],
        inputs: Any,
        targets: Any = None,
        kwargs: dict[str, Any] | None = None,
        *,
        reduction: LossReduction = "mean",
        count: Count | None = None,
    ) -> Tensor:
        """Forward, loss and backward on the replicas; returns the loss of the whole batch.

            loss = model.backward(F.cross_entropy, images, labels)

        Each replica computes `loss_fn(module(*inputs, **kwargs), targets)` for its chunk, without
        `targets` if there are none, and its gradients. A tuple of `inputs` is several arguments.
        With reduction "mean" the chunks' losses are weighted by their rows, or by `count(targets)`,
        such as the number of tokens that are not padding, which is known of torch's
        `cross_entropy` and `nll_loss`, also as modules and partials. With "sum" they are added up,
        and divided by the sum of `count(targets)` if that is given.
        Gradients are added to those of the parameters once all replicas have succeeded.
        """
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        chunks = scatter(args, kwargs or {}, self._devices, self.dim, self.split, targets)
        check_choice("reduction", reduction, get_args(LossReduction))
        known = find_count(loss_fn, reduction)
        if count is None and any(chunk.rows for chunk in chunks):
            count = known
        factors = plan_factors(chunks, reduction, count, self._devices)
        losses = self._ready_engine().backward(chunks, loss_fn, factors)
        return total_loss(losses, factors, self._output)

    def _run_alone(self, inputs: Any, kwargs: Any) -> Any:
        device = self._devices[0].device
        inputs, kwargs = map_tensors(lambda tensor: move(tensor, device), (inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        if self._output != device:
            output = map_tensors(lambda tensor: tensor.to(self._output), output)
        return output

    def _ready_engine(self) -> ReplicaEngine:
        engine = self._engine
        if engine is None or not engine.is_usable(self.module):
            engine = ReplicaEngine(self.module, self._devices, self._dp_options)
            self.__dict__["_engine"] = engine
        return engine

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}


class ReplicaEngine:
    """One module's replicas, the parameters they use, and the threads they run in.

        built --(forward | backward)--> used ... --(module or threads changed)--> replaced

    Nothing in it is part of the model's state, so the wrapper can be copied, saved and forked
    without it. A call takes a chunk for each replica that has rows: replicas are refreshed in the
    calling thread, then all run at once. Calls from several threads take turns.
    """

    def __init__(self, module: nn.Module, devices: list[ReplicaDevice], options: DPOptions) -> None:
        self._source, self._devices = module, devices
        self._exchange: StatisticsExchange | None = None
        if options.batch_norm == "whole" and has_batch_norm(module):
            self._exchange = StatisticsExchange(devices)
        # Replicas that wait for each other in a layer cannot take turns.
        groups = group_by_thread(devices, one_each=self._exchange is not None)
        self._parameters = ParameterSource(devices, groups, options.share_parameters)
        self._replicas = [
            Replica(module, device, number, self._exchange) for number, device in enumerate(devices)
        ]
        self._apply = ParallelApply(devices, groups, options.cpu_threads)
        # Reentrant, because a hook on a parameter may call the model again.
        self._lock = threading.RLock()

    def is_usable(self, module: nn.Module) -> bool:
        """Whether module, submodules and threads are still those the engine was built with."""
        pool = self._apply.pool
        has_threads = pool is None or pool.is_alive
        return has_threads and module is self._source and self._replicas[0].is_current()

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        """The replicas' outputs, in the order of the chunks."""

        def work(chunk: Chunk, module: nn.Module) -> Any:
            return module(*chunk.args, **chunk.kwargs)

        with self._exclusive() as params:
            tables = self._parameters.link(params, [chunk.replica for chunk in chunks])
            return self._run(chunks, tables, work)

    def backward(
        self, chunks: Sequence[Chunk], loss_fn: Callable[..., Tensor], factors: Sequence[Tensor]
    ) -> list[Tensor]:
        """The chunks' losses; their gradients, times the factors, are added to the parameters'."""
        if not torch.is_grad_enabled():
            raise UsageError(
                "backward() was called where gradients are switched off.",
                advice="Call it outside torch.no_grad() and torch.inference_mode().",
            )
        factor_by_replica = {c.replica: factor for c, factor in zip(chunks, factors, strict=True)}
        is_joint = self._exchange is not None  # one graph for all replicas

        def work(chunk: Chunk, module: nn.Module) -> Tensor:
            loss = compute_loss(chunk, module, loss_fn)
            if is_joint:
                return loss
            torch.autograd.backward(loss, factor_by_replica[chunk.replica].to(loss.dtype))
            return loss.detach()

        with self._exclusive() as params:
            tables, leaves = self._parameters.detach(params, [chunk.replica for chunk in chunks])
            losses = self._run(chunks, tables, work)
            if is_joint:
                weights = [f.to(loss.dtype) for f, loss in zip(factors, losses, strict=True)]
                torch.autograd.backward(losses, weights)
            self._parameters.collect(params, leaves)
        return losses

    @contextmanager
    def _exclusive(self) -> Iterator[list[Tensor]]:
        """One call at a time; yields the module's parameters."""
        pool = self._apply.pool
        if pool is not None:
            refuse_transforms()
            if pool.is_calling:
                raise UsageError(
                    "The model was called from inside one of its replicas, which would wait "
                    "forever.",
                    advice="In forward and in hooks, call `self` or the module that the hook is "
                    "given, not the DataParallel around them.",
                )
        with self._lock:
            if pool is not None:
                pool.wait()  # for jobs of a call that Ctrl-C interrupted
            params = self._replicas[0].parameters()
            tensors = [*params, *self._replicas[0].buffers()]
            if any(tensor.device != self._devices[0].device for tensor in tensors):
                raise away_from_home(self._source, self._devices[0])
            yield params

    def _run(
        self,
        chunks: Sequence[Chunk],
        tables: Mapping[int, Parameters | None],
        work: Callable[[Chunk, nn.Module], Any],
    ) -> list[Any]:
        """Run `work` on every chunk, each on its replica with the parameters in `tables`."""
        chunk_by_replica = {chunk.replica: chunk for chunk in chunks}
        exchange = self._exchange
        if exchange is not None:
            exchange.open(list(chunk_by_replica))
        # Of the replicas on the module's device, the first that has rows updates its buffers.
        home = self._devices[0].device
        at_home = (number for number in chunk_by_replica if self._devices[number].device == home)
        writer = next(at_home, None)
        for number, table in tables.items():
            self._replicas[number].refresh(table, copy_buffers=number != writer)

        def run(number: int) -> Any:
            try:
                return work(chunk_by_replica[number], self._replicas[number].module)
            except BaseException as error:
                error.add_note(
                    f"Replica {number} of {len(self._devices)} on {self._devices[number].name} "
                    f"raised this, working on {chunk_by_replica[number].describe()}.\n"
                    "The other replicas finished or were not started; the model can be called "
                    "again."
                )
                raise
            finally:
                if exchange is not None:
                    exchange.leave(number)

        return self._apply(list(chunk_by_replica), run)
