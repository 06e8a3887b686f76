"""`record_step`: one step of a training, recorded while it runs.

    with record_step(model, optimizer, step=run.step, folder="runs/digits") as recording:
        loss = loss_fn(model(x), y)
        recording.note_loss(loss)
        loss.backward()
        optimizer.step()
    print(recording.trace)

The step is the caller's, on the real engine; see `hooks`. When the block ends, workers exchange
what they recorded, rank 0 computes the step again in one process, and writes the file. All workers
call it in the same step, and every branch to a collective depends only on what all of them know.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.ddp import DistributedDataParallel, bare
from paceline.dp import DataParallel
from paceline.errors import ReplicaError, UsageError, WireError, check_whole, summarize
from paceline.files import RunFolder, decode, encode
from paceline.group import exchange, find_tensors, gather_bytes
from paceline.record import facts, stages
from paceline.record.engines import (
    Picture,
    RankCounts,
    describe_rank,
    describe_replicas,
    loss_factor,
    merge_stages,
)
from paceline.record.hooks import BatchPart, ForwardPass, StepRecording, dense
from paceline.record.reference import Reference, not_computed
from paceline.record.stages import Check, EngineName, Model, TensorFacts, Trace
from paceline.telemetry import register_recorder

WHOLE_BATCH_LIMIT_BYTES = 256 * 2**20
"""Larger batches are not sent to rank 0 to be computed again."""
INDIRECT = "the loss is computed from gradients, which are not recorded"
OLDER = "gradients of an earlier backward pass were still there; call zero_grad() first"
SHARED_GENERATOR = "the model draws random numbers, and replicas in threads share a generator"


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
) -> Iterator[StepRecording]:
    """Record the step inside the block; on `DistributedDataParallel`, in all workers at once.

    `model` is a `DataParallel` or a `DistributedDataParallel` of Paceline's. With `folder` the file
    `pipeline/step{n}.json` is written there. `sample` is a row of the dataset, `weight` has the
    form `"fc.weight[0, 3]"`. Without `values` shapes and statistics are kept, but no values of
    data, weights or outputs. With `loss_fn(output, targets)`, a mean over rows, the check compares
    the loss as well. `check=False` saves the copy of the model and the second computation.
    """
    if not isinstance(model, (DataParallel, DistributedDataParallel)):
        raise UsageError(
            f"record_step() got a model of the type {type(model).__name__}.",
            advice="Wrap the model in paceline.DataParallel or DistributedDataParallel first.",
        )
    register_recorder()
    check_whole("step", step)
    target = None if folder is None else RunFolder(folder)
    if target is not None:
        target.check_name()  # on every worker: only rank 0 writes, but all must raise
    rec = StepRecording(
        model=model,
        optimizer=optimizer,
        step=step,
        dataset=dataset,
        sample=sample,
        weight_text=weight,
        values=values,
        loss_fn=loss_fn,
        keeps_tensors=check,
    )
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    is_main = group is None or group.rank() == 0
    reference = _copy(model, optimizer) if check and is_main else ""
    try:
        with rec:
            yield rec
        if not rec.calls and group is None:
            raise UsageError(
                "The model was not called in the recorded step.",
                advice="Put forward, backward and the optimizer's step into the block.",
            )
        with torch.no_grad():
            rec.trace = (_trace_replicas if group is None else _trace_ranks)(rec, reference)
    finally:
        rec.free_tensors()
    if target is not None and is_main:
        target.create()
        stages.write(rec.trace, target.pipeline_of(step))


def _copy(model: Any, optimizer: Optimizer | None) -> Reference | str:
    """The reference that the step is compared with, or why there is none."""
    try:
        return Reference(model.module, optimizer)
    except Exception as error:  # some modules cannot be copied; the step must run anyway
        return f"the model cannot be copied: {summarize(error)}"


def _trace_replicas(rec: StepRecording, reference: Reference | str) -> Trace:
    """The trace of a step of one process with several replicas."""
    replicas = getattr(rec.model._engine, "_replicas", [])  # none where there is one device
    order = {replica.module: number for number, replica in enumerate(replicas)}

    def number_of(call: ForwardPass) -> int:
        return order.get(call.module, 0)

    rec.calls.sort(key=lambda call: (call.turn, number_of(call)))
    first = [call for call in rec.calls if call.turn == 0]  # these are drawn; all are checked
    places = [rec.model.device_ids[number_of(call)] for call in first]
    devices = [str(torch.device(p) if isinstance(p, int) else p) for p in places]
    if len(rec.targets) == 1:  # one loss for all replicas: targets of the whole batch
        for call in rec.calls:
            call.targets = list(find_tensors(rec.targets))
    is_random = len(rec.calls) > 1 and any(call.random_state for call in rec.calls)
    contributions = None
    reason = OLDER if rec.has_older_gradients else INDIRECT if rec.is_indirect else ""
    check = not_computed(reason or str(reference)) if rec.keeps_tensors else None
    if isinstance(reference, Reference):
        if not reason:
            check = reference.check(rec, rec.calls, 1.0, _number(rec.loss))
            if is_random and not check.is_same:
                check = not_computed(SHARED_GENERATOR)
        if len(first) > 1 and not is_random:
            contributions = _contributions(reference, rec, first)
    picture = describe_replicas(rec, first, devices, contributions)
    return _trace(rec, "DataParallel", devices, sum(call.rows for call in first), picture, check)


def _contributions(
    reference: Reference, rec: StepRecording, calls: Sequence[BatchPart]
) -> list[tuple[list[TensorFacts], float]] | None:
    """Each replica's gradients, and its part of the followed weight's gradient.

    Replicas share the parameters, so in the step itself only the sums are visible.
    """
    found = []
    try:
        for call in calls:
            own = {n: dense(grad) for n, grad in reference.gradients_of(rec, call).items()}
            gradients = facts.flat_facts("own gradients", own.values(), values=rec.values)
            found.append((gradients, facts.read_weight(rec.weight, own) or 0.0))
    except Exception:  # without them the picture only shows less
        return None
    return found


def _trace_ranks(rec: StepRecording, reference: Reference | str) -> Trace:
    """The trace of a step of all workers; the same on each."""
    rec.record_buckets()
    group, device = rec.model.process_group, rec.model.device
    is_equal = None
    if rec.has_update and group.size() > 1:
        try:
            rec.model.check_in_sync()
            is_equal = True
        except ReplicaError:
            is_equal = False
    counts = RankCounts(
        rows=[call.rows for call in rec.calls],
        indices=rec.indices,
        engine_weight=rec.engine_weight,
        loss_weight=rec.weighted_items if rec.loss_weight is None else rec.loss_weight,
        loss=_number(rec.loss),
        has_update=rec.has_update,
        has_older_gradients=rec.has_older_gradients,
        weight=[rec.weight_before]
        + [facts.read_weight(rec.weight, each) for each in (rec.local, rec.averaged, rec.trained)],
    )
    gathered = exchange(group, asdict(counts), device, "Recording a step: counts")
    ranks = [RankCounts(**each) for each in gathered]
    check = _check_ranks(rec, reference, ranks) if rec.keeps_tensors else None
    picture = describe_rank(rec, ranks, group.rank(), is_equal)
    rows = sum(sum(each.rows) for each in ranks)
    own = _trace(rec, "DistributedDataParallel", [str(device)], rows, picture, check)
    gathered = exchange(group, stages.to_json(own), device, "Recording a step: stages")
    traces = [stages.from_json(each) for each in gathered]
    check = traces[0].check
    return replace(
        own,
        workers=group.size(),
        devices=[each.devices[0] for each in traces],
        seconds=max(each.seconds for each in traces),
        stages=merge_stages([each.stages for each in traces]),
        sample=next((each.sample for each in traces if each.sample is not None), None),
        check=check and replace(check, is_equal_on_all=is_equal),
    )


def _check_ranks(
    rec: StepRecording, reference: Reference | str, ranks: Sequence[RankCounts]
) -> Check | None:
    """Rank 0's check; the other ranks only send their rows."""
    if any(each.has_older_gradients for each in ranks):
        return not_computed(OLDER)
    pieces, reason = _gather_pieces(
        rec, INDIRECT if rec.is_indirect else reference if isinstance(reference, str) else ""
    )
    if reason:
        return not_computed(reason)
    if isinstance(reference, str):
        return None
    if not rec.calls:
        return not_computed("rank 0 had no rows in this step")
    losses = [each.loss for each in ranks if each.loss is not None]
    total = sum(1.0 if each.loss_weight is None else each.loss_weight for each in ranks)
    loss = sum(losses) / total if len(losses) == len(ranks) and total else None
    return reference.check(rec, pieces, loss_factor(ranks), loss)


