"""`record_step`: one step of a training, recorded while it happens.

    with record_step(model, optimizer, step=run.step, folder="runs/digits") as recording:
        loss = loss_fn(model(x), y)
        recording.note_loss(loss)
        loss.backward()
        optimizer.step()
    print(recording.trace)

The step is the caller's own, on the real engine; see `hooks`. When the block ends, workers tell
each other what they saw, rank 0 computes the step once more by itself, and writes the file. All of
them call it, in the same step, and decide only by what all of them know.
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

from paceline import comm
from paceline.comm import codec, tree
from paceline.comm.safetensors import memory_of
from paceline.ddp import DistributedDataParallel
from paceline.ddp.wrapper import bare
from paceline.dp import DataParallel
from paceline.errors import ReplicaError, UsageError, WireError, check_whole
from paceline.observe.run_folder import RunFolder
from paceline.record import schema
from paceline.record.engines import (
    Picture,
    RankCounts,
    describe_rank,
    describe_replicas,
    loss_factor,
    merge_stages,
)
from paceline.record.facts import Piece, StepRecording, bytes_of, dataset_rows, find_weight
from paceline.record.hooks import StepHooks, trained_parameters
from paceline.record.reference import Reference, check_sums, first_line, not_computed
from paceline.record.stages import Check, EngineName, Model, Trace

WHOLE_BATCH_LIMIT_BYTES = 256 * 2**20
"""Larger batches are not sent to rank 0 to be computed again; their gradients are summed again."""
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

    `model` is wrapped by one of our engines. With `folder` the file `pipeline/step{n}.json` is
    written there. `sample` is a row of the dataset, `weight` is written like `"fc.weight[0, 3]"`.
    Without `values` shapes and statistics are kept, but no value of data, weights or outputs.
    `loss_fn(output, targets)`, a mean over rows, makes the check compute the loss as well.
    `check=False` spares the copy of the model, and the second computation.
    """
    if not isinstance(model, (DataParallel, DistributedDataParallel)):
        raise UsageError(
            f"record_step() got a model of the type {type(model).__name__}.",
            advice="Wrap the model in paceline.DataParallel or DistributedDataParallel first.",
        )
    check_whole("step", step)
    target = None if folder is None else RunFolder(folder)
    if target is not None:
        target.check_name()  # a name is refused by every worker alike
    trained = trained_parameters(model)
    followed = find_weight(weight, trained)
    recording = StepRecording(
        step=step,
        dataset=dataset,
        values=values,
        sample=sample,
        weight=followed,
        weight_before=None if followed is None else followed.read(trained),
        loss_fn=loss_fn,
        check=check,
    )
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    is_main = group is None or group.rank() == 0
    copied = _copy(model, optimizer, is_main) if check else None
    hooks = StepHooks(model, optimizer, recording)
    with hooks:
        yield recording
    if not hooks.calls and group is None:
        raise UsageError(
            "The model was not called in the recorded step.",
            advice="Put forward, backward and the optimizer's step into the block.",
        )
    with torch.no_grad():
        trace = _trace_replicas(hooks, copied) if group is None else _trace_ranks(hooks, copied)
    recording.trace = trace
    if target is not None and is_main:
        target.create()
        schema.write(trace, target.pipeline_of(step))


Copied = Reference | str | None
"""What the step is compared with, or why it cannot be; None where nobody wants to compare."""


def _copy(model: Any, optimizer: Optimizer | None, is_main: bool) -> Copied:
    if not is_main:
        return ""
    try:
        return Reference(model.module, optimizer)
    except Exception as error:  # some modules cannot be copied; the step matters more
        return f"the model cannot be copied: {first_line(error)}"


def _trace_replicas(hooks: StepHooks, copied: Copied) -> Trace:
    """The trace of a step of one process with several replicas."""
    notes = hooks.notes
    calls = sorted(hooks.calls, key=lambda call: (call.turn, call.replica))
    first = [call for call in calls if call.turn == 0]  # what is drawn; all are checked
    places = [hooks.model.device_ids[call.replica] for call in first]
    devices = [str(torch.device(p) if isinstance(p, int) else p) for p in places]
    if len(notes.targets) == 1:  # one loss for all replicas: targets of the whole batch
        for call in calls:
            call.targets = list(tree.tensors(notes.targets))
    loss = None if notes.loss is None else notes.loss.item()
    is_random = len(calls) > 1 and any(call.random_state for call in calls)
    check = contributions = None
    if isinstance(copied, str):
        check = not_computed(copied)
    elif copied is not None:
        if hooks.has_older_gradients or hooks.is_indirect:
            check = not_computed(OLDER if hooks.has_older_gradients else INDIRECT)
        else:
            check = copied.check(hooks, calls, 1.0, loss)
            if is_random and not check.is_same:
                check = not_computed(SHARED_GENERATOR)
        if len(first) > 1 and not is_random:
            contributions = _contributions(copied, hooks, first)
    picture = describe_replicas(hooks, first, devices, contributions)
    rows = sum(call.rows for call in first)
    return _trace(hooks, "DataParallel", devices, rows, picture, check)


def _contributions(
    copied: Reference, hooks: StepHooks, calls: Sequence[Piece]
) -> list[float] | None:
    """What each replica adds to the followed weight's gradient.

    They share the parameters, so it is never seen by itself.
    """
    try:
        found = [hooks.notes.read_weight(copied.gradients_of(hooks, call)) for call in calls]
    except Exception:  # the picture has less to show
        return None
    return [0.0 if number is None else number for number in found]


