"""A recorded step of `DistributedDataParallel`: workers tell each other what they saw.

Every function here that takes the group is called by all workers at the same point, and decides
only by what all of them know.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import codec, tree
from paceline.errors import ReplicaError, WireError
from paceline.record import rank_stages, schema
from paceline.record.evidence import INDIRECT, OLDER, Evidence, piece_of, span
from paceline.record.facts import bytes_of, tree_facts
from paceline.record.follow import find_sample, rows_of
from paceline.record.inside import buckets_of
from paceline.record.rank_stages import Seen
from paceline.record.reference import Piece, check_sums, not_computed
from paceline.record.stages import Check, TensorFacts, Trace
from paceline.record.watch import Call

WHOLE_BATCH_LIMIT_BYTES = 256 * 2**20
"""Larger batches are not sent to rank 0 to be computed again; their gradients are summed again."""


def trace_ranks(evidence: Evidence, group: Any) -> Trace:
    """The trace of a step of all workers; the same on every one of them."""
    device = evidence.model.device
    is_equal = _ask_in_sync(evidence.model) if evidence.has_update and group.size() > 1 else None
    rows = sum(rows_of(call) for call in evidence.watch.calls)
    own = [rows, evidence.watch.loss_weight]
    counts = comm.exchange(group, own, device, "Recording a step: counts")
    rows_by_rank = [count for count, _ in counts]
    factor = _factor(counts)
    mine = _look(evidence, group.rank(), sum(rows_by_rank[: group.rank()]), factor * group.size())
    told = comm.exchange(group, asdict(mine), device, "Recording a step: facts")
    everyone: list[Seen] = [schema.read_as(Seen, value) for value in told]
    check = _check(evidence, group, everyone, factor) if evidence.wants_check else None
    said = comm.exchange(group, check and asdict(check), device, "Recording a step: check")
    check = None if said[0] is None else schema.read_as(Check, said[0])
    if check is not None:
        check = replace(check, is_equal_on_all=is_equal)
    data, dataset_rows = evidence.data_facts(everyone[0].inputs)
    buckets = evidence.watch.buckets or buckets_of(evidence.model)
    stages = rank_stages.build_stages(everyone, buckets, data, dataset_rows, is_equal)
    sample = weight = None
    if evidence.sample is not None:
        sample = rank_stages.follow_sample(evidence.sample, everyone, dataset_rows is not None)
    if evidence.followed is not None:
        flat = _flat(evidence.followed.index, evidence.parameters[evidence.followed.name])
        weight = rank_stages.follow_weight(
            evidence.followed.name,
            evidence.followed.index,
            flat,
            everyone,
            buckets,
            values=evidence.values,
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
        **evidence.heading(),
    )


def _look(evidence: Evidence, rank: int, rows_before: int, scale: float) -> Seen:
    """What this worker saw. Gradients are scaled so that the averages are their mean."""
    watch, times = evidence.watch, evidence.watch.times
    calls = watch.calls
    rows = sum(rows_of(call) for call in calls)
    sample = _own_sample(evidence, rows_before, rows)
    found = None if sample is None else find_sample(sample, calls, values=evidence.values)
    local = {name: grad * scale for name, grad in watch.local.items()}
    first = calls[0] if calls else None
    last = calls[-1] if calls else None
    weight = None
    if evidence.followed is not None:
        new = evidence.followed.read(evidence.parameters)
        own, averaged = evidence.followed.read(local), evidence.followed.read(watch.averaged)
        weight = [evidence.before, own, averaged, new]
    return Seen(
        rank=rank,
        device=str(evidence.model.device),
        rows=rows,
        indices=evidence.notes.indices,
        has_values=evidence.values,
        passes=len(calls),
        inputs=_inputs(calls, evidence.values),
        outputs=tree_facts("output", first.output, values=evidence.values) if first else [],
        loss=evidence.loss_facts(),
        loss_weight=evidence.loss_weight,
        gradients=evidence.flat_facts("own gradients", local),
        averaged=evidence.flat_facts("averaged gradients", watch.averaged),
        parameters=evidence.flat_facts("weights", evidence.parameters),
        has_update=evidence.has_update,
        batch_s=span(times.begin, first.arrive_ns if first else 0),
        forward_s=sum((call.end_ns - call.begin_ns) / 1e9 for call in calls),
        loss_s=span(last.leave_ns if last else 0, times.backward_begin),
        backward_s=evidence.backward_s(times.last_gradient),
        all_reduce_s=span(times.last_gradient, times.backward_end),
        update_s=span(times.update_begin, times.update_end),
        step_s=evidence.step_s,
        sample_row=None if found is None else found.row,
        sample_input=None if found is None else found.input,
        sample_output=None if found is None else found.output,
        weight=weight,
    )


def _own_sample(evidence: Evidence, rows_before: int, rows: int) -> int | None:
    """The row of this worker that the followed sample is, if it is one of its."""
    if evidence.sample is None:
        return None
    if evidence.notes.indices is not None:
        listed = evidence.notes.indices
        return listed.index(evidence.sample) if evidence.sample in listed else None
    own = evidence.sample - rows_before
    return own if 0 <= own < rows else None


def _ask_in_sync(model: Any) -> bool:
    try:
        model.check_in_sync()
    except ReplicaError:
        return False
    return True


def _check(evidence: Evidence, group: Any, everyone: Sequence[Seen], factor: float) -> Check | None:
    """Rank 0's check; None on the others, which only hand over their rows."""
    device = evidence.model.device
    older = comm.exchange(group, evidence.watch.has_older_gradients, device, "Recording a step")
    if any(older):
        return not_computed(OLDER)
    pieces, reason = _gather_pieces(evidence, group)
    if reason:
        return _sum_again(evidence, group, factor, reason)
    if group.rank() != 0:
        return None
    call = evidence.watch.calls[0] if evidence.watch.calls else None
    if not pieces or call is None:
        return not_computed("rank 0 had no rows in this step")
    return evidence.compute_check(evidence.task(pieces, call, factor), _mean_loss(everyone))


