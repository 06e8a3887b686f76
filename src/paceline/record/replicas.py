"""A recorded step of `DataParallel`: everything happened in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby

from paceline.comm import tree
from paceline.ddp.wrapper import bare
from paceline.record import replica_stages
from paceline.record.evidence import INDIRECT, OLDER, Evidence, piece_of, span
from paceline.record.facts import bytes_of
from paceline.record.follow import find_sample
from paceline.record.reference import contribution, not_computed
from paceline.record.stages import Check, Sample, Trace, Weight
from paceline.record.watch import Call, Memory


def trace_replicas(evidence: Evidence) -> Trace:
    """The trace of a step of one process with several replicas."""
    watch, model = evidence.watch, evidence.model
    turns = [
        replica_stages.in_order(list(calls), model.device_ids)
        for _, calls in groupby(sorted(watch.calls, key=_turn), _turn)
    ]
    calls = turns[0]  # what is drawn; the check looks at all of them
    own = {Memory.of(p) for p in bare(model).parameters()}
    seen = replica_stages.see_replicas(
        calls,
        watch.whole,
        model.device_ids,
        own,
        bytes_of(list(bare(model).parameters())),
        values=evidence.values,
    )
    check = _check(evidence, list(chain(*turns))) if evidence.wants_check else None
    data, dataset_rows = evidence.data_facts(seen.batch or seen.inputs[0])
    times = watch.times
    rest = replica_stages.Rest(
        loss=evidence.loss_facts(),
        gradients=evidence.flat_facts("gradients", watch.averaged),
        parameters=evidence.flat_facts("weights", evidence.parameters),
        home=seen.devices[0],
        batch_s=span(times.begin, watch.whole.arrive_ns if watch.whole else 0),
        loss_s=span(watch.whole.leave_ns if watch.whole else 0, times.backward_begin),
        backward_s=evidence.backward_s(times.backward_end),
        update_s=span(times.update_begin, times.update_end),
        has_update=evidence.has_update,
    )
    return Trace(
        engine="DataParallel",
        workers=len(calls),
        devices=seen.devices,
        batch_rows=sum(seen.rows),
        dataset_rows=dataset_rows,
        seconds=evidence.step_s,
        stages=replica_stages.build_stages(seen, rest, data, dataset_rows),
        sample=_follow_sample(evidence, calls, seen.rows, dataset_rows is not None),
        weight=_follow_weight(evidence, calls),
        check=check,
        **evidence.heading(),
    )


def _turn(call: Call) -> int:
    return call.turn


def _check(evidence: Evidence, calls: Sequence[Call]) -> Check:
    if evidence.reference is None:
        return not_computed(evidence.trouble)
    if evidence.watch.has_older_gradients:
        return not_computed(OLDER)
    if evidence.watch.is_indirect:
        return not_computed(INDIRECT)
    pieces = [piece_of(call) for call in calls]
    if len(evidence.notes.targets) == 1:
        # One loss for all replicas: the targets are those of the whole batch.
        targets = list(tree.tensors(evidence.notes.targets))
        pieces = [replace(piece, targets=targets) for piece in pieces]
    loss = evidence.notes.loss
    mean = None if loss is None else loss.item()
    check = evidence.compute_check(evidence.task(pieces, calls[0], 1.0), mean)
    if not check.is_same and len(calls) > 1 and any(call.is_random for call in calls):
        return not_computed(
            "the model draws random numbers, and replicas in threads share a generator"
        )
    return check


def _follow_sample(
    evidence: Evidence, calls: Sequence[Call], rows: list[int], has_data: bool
) -> Sample | None:
    if evidence.sample is None:
        return None
    listed = evidence.notes.indices
    row = evidence.sample
    if listed is not None:
        if evidence.sample not in listed:
            return None
        row = listed.index(evidence.sample)
    found = find_sample(row, calls, values=evidence.values)
    if found is None:
        return None
    both = (found.input, found.output)
    return replica_stages.follow_sample(
        evidence.sample, row, rows, both, has_data and listed is not None
    )


def _follow_weight(evidence: Evidence, calls: Sequence[Call]) -> Weight | None:
    if evidence.followed is None:
        return None
    return replica_stages.follow_weight(
        evidence.followed.name,
        evidence.followed.index,
        value=evidence.before,
        own=_contributions(evidence, calls),
        total=evidence.followed.read(evidence.watch.averaged),
        new=evidence.followed.read(evidence.parameters),
        workers=len(calls),
        has_update=evidence.has_update,
        values=evidence.values,
    )


def _contributions(evidence: Evidence, calls: Sequence[Call]) -> list[float] | None:
    """What each replica adds to the followed weight's gradient, computed on a copy.

    The replicas share the parameters, so what each adds is never seen by itself.
    """
    is_random = any(call.is_random for call in calls)
    if evidence.reference is None or evidence.followed is None or is_random or len(calls) < 2:
        return None
    try:
        found = [
            contribution(evidence.reference, evidence.task([piece_of(call)], call, 1.0))
            for call in calls
        ]
    except Exception:
        return None
    numbers = [evidence.followed.read(grads) for grads in found]
    return [0.0 if number is None else number for number in numbers]