def _trace_ranks(hooks: StepHooks, copied: Copied) -> Trace:
    """The trace of a step of all workers; the same on every one of them."""
    hooks.look_at_buckets()
    group, device = hooks.model.process_group, hooks.model.device
    is_equal = None
    if hooks.has_update and group.size() > 1:
        try:
            hooks.model.check_in_sync()
            is_equal = True
        except ReplicaError:
            is_equal = False
    told = comm.exchange(group, asdict(_count(hooks)), device, "Recording a step: counts")
    ranks = [RankCounts(**each) for each in told]
    check = None if copied is None else _check_ranks(hooks, copied, ranks)
    picture = describe_rank(hooks, ranks, group.rank(), is_equal)
    rows = sum(each.rows for each in ranks)
    own = _trace(hooks, "DistributedDataParallel", [str(device)], rows, picture, check)
    told = comm.exchange(group, schema.to_json(own), device, "Recording a step: stages")
    traces = [schema.from_json(each) for each in told]
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


def _count(hooks: StepHooks) -> RankCounts:
    notes = hooks.notes
    return RankCounts(
        rows=sum(call.rows for call in hooks.calls),
        passes=len(hooks.calls),
        indices=notes.indices,
        engine_weight=hooks.loss_weight,
        loss_weight=hooks.loss_weight if notes.loss_weight is None else notes.loss_weight,
        loss=None if notes.loss is None else notes.loss.item(),
        has_update=hooks.has_update,
        has_older_gradients=hooks.has_older_gradients,
        weight=[notes.weight_before]
        + [notes.read_weight(each) for each in (hooks.local, hooks.averaged, hooks.trained)],
    )


def _check_ranks(
    hooks: StepHooks, copied: Reference | str, ranks: Sequence[RankCounts]
) -> Check | None:
    """Rank 0's check; the others only hand over their rows."""
    if any(each.has_older_gradients for each in ranks):
        return not_computed(OLDER)
    factor = loss_factor(ranks)
    trouble = INDIRECT if hooks.is_indirect else copied if isinstance(copied, str) else ""
    pieces, reason = _gather_pieces(hooks, trouble)
    if reason:
        return check_sums(_sums_again(hooks, factor), hooks.trained.values(), reason)
    if isinstance(copied, str):
        return None
    if not pieces or not hooks.calls:
        return not_computed("rank 0 had no rows in this step")
    losses = [each.loss for each in ranks if each.loss is not None]
    total = sum(1.0 if each.loss_weight is None else each.loss_weight for each in ranks)
    loss = sum(losses) / total if len(losses) == len(ranks) and total else None
    return copied.check(hooks, pieces, factor, loss)


def _gather_pieces(hooks: StepHooks, trouble: str) -> tuple[list[Piece], str]:
    """The rows of all workers, or why they are not sent; the same answer on every worker."""
    group, device = hooks.model.process_group, hooks.model.device
    for call, targets in zip(hooks.calls, hooks.notes.targets, strict=False):
        call.targets = list(tree.tensors(targets))
    names = [field.name for field in fields(Piece)]
    try:
        data = codec.encode([{n: getattr(call, n) for n in names} for call in hooks.calls])
    except WireError as error:
        data, trouble = b"", f"its inputs cannot be sent: {error.what}"
    told = comm.exchange(group, [len(data), trouble], device, "Recording a step: sizes")
    sizes = [size for size, _ in told]
    if sum(sizes) > WHOLE_BATCH_LIMIT_BYTES:
        return [], "the batch is too large to be computed again by one process"
    if any(said for _, said in told):
        return [], next(said for _, said in told if said)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = comm.all_gather(group, padded.to(device), "Recording a step: rows")
    if group.rank() != 0:
        return [], ""
    here = [part.cpu() for part in parts]  # must outlive the views of its memory
    sent = [bytes(memory_of(p)[:size]) for p, size in zip(here, sizes, strict=True)]
    return [Piece(**piece) for each in sent for piece in codec.decode(each)], ""


def _sums_again(hooks: StepHooks, factor: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The workers' own gradients, averaged once more by plain sums in double, and the engine's."""
    for name, param in hooks.trained.items():
        wide = torch.complex128 if param.is_complex() else torch.float64
        own = hooks.local.get(name)
        total = torch.zeros_like(param, dtype=wide) if own is None else own.to(wide)
        what = f"Recording a step: the gradient of {name!r}"
        comm.all_reduce(hooks.model.process_group, total, what)
        engines = hooks.averaged.get(name)
        yield total * factor, torch.zeros_like(total) if engines is None else engines


def _trace(
    hooks: StepHooks,
    engine: EngineName,
    devices: list[str],
    rows: int,
    picture: Picture,
    check: Check | None,
) -> Trace:
    whole = bare(hooks.model)
    parameters = list(whole.parameters())
    stages, sample, weight = picture
    return Trace(
        engine=engine,
        step=hooks.notes.step,
        created=time.time(),
        workers=len(devices),
        devices=devices,
        model=Model(
            name=type(whole).__name__,
            parameters=sum(p.numel() for p in parameters),
            bytes=bytes_of(parameters),
        ),
        batch_rows=rows,
        dataset_rows=dataset_rows(hooks.notes.dataset),
        has_values=hooks.notes.values,
        seconds=hooks.seconds,
        stages=stages,
        sample=sample,
        weight=weight,
        check=check,
    )