def _mean_loss(everyone: Sequence[Seen]) -> float | None:
    """The loss of all rows, where every worker has said its own."""
    losses = [seen.loss.first[0] for seen in everyone if seen.loss and seen.loss.first]
    shares = [1.0 if seen.loss_weight is None else seen.loss_weight for seen in everyone]
    if len(losses) < len(everyone) or not sum(shares):
        return None
    return sum(x * share for x, share in zip(losses, shares, strict=True)) / sum(shares)


def _gather_pieces(evidence: Evidence, group: Any) -> tuple[list[Piece], str]:
    """The rows of all workers, or why they are not sent; the same answer on every worker."""
    device = evidence.model.device
    try:
        told = [
            {
                "inputs": call.inputs,
                "outputs": call.outputs,
                "grads": piece_of(call).grads,
                "random": call.random_state if call.is_random else [],
                "targets": list(tree.tensors(targets)),
            }
            for call, targets in zip_longest(evidence.watch.calls, evidence.notes.targets)
            if call is not None
        ]
        data = codec.encode(told)
    except WireError as error:
        data, trouble = b"", f"its inputs cannot be sent: {error.what}"
    else:
        trouble = INDIRECT if evidence.watch.is_indirect else evidence.trouble
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
        for call in codec.decode(ctypes.string_at(here.data_ptr(), length)):
            pieces.append(
                Piece(*(call[k] for k in ("inputs", "outputs", "grads", "random", "targets")))
            )
    return pieces, ""


def _sum_again(evidence: Evidence, group: Any, factor: float, reason: str) -> Check:
    """Average the workers' own gradients once more, each by one plain sum in double."""
    difference = scale = 0.0
    dtype = torch.float32
    for name, param in evidence.parameters.items():
        wide = torch.complex128 if param.is_complex() else torch.float64
        own = evidence.watch.local.get(name)
        total = torch.zeros_like(param, dtype=wide) if own is None else own.to(wide)
        comm.all_reduce(group, total, f"Recording a step: the gradient of {name!r}")
        total *= factor
        engines = evidence.watch.averaged.get(name)
        theirs = torch.zeros_like(total) if engines is None else engines.to(wide)
        if total.numel():
            difference = max(difference, (total - theirs).abs().max().item())
            scale = max(scale, total.abs().max().item())
        dtype = param.dtype
    return check_sums(difference, scale, dtype, reason)


def _factor(counts: Sequence[tuple[int, float | None]]) -> float:
    """What the engine multiplies the sum of gradients with, by each worker's rows and weight."""
    weights = [weight for rows, weight in counts if rows]  # without rows there is no backward
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(weights) or not weights:
        return 1 / len(counts)
    return 1 / sum(known) if sum(known) else 0.0


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


def _flat(index: Sequence[int], tensor: Tensor) -> int:
    position = 0
    for i, extent in zip(index, tensor.shape, strict=True):
        position = position * extent + i
    return position
