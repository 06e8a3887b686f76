"""`record_step`: one step of a training, recorded while it happens.

    with record_step(model, optimizer, step=run.step, folder="runs/digits") as recording:
        loss = loss_fn(model(x), y)
        recording.note_loss(loss)
        loss.backward()
        optimizer.step()
    print(recording.trace)

The step is the caller's own, on the real engine; see `watch`. When the block ends, workers tell
each other what they saw, rank 0 computes the step once more by itself, and writes the file. All of
them call it, in the same step.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import comm, tree, wire
from paceline.ddp import DistributedDataParallel
from paceline.dp import DataParallel
from paceline.errors import ReplicaError, UsageError, WireError
from paceline.pipeline import ranks, replicas, schema
from paceline.pipeline.facts import bytes_of, facts_of, tree_facts
from paceline.pipeline.follow import WeightRef, find_sample, find_weight, rows_of
from paceline.pipeline.inside import buckets_of
from paceline.pipeline.ranks import Seen
from paceline.pipeline.reference import (
    Outcome,
    Piece,
    Reference,
    Task,
    check_step,
    check_sums,
    not_computed,
)
from paceline.pipeline.stages import Check, Model, TensorFacts, Trace
from paceline.pipeline.watch import Call, Memory, Watch
from paceline.run_folder import RunFolder
from paceline.wrapper import bare

WHOLE_BATCH_LIMIT_BYTES = 256 * 2**20
"""Larger batches are not sent to rank 0 to be computed again; their gradients are summed again."""


class Recording:
    """One step being recorded; `trace` is there when the block has ended."""

    def __init__(self, watch: Watch) -> None:
        self.trace: Trace | None = None
        self.indices: list[int] | None = None
        self.loss: Tensor | None = None
        self.loss_weight: float | None = None
        self.targets: list[Any] = []
        self._watch = watch

    def note_batch(self, indices: Sequence[int]) -> None:
        """Say which rows of the dataset this worker's batch has, in order."""
        self.indices = [int(index) for index in indices]

    def note_loss(self, loss: Tensor, weight: float | None = None, targets: Any = None) -> None:
        """Say what the loss is, before backward; of several, their sum is shown.

        `weight` is over how many items it is a sum, where it is not what `weighted()` was told.
        With `targets`, and a `loss_fn` for the whole step, the check computes the loss of the whole
        batch too.
        """
        self.targets.append(tree.map_tensors(lambda tensor: tensor.detach().clone(), targets))
        value = loss.detach().clone()
        self.loss = value if self.loss is None else self.loss + value
        if weight is not None:
            self.loss_weight = (self.loss_weight or 0.0) + weight


@contextmanager
def record_step(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: int = 1,
    folder: str | os.PathLike[str] | None = None,
    dataset: Any = None,
    sample: int | None = None,
    weight: str | None = None,
    values: bool = False,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    check: bool = True,
) -> Iterator[Recording]:
    """Record the step inside the block; on `DistributedDataParallel`, in all workers at once.

    `model` is wrapped by one of our engines. With `folder` the file `pipeline/step{n}.json` is
    written there. `sample` is a row of the dataset, `weight` is written like `"fc.weight[0, 3]"`.
    Without `values` shapes and statistics are kept, but no value of data, weights or outputs.
    `loss_fn(output, targets)`, a mean over rows, makes the check compute the loss as well.
    `check=False` spares the copy of the model, and the second computation.
    """
    if not isinstance(model, (DataParallel, DistributedDataParallel)):
        raise UsageError(
            f"record_step got a {type(model).__name__}.",
            advice="Wrap the model in paceline.DataParallel or DistributedDataParallel first.",
        )
    if step < 1:
        raise UsageError(f"step is {step}.", advice="Steps are counted from 1.")
    parameters = {n: p for n, p in bare(model).named_parameters() if p.requires_grad}
    followed = find_weight(weight, parameters)
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    is_main = group is None or group.rank() == 0
    reference, trouble = _copy(model, optimizer) if check and is_main else (None, "")
    before = None if followed is None else followed.read(parameters)
    watch = Watch(model, optimizer, keeps_tensors=check)
    recording = Recording(watch)
    begin_ns = time.perf_counter_ns()
    with watch:
        yield recording
    step_s = (time.perf_counter_ns() - begin_ns) / 1e9
    if not watch.calls and group is None:
        raise UsageError(
            "The model was not called in the recorded step.",
            advice="Put forward, backward and the optimizer's step into the block.",
        )
    finish = _Finish(
        model=model,
        recording=recording,
        watch=watch,
        reference=reference,
        trouble=trouble,
        wants_check=check,
        followed=followed,
        before=before,
        sample=sample,
        values=values,
        dataset=dataset,
        step=step,
        step_s=step_s,
        loss_fn=loss_fn,
    )
    with torch.no_grad():
        recording.trace = finish.replicas() if group is None else finish.ranks(group)
    if folder is not None and is_main:
        schema.write(recording.trace, RunFolder(folder).pipeline_of(step))