def _gather_pieces(rec: StepRecording, trouble: str) -> tuple[list[BatchPart], str]:
    """The rows of all workers, or why they are not sent; the same result on every worker."""
    group, device = rec.model.process_group, rec.model.device
    for call, targets in zip(rec.calls, rec.targets, strict=False):
        call.targets = list(find_tensors(targets))
    names = [field.name for field in fields(BatchPart)]
    try:
        data = encode([{n: getattr(call, n) for n in names} for call in rec.calls])
    except WireError as error:
        data, trouble = b"", f"its inputs cannot be sent: {error.what}"
    # A rank that cannot send takes part in the exchange all the same: its reason travels as data,
    # so all ranks decide alike, and none waits for one that has given up.
    gathered = exchange(group, [len(data), trouble], device, "Recording a step: sizes")
    if sum(size for size, _ in gathered) > WHOLE_BATCH_LIMIT_BYTES:
        return [], "the batch is too large to be computed again by one process"
    if any(reason for _, reason in gathered):
        return [], next(reason for _, reason in gathered if reason)
    sent = gather_bytes(group, data, device, "Recording a step: rows")
    if group.rank() != 0:
        return [], ""
    return [BatchPart(**piece) for each in sent for piece in decode(each)], ""


def _number(tensor: Tensor | None) -> float | None:
    return None if tensor is None else tensor.item()


def _trace(
    rec: StepRecording,
    engine: EngineName,
    devices: list[str],
    rows: int,
    picture: Picture,
    check: Check | None,
) -> Trace:
    whole = bare(rec.model)
    parameters = list(whole.parameters())
    stages, sample, weight = picture
    return Trace(
        engine=engine,
        step=rec.step,
        created=time.time(),
        workers=len(devices),
        devices=devices,
        model=Model(
            name=type(whole).__name__,
            parameters=sum(p.numel() for p in parameters),
            bytes=facts.tensor_bytes(parameters),
        ),
        batch_rows=rows,
        dataset_rows=facts.dataset_rows(rec.dataset),
        has_values=rec.values,
        seconds=rec.seconds,
        stages=stages,
        sample=sample,
        weight=weight,
        check=check,
    )