def _copy(model: Any, optimizer: Optimizer | None) -> tuple[Reference | None, str]:
    try:
        return Reference(model.module, optimizer), ""
    except Exception as error:  # some modules cannot be copied; the step matters more
        return None, f"the model cannot be copied: {_first_line(error)}"


class _Finish:
    """From what was watched to the trace; what both engines have in common."""

    def __init__(
        self,
        *,
        model: Any,
        recording: Recording,
        watch: Watch,
        reference: Reference | None,
        trouble: str,
        wants_check: bool,
        followed: WeightRef | None,
        before: float | None,
        sample: int | None,
        values: bool,
        dataset: Any,
        step: int,
        step_s: float,
        loss_fn: Callable[[Any, Any], Tensor] | None,
    ) -> None:
        self.model = model
        self.recording = recording
        self.watch = watch
        self.reference = reference
        self.trouble = trouble
        self.wants_check = wants_check
        self.followed = followed
        self.before = before
        self.sample = sample
        self.values = values
        self.dataset = dataset
        self.step = step
        self.step_s = step_s
        self.loss_fn = loss_fn
        self.parameters = {n: p.detach() for n, p in watch.named}

    @property
    def has_update(self) -> bool:
        return self.watch.times.update_end > 0

    def ranks(self, group: Any) -> Trace:
        """The trace of a step of all workers; the same on every one of them."""
        device = self.model.device
        is_equal = self._ask_in_sync() if self.has_update and group.size() > 1 else None
        rows = sum(rows_of(call) for call in self.watch.calls)
        own = [rows, self.watch.loss_weight]
        counts = comm.exchange(group, own, device, "Recording a step: counts")
        rows_by_rank = [count for count, _ in counts]
        factor = _factor(counts)
        mine = self._seen(group.rank(), sum(rows_by_rank[: group.rank()]), factor * group.size())
        told = comm.exchange(group, asdict(mine), device, "Recording a step: facts")
        everyone: list[Seen] = [schema.read_as(Seen, value) for value in told]
        check = self._check_ranks(group, everyone, factor) if self.wants_check else None
        said = comm.exchange(group, check and asdict(check), device, "Recording a step: check")
        check = None if said[0] is None else schema.read_as(Check, said[0])
        if check is not None:
            check = replace(check, is_equal_on_all=is_equal)
        data, dataset_rows = self._data(everyone[0].inputs)
        buckets = self.watch.buckets or buckets_of(self.model)
        stages = ranks.build_stages(everyone, buckets, data, dataset_rows, is_equal)
        sample = weight = None
        if self.sample is not None:
            sample = ranks.follow_sample(self.sample, everyone, dataset_rows is not None)
        if self.followed is not None:
            flat = _flat(self.followed.index, self.parameters[self.followed.name])
            weight = ranks.follow_weight(
                self.followed.name,
                self.followed.index,
                flat,
                everyone,
                buckets,
                values=self.values,
            )
        return Trace(
            engine="DistributedDataParallel",
            workers=group.size(),
            devices=[seen.device for seen in everyone],
            batch_rows=sum(rows_by_rank),
            dataset_rows=dataset_rows,
            seconds=max(seen.step_s for seen in everyone),
            stages=stages,
            sample=sample,
            weight=weight,
            check=check,
            **self._facts(),
        )

    def replicas(self) -> Trace:
        """The trace of a step of one process with several replicas."""
        watch, model = self.watch, self.model
        calls = replicas.in_order(watch.calls, model.device_ids)
        own = {Memory.of(p) for p in bare(model).parameters()}
        seen = replicas.see_replicas(
            calls,
            watch.whole,
            model.device_ids,
            own,
            bytes_of(list(bare(model).parameters())),
            values=self.values,
        )
        check = self._check_replicas(calls) if self.wants_check else None
        data, dataset_rows = self._data(seen.batch or seen.inputs[0])
        times = watch.times
        rest = replicas.Rest(
            loss=self._loss_facts(),
            gradients=self._flat_facts("gradients", watch.averaged),
            parameters=self._flat_facts("weights", self.parameters),
            home=seen.devices[0],
            batch_s=_span(times.begin, watch.whole.arrive_ns if watch.whole else 0),
            loss_s=_span(watch.whole.leave_ns if watch.whole else 0, times.backward_begin),
            backward_s=self._backward_s(times.backward_end),
            update_s=_span(times.update_begin, times.update_end),
            has_update=self.has_update,
        )
        return Trace(
            engine="DataParallel",
            workers=len(calls),
            devices=seen.devices,
            batch_rows=sum(seen.rows),
            dataset_rows=dataset_rows,
            seconds=self.step_s,
            stages=replicas.build_stages(seen, rest, data, dataset_rows),
            sample=self._replica_sample(calls, seen.rows, dataset_rows is not None),
            weight=self._replica_weight(calls),
            check=check,
            **self._facts(),
        )

    def _facts(self) -> dict[str, Any]:
        whole = bare(self.model)
        parameters = list(whole.parameters())
        return {
            "step": self.step,
            "created": time.time(),
            "has_values": self.values,
            "model": Model(
                name=type(whole).__name__,
                parameters=sum(p.numel() for p in parameters),
                bytes=bytes_of(parameters),
            ),
        }

    def _seen(self, rank: int, rows_before: int, scale: float) -> Seen:
        """What this worker saw. Gradients are scaled so that the averages are their mean."""
        watch, times = self.watch, self.watch.times
        calls = watch.calls
        rows = sum(rows_of(call) for call in calls)
        sample = self._own_sample(rows_before, rows)
        found = None if sample is None else find_sample(sample, calls, values=self.values)
        local = {name: grad * scale for name, grad in watch.local.items()}
        first = calls[0] if calls else None
        last = calls[-1] if calls else None
        weight = None
        if self.followed is not None:
            new = self.followed.read(self.parameters)
            own, averaged = self.followed.read(local), self.followed.read(watch.averaged)
            weight = [self.before, own, averaged, new]
        return Seen(
            rank=rank,
            device=str(self.model.device),
            rows=rows,
            indices=self.recording.indices,
            has_values=self.values,
            passes=len(calls),
            inputs=_inputs(calls, self.values),
            outputs=tree_facts("output", first.output, values=self.values) if first else [],
            loss=self._loss_facts(),
            loss_weight=self._loss_weight(),
            gradients=self._flat_facts("own gradients", local),
            averaged=self._flat_facts("averaged gradients", watch.averaged),
            parameters=self._flat_facts("weights", self.parameters),
            has_update=self.has_update,
            batch_s=_span(times.begin, first.arrive_ns if first else 0),
            forward_s=sum((call.end_ns - call.begin_ns) / 1e9 for call in calls),
            loss_s=_span(last.leave_ns if last else 0, times.backward_begin),
            backward_s=self._backward_s(times.last_gradient),
            all_reduce_s=_span(times.last_gradient, times.backward_end),
            update_s=_span(times.update_begin, times.update_end),
            step_s=self.step_s,
            sample_row=None if found is None else found.row,
            sample_input=None if found is None else found.input,
            sample_output=None if found is None else found.output,
            weight=weight,
        )

    def _own_sample(self, rows_before: int, rows: int) -> int | None:
        """The row of this worker that the followed sample is, if it is one of its."""
        if self.sample is None:
            return None
        if self.recording.indices is not None:
            listed = self.recording.indices
            return listed.index(self.sample) if self.sample in listed else None
        own = self.sample - rows_before
        return own if 0 <= own < rows else None

    def _backward_s(self, end_ns: int) -> float | None:
        span = _span(self.watch.times.backward_begin, end_ns)
        return None if span is None else max(0.0, span - self.watch.times.watching / 1e9)

    def _loss_weight(self) -> float | None:
        told = self.recording.loss_weight
        return self.watch.loss_weight if told is None else told

    def _loss_facts(self) -> TensorFacts | None:
        loss, weight = self.recording.loss, self._loss_weight()
        if loss is None:
            return None
        mean = loss / weight if weight else loss
        return facts_of("loss", mean, values=self.values, is_number=True)

    def _flat_facts(self, name: str, tensors: Mapping[str, Tensor]) -> TensorFacts | None:
        """All tensors as one row of numbers, in the order of the parameters."""
        parts = [tensors[n].detach().reshape(-1) for n in self.parameters if n in tensors]
        parts = [part for part in parts if not part.is_complex()]
        if not parts:
            return None
        home, kind = parts[0].device, parts[0].dtype
        flat = torch.cat([part.to(home, kind) for part in parts])
        return facts_of(name, flat, values=self.values)

    def _data(self, like: Sequence[TensorFacts]) -> tuple[TensorFacts | None, int | None]:
        """The dataset as one tensor, and its length; neither where there is none to look at."""
        try:
            rows = None if self.dataset is None else len(self.dataset)
        except TypeError:
            rows = None
        if rows is None:
            return None, None
        tensors = getattr(self.dataset, "tensors", None)
        if isinstance(tensors, (tuple, list)) and tensors and isinstance(tensors[0], Tensor):
            return facts_of("inputs", tensors[0], values=self.values), rows
        if like and like[0].shape:
            shape = [rows, *like[0].shape[1:]]
            per_row = like[0].bytes // max(1, like[0].shape[0])
            kind = like[0].dtype
            return TensorFacts(
                name="inputs", shape=shape, dtype=kind, device="", bytes=per_row * rows
            ), rows
        return None, rows

    def _ask_in_sync(self) -> bool:
        try:
            self.model.check_in_sync()
        except ReplicaError:
            return False
        return True

    def _outcome(self, loss: float | None) -> Outcome:
        return Outcome(
            loss=loss,
            gradients=self.watch.averaged,
            applied=self.watch.applied,
            parameters=self.parameters if self.has_update else {},
        )

    def _check_replicas(self, calls: Sequence[Call]) -> Check:
        if self.reference is None:
            return not_computed(self.trouble)
        if self.watch.has_older_gradients:
            return not_computed(_OLDER)
        if self.watch.is_indirect:
            return not_computed(_INDIRECT)
        pieces = [_piece(call) for call in calls]
        targets = list(tree.tensors(self.recording.targets))
        # One loss for all replicas: the targets are those of the whole batch.
        pieces = [replace(piece, targets=targets) for piece in pieces]
        loss = self.recording.loss
        mean = None if loss is None else loss.item()
        check = self._compute(self._task(pieces, calls[0], 1.0), mean)
        if not check.is_same and len(calls) > 1 and any(call.is_random for call in calls):
            return not_computed(
                "the model draws random numbers, and replicas in threads share a generator"
            )
        return check

    def _check_ranks(self, group: Any, everyone: Sequence[Seen], factor: float) -> Check | None:
        """Rank 0's check; None on the others, which only hand over their rows."""
        device, size = self.model.device, group.size()
        older = comm.exchange(group, self.watch.has_older_gradients, device, "Recording a step")
        if any(older):
            return not_computed(_OLDER)
        pieces, reason = self._gather_pieces(group)
        reason = reason or comm.exchange(group, self.trouble, device, "Recording a step")[0]
        if reason:
            return self._check_sums(group, factor, reason)
        if group.rank() != 0:
            return None
        call = self.watch.calls[0] if self.watch.calls else None
        if not pieces or call is None:
            return not_computed("rank 0 had no rows in this step")
        losses = [seen.loss.first[0] for seen in everyone if seen.loss and seen.loss.first]
        shares = [1.0 if seen.loss_weight is None else seen.loss_weight for seen in everyone]
        mean = None
        if len(losses) == size and sum(shares):
            mean = sum(x * share for x, share in zip(losses, shares, strict=True)) / sum(shares)
        return self._compute(self._task(pieces, call, factor), mean)

    def _task(self, pieces: Sequence[Piece], call: Call, factor: float) -> Task:
        targets = self.recording.targets[0] if self.recording.targets else None
        return Task(
            pieces,
            (call.args, call.kwargs),
            factor,
            self.watch.autocast,
            self.loss_fn,
            targets,
        )

    def _compute(self, task: Task, loss: float | None) -> Check:
        assert self.reference is not None
        try:
            return check_step(self.reference, task, self._outcome(loss))
        except Exception as error:  # the step is done and right; only its check is missing
            return not_computed(f"computing it again failed: {_first_line(error)}")

    def _gather_pieces(self, group: Any) -> tuple[list[Piece], str]:
        """The rows of all workers, or why they are not sent; the same answer on every worker."""
        device = self.model.device
        try:
            told = [
                {
                    "inputs": call.inputs,
                    "outputs": call.outputs,
                    "grads": _piece(call).grads,
                    "random": call.random_state if call.is_random else [],
                    "targets": list(tree.tensors(targets)),
                }
                for call, targets in zip_longest(self.watch.calls, self.recording.targets)
                if call is not None
            ]
            data = wire.encode(told)
        except WireError as error:
            data, trouble = b"", f"its inputs cannot be sent: {error.what}"
        else:
            trouble = _INDIRECT if self.watch.is_indirect else ""
        sizes = comm.exchange(group, [len(data), trouble], device, "Recording a step: sizes")
        found = next((said for _, said in sizes if said), "")
        if sum(n for n, _ in sizes) > WHOLE_BATCH_LIMIT_BYTES:
            found = "the batch is too large to be computed again by one process"
        if found:
            return [], found
        longest = max(n for n, _ in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = comm.all_gather(group, padded.to(device), "Recording a step: rows")
        if group.rank() != 0:
            return [], ""
        pieces = []
        for part, (length, _) in zip(parts, sizes, strict=True):
            here = part.cpu().contiguous()
            for call in wire.decode(ctypes.string_at(here.data_ptr(), length)):
                pieces.append(
                    Piece(*(call[k] for k in ("inputs", "outputs", "grads", "random", "targets")))
                )
        return pieces, ""

    def _check_sums(self, group: Any, factor: float, reason: str) -> Check:
        """Average the workers' own gradients once more, each by one plain sum in double."""
        difference = scale = 0.0
        dtype = torch.float32
        for name, param in self.parameters.items():
            wide = torch.complex128 if param.is_complex() else torch.float64
            own = self.watch.local.get(name)
            total = torch.zeros_like(param, dtype=wide) if own is None else own.to(wide)
            comm.all_reduce(group, total, f"Recording a step: the gradient of {name!r}")
            total *= factor
            engines = self.watch.averaged.get(name)
            theirs = torch.zeros_like(total) if engines is None else engines.to(wide)
            if total.numel():
                difference = max(difference, (total - theirs).abs().max().item())
                scale = max(scale, total.abs().max().item())
            dtype = param.dtype
        return check_sums(difference, scale, dtype, reason)

    def _replica_sample(self, calls: Sequence[Call], rows: list[int], has_data: bool) -> Any:
        if self.sample is None:
            return None
        listed = self.recording.indices
        row = self.sample
        if listed is not None:
            if self.sample not in listed:
                return None
            row = listed.index(self.sample)
        found = find_sample(row, calls, values=self.values)
        if found is None:
            return None
        both = (found.input, found.output)
        return replicas.follow_sample(self.sample, row, rows, both, has_data and listed is not None)

    def _replica_weight(self, calls: Sequence[Call]) -> Any:
        if self.followed is None:
            return None
        return replicas.follow_weight(
            self.followed.name,
            self.followed.index,
            value=self.before,
            own=self._contributions(calls),
            total=self.followed.read(self.watch.averaged),
            new=self.followed.read(self.parameters),
            workers=len(calls),
            has_update=self.has_update,
            values=self.values,
        )

    def _contributions(self, calls: Sequence[Call]) -> list[float] | None:
        """What each replica adds to the followed weight's gradient, computed on a copy.

        The replicas share the parameters, so what each adds is never seen by itself.
        """
        from paceline.pipeline.reference import contribution

        is_random = any(call.is_random for call in calls)
        if self.reference is None or self.followed is None or is_random or len(calls) < 2:
            return None
        try:
            found = [
                contribution(self.reference, self._task([_piece(call)], call, 1.0))
                for call in calls
            ]
        except Exception:
            return None
        numbers = [self.followed.read(grads) for grads in found]
        return [0.0 if number is None else number for number in numbers]


def _factor(counts: Sequence[tuple[int, float | None]]) -> float:
    """What the engine multiplies the sum of gradients with, by each worker's rows and weight."""
    weights = [weight for rows, weight in counts if rows]  # without rows there is no backward
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(weights) or not weights:
        return 1 / len(counts)
    return 1 / sum(known) if sum(known) else 0.0


_INDIRECT = "the loss is computed from gradients, which are not recorded"
_OLDER = "gradients of an earlier backward pass were still there; call zero_grad() first"


def _piece(call: Call) -> Piece:
    return Piece(
        inputs=call.inputs,
        outputs=call.outputs,
        grads=[call.grads.get(number) for number in range(len(call.outputs))],
        random_state=call.random_state if call.is_random else [],
    )


def _inputs(calls: Sequence[Call], values: bool) -> list[TensorFacts]:
    """The inputs of the first forward pass, counted as long as all passes together are."""
    if not calls:
        return []
    facts = tree_facts("input", (calls[0].args, calls[0].kwargs), values=values)
    if len(calls) == 1 or not facts or not facts[0].shape:
        return facts
    rows = sum(rows_of(call) for call in calls)
    total = sum(bytes_of(call.inputs[:1]) for call in calls)
    return [replace(facts[0], shape=[rows, *facts[0].shape[1:]], bytes=total), *facts[1:]]


def _span(begin_ns: int, end_ns: int) -> float | None:
    return (end_ns - begin_ns) / 1e9 if begin_ns and end_ns >= begin_ns else None


def _flat(index: Sequence[int], tensor: Tensor) -> int:
    position = 0
    for i, extent in zip(index, tensor.shape, strict=True):
        position = position * extent + i
    return position


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")
