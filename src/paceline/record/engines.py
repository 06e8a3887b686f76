"""The stages of a step, from what was observed: who holds what, what moves, and what is said of it.

    DistributedDataParallel   data sampler batch forward loss backward buckets all-reduce update
    DataParallel              data batch split copy forward gather loss backward update

An engine gives the parts that workers have in a stage, and a sentence for it; the order of the
sentences is that of the stages. So a new stage is a new part and a new sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.ddp.wrapper import bare
from paceline.observe.units import bytes_text, count_text, list_text, shape_text
from paceline.record.facts import (
    ForwardPass,
    StepRecording,
    bytes_of,
    dataset_facts,
    dataset_rows,
    facts_of,
    flat_facts,
    row_values,
    tree_facts,
)
from paceline.record.hooks import StepHooks, memories
from paceline.record.stages import Part, Sample, SampleStop, Stage, TensorFacts, Weight, WeightStop

Picture = tuple[list[Stage], Sample | None, Weight | None]
"""The stages, and the followed sample and weight on their way through them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """What every rank must know of the others to describe its own part of the step."""

    rows: int
    passes: int
    indices: list[int] | None
    engine_weight: float | None
    """How many items its losses are sums over, as the engine was told."""
    loss_weight: float | None
    """The same, as the caller says."""
    loss: float | None
    """The sum of its losses."""
    has_update: bool
    has_older_gradients: bool
    weight: list[float | None]
    """The followed weight's value, own gradient, averaged gradient and new value."""


def describe_rank(
    hooks: StepHooks, ranks: Sequence[RankCounts], rank: int, is_equal: bool | None
) -> Picture:
    """The stages with this rank's parts, the followed sample if it has it, and the weight."""
    calls, notes, values, own = hooks.calls, hooks.notes, hooks.notes.values, ranks[rank]
    # Own gradients are multiplied so that the averages are their mean.
    scale = loss_factor(ranks) * len(ranks)
    local = {name: hooks.local[name] * scale for name in hooks.trained if name in hooks.local}
    inputs = _all_inputs(calls, values)
    held = {
        "batch": inputs,
        "forward": tree_facts("output", calls[0].output, values=values) if calls else [],
        "loss": _loss_facts(notes, own.loss_weight),
        "backward": flat_facts("own gradients", local, values=values),
        "all-reduce": flat_facts("averaged gradients", hooks.averaged, values=values),
    }
    if all(each.indices is not None for each in ranks):
        numbers = facts_of("row numbers", torch.tensor(own.indices).long(), values=values)
        held["sampler"] = [replace(numbers, stats=None)]
    if all(each.has_update for each in ranks):
        held["update"] = flat_facts("weights", hooks.trained, values=values)
    seconds = {**hooks.seconds_by_stage, "forward": sum(call.seconds for call in calls)}
    payload = sum(bucket.tensors[0].bytes for bucket in hooks.buckets)
    parts = {
        name: [
            Part(
                title=f"worker {rank}",
                worker=rank,
                device=str(hooks.model.device),
                tensors=tensors,
                seconds=seconds.get(name),
                text=f"sends {bytes_text(payload)}" if payload and name == "all-reduce" else "",
            )
        ]
        for name, tensors in held.items()
    }
    stages = _stages(
        notes,
        _rank_sentences(ranks, hooks, dataset_rows(notes.dataset), is_equal),
        {**parts, "buckets": hooks.buckets},
        moved={"batch": sum(tensor.bytes for tensor in inputs), "all-reduce": payload},
        seconds=seconds,
    )
    before, gradients, averaged, new = zip(*(each.weight for each in ranks), strict=True)
    weight = _follow_weight(
        notes,
        stages,
        ("forward", "value", before, True),
        ("backward", "gradient", [None if g is None else g * scale for g in gradients], False),
        ("all-reduce", "averaged gradient", averaged, True),
        ("update", "new value", new, True),
    )
    if weight is not None and notes.weight is not None and weight.name in hooks.bucket_starts:
        bucket, start = hooks.bucket_starts[weight.name]
        position = start + notes.weight.position_in(hooks.trained[weight.name])
        weight = replace(weight, bucket=bucket, position=position)
    rows_before = sum(each.rows for each in ranks[:rank])
    return stages, _follow_sample(notes, stages, calls, rank, rows_before), weight


def _rank_sentences(
    ranks: Sequence[RankCounts], hooks: StepHooks, dataset_rows: int | None, is_equal: bool | None
) -> dict[str, str]:
    rows = count_text(sum(each.rows for each in ranks), "row")
    of = "" if dataset_rows is None else f" of {dataset_rows:,}"
    passes = max(each.passes for each in ranks)
    in_turns = f", in {passes} forward passes" if passes > 1 else ""
    if len(ranks) == 1:
        return {
            "sampler": f"Picks {rows}{of} for this step.",
            "batch": f"The worker loads the rows{in_turns}.",
            "forward": "The model is run on the rows.",
            "loss": "How wrong the predictions are, as one number.",
            "backward": "How should each weight change? These are the gradients.",
            "buckets": "A single worker has nobody to send them to.",
            "all-reduce": "With one worker there is nothing to average.",
            "update": "The optimizer changes the weights.",
        }
    taken = [index for each in ranks for index in set(each.indices or [])]
    is_once = len(taken) == len(set(taken))
    once = "no row goes to two workers" if is_once else "some rows go to several workers"
    is_weighted = all(each.loss_weight is not None for each in ranks)
    packed = count_text(len(hooks.bucket_starts), "parameter")
    messages = "one message" if len(hooks.buckets) == 1 else f"{len(hooks.buckets)} messages"
    return {
        "sampler": f"Picks {rows}{of} for this step and deals them out: {once}.",
        "batch": f"Every worker loads its own rows into its own memory{in_turns}.",
        "forward": "Every worker runs its own copy of the model on its own rows, all at the same "
        "time.",
        "loss": "How wrong each worker's predictions are, as one number"
        + (": the mean over its rows." if is_weighted else "."),
        "backward": "Every worker finds out how each weight should change for its own rows: its "
        "gradients. They still differ.",
        "buckets": f"The gradients of {packed} are packed into {messages}, the same way on every "
        "worker.",
        "all-reduce": f"The {len(ranks)} workers add up their gradients and divide by the number "
        f"of {'workers' if ranks[0].loss_weight is None else 'rows'}. Now all have the same ones.",
        "update": {
            True: "Every worker makes the same change: all copies of the model are equal to the "
            "last bit.",
            False: "Every worker changes its weights, and they are NOT EQUAL afterwards.",
            None: "Every worker makes the same change.",
        }[is_equal],
    }


def loss_factor(ranks: Sequence[RankCounts]) -> float:
    """What the engine multiplies the sum of gradients with."""
    weights = [each.engine_weight for each in ranks if each.rows]  # no rows, no backward
    known = [weight for weight in weights if weight is not None]
    if len(known) < len(weights) or not weights:
        return 1 / len(ranks)
    return 1 / sum(known) if sum(known) else 0.0


def merge_stages(by_rank: Sequence[Sequence[Stage]]) -> list[Stage]:
    """The ranks' parts side by side; a stage takes as long as its slowest worker."""
    merged = []
    for stages in zip(*by_rank, strict=True):
        parts = [part for stage in stages for part in stage.parts if part.worker is not None]
        merged.append(
            replace(
                stages[0],
                parts=parts or stages[0].parts,
                bytes_moved=sum(stage.bytes_moved for stage in stages),
                seconds=max((s.seconds for s in stages if s.seconds is not None), default=None),
            )
        )
    return merged


def describe_replicas(
    hooks: StepHooks,
    calls: Sequence[ForwardPass],
    devices: Sequence[str],
    contributions: Sequence[float] | None,
) -> Picture:
    """The stages of the replicas' calls.

    `contributions` are what each replica adds to the followed weight's gradient.
    """
    notes, values, whole = hooks.notes, hooks.notes.values, hooks.whole
    weights = list(bare(hooks.model).parameters())
    copies = {frozenset(c.weights) for c in calls if not c.weights <= set(memories(weights))}
    model = TensorFacts(name="model", shape=[], dtype="", device="", bytes=bytes_of(weights))
    on_replicas = {
        "split": [tree_facts("input", call.arguments, values=values) for call in calls],
        "copy": [[model] for _ in calls],
        "forward": [tree_facts("output", call.output, values=values) for call in calls],
    }
    at_home = {
        "loss": ("loss", _loss_facts(notes, notes.loss_weight)),
        "backward": ("module", flat_facts("gradients", hooks.averaged, values=values)),
    }
    if hooks.has_update:
        at_home["update"] = ("module", flat_facts("weights", hooks.trained, values=values))
    begin_ns, end_ns = min(c.begin_ns for c in calls), max(c.end_ns for c in calls)
    seconds = {**hooks.seconds_by_stage, "forward": (end_ns - begin_ns) / 1e9}
    moved = {"copy": model.bytes * len(copies), "backward": model.bytes * len(copies)}
    if whole is not None:
        batch = tree_facts("batch", whole.arguments, values=values)
        gathered = tree_facts("output", whole.output, values=values)
        at_home |= {"batch": ("batch", batch), "gather": ("output", gathered)}
        seconds["split"] = (min(c.arrive_ns for c in calls) - whole.begin_ns) / 1e9
        seconds["gather"] = max(0, whole.end_ns - max(c.leave_ns for c in calls)) / 1e9
        moved["batch"] = sum(tensor.bytes for tensor in batch)
        moved["split"] = sum(
            bytes_of(tensor)
            for call in calls
            for tensor, memory in zip(call.inputs, call.memories, strict=True)
            if memory not in whole.memories
        )
        moved["gather"] = sum(tensor.bytes for tensor in gathered) if len(calls) > 1 else 0
    parts = {
        name: [
            Part(
                title=place,
                worker=i,
                device=place,
                tensors=tensors[i],
                seconds=calls[i].seconds if name == "forward" else None,
            )
            for i, place in enumerate(devices)
        ]
        for name, tensors in on_replicas.items()
    } | {
        name: [Part(title=title, device=devices[0], tensors=tensors, seconds=seconds.get(name))]
        for name, (title, tensors) in at_home.items()
    }
    rows = [call.rows for call in calls]
    sentences = _replica_sentences(rows, moved, dataset_rows(notes.dataset))
    stages = _stages(notes, sentences, parts, moved, seconds)
    weight = _follow_weight(
        notes,
        stages,
        ("copy", "value", [notes.weight_before] * len(calls), True),
        ("backward", "gradient", contributions, False),
        ("backward", "summed gradient", [notes.read_weight(hooks.averaged)], False),
        ("update", "new value", [notes.read_weight(hooks.trained)], False),
    )
    return stages, _follow_sample(notes, stages, calls), weight


def _replica_sentences(
    rows: Sequence[int], moved: Mapping[str, int], dataset_rows: int | None
) -> dict[str, str]:
    of = "" if dataset_rows is None else f" of the {dataset_rows:,}"
    common = {
        "batch": f"{count_text(sum(rows), 'row')}{of} are taken for this step.",
        "split": "One device gets the whole batch.",
        "copy": "The model is where the batch is.",
        "forward": "The model is run on the rows.",
        "gather": "The output stays where it is.",
        "loss": "How wrong the predictions for all rows are, as one number."
        + ("" if "gather" in moved else " It was computed on the replicas, without a gather."),
        "backward": "How should each weight change? These are the gradients.",
        "update": "The optimizer changes the weights once; the copies follow in the next step.",
    }
    if len(rows) == 1:
        return common
    views = "" if moved.get("split") else " Same memory, so nothing is copied."
    sent = "The weights are sent to devices with a memory of their own."
    shared = "They share the weights in one memory, so nothing is copied."
    return common | {
        "split": f"The batch is cut into {' + '.join(map(str, rows))} rows, a part for each "
        f"device.{views}",
        "copy": f"Each device has its own copy of the model. {sent if moved['copy'] else shared}",
        "forward": f"The {len(rows)} copies compute at the same time, each on its own rows.",
        "gather": f"The outputs for {list_text(rows)} rows are joined on the first device, in the "
        "batch's order.",
        "backward": "How should each weight change? The answers of all copies, the gradients, are "
        "added up in one place.",
    }


def _stages(
    notes: StepRecording,
    sentences: Mapping[str, str],
    parts: Mapping[str, Sequence[Part]],
    moved: Mapping[str, int],
    seconds: Mapping[str, float | None],
) -> list[Stage]:
    """The stages in the order of their sentences; what nobody has a part in is left out.

    Before them come the data, if there is a dataset to look at.
    """
    stages = [
        Stage(
            name=name,
            title={"copy": "copy the model"}.get(name, name),
            text=text,
            parts=list(parts[name]),
            bytes_moved=moved.get(name, 0),
            seconds=seconds.get(name),
        )
        for name, text in sentences.items()
        if name in parts
    ]
    rows = dataset_rows(notes.dataset)
    if rows is None:
        return stages
    batch = next((part.tensors for part in parts.get("batch", parts.get("split", []))), [])
    facts = dataset_facts(notes.dataset, batch, values=notes.values)
    shape = f", {shape_text(facts[0].shape)}" if facts else ""
    text = f"The dataset: {count_text(rows, 'row')}{shape}."
    part = Part(title="dataset", tensors=facts)
    return [Stage(name="data", title="input data", text=text, parts=[part]), *stages]


def _loss_facts(notes: StepRecording, weight: float | None) -> list[TensorFacts]:
    """The mean loss, which is a statistic: kept without `values` too."""
    if notes.loss is None:
        return []
    return [facts_of("loss", notes.loss / weight if weight else notes.loss, values=True)]


def _all_inputs(calls: Sequence[ForwardPass], values: bool) -> list[TensorFacts]:
    """The inputs of the first forward pass, counted as long as all passes together are."""
    facts = tree_facts("input", calls[0].arguments, values=values) if calls else []
    if len(calls) < 2 or not facts or not facts[0].shape:
        return facts
    shape = [sum(call.rows for call in calls), *facts[0].shape[1:]]
    size = sum(bytes_of(call.inputs[:1]) for call in calls)
    return [replace(facts[0], shape=shape, bytes=size), *facts[1:]]


def _follow_sample(
    notes: StepRecording,
    stages: Sequence[Stage],
    calls: Sequence[ForwardPass],
    rank: int | None = None,
    rows_before: int = 0,
) -> Sample | None:
    """Where the followed sample is at each stage; None where this process does not have it."""
    index = notes.sample
    if index is None:
        return None
    row = index - rows_before
    if notes.indices is not None:
        row = notes.indices.index(index) if index in notes.indices else -1
    if not 0 <= row < sum(call.rows for call in calls):
        return None
    own, number = row, 0
    while own >= calls[number].rows:
        own -= calls[number].rows
        number += 1
    call = calls[number]
    into = row_values(call.inputs, own, call.rows) if notes.values else None
    out = row_values(call.outputs, own, call.rows) if notes.values else None
    way: list[tuple[str, int | None, int, list[float] | None]]
    if rank is None:
        way = [("batch", None, row, into), ("split", number, own, into)]
        way += [("forward", number, own, out), ("gather", None, row, out)]
    else:
        way = [
            ("sampler", rank, row, None),
            ("batch", rank, row, into),
            ("forward", rank, row, out),
        ]
    if notes.indices is not None:
        way.insert(0, ("data", None, index, into))
    names = {stage.name for stage in stages}
    stops = [
        SampleStop(stage=stage, worker=worker, row=at, values=values)
        for stage, worker, at, values in way
        if stage in names
    ]
    return Sample(index=index, stops=stops)


def _follow_weight(
    notes: StepRecording,
    stages: Sequence[Stage],
    *way: tuple[str, Any, Sequence[float | None] | None, bool],
) -> Weight | None:
    """The followed weight at each stage: what its numbers are, and whether workers share them."""
    if notes.weight is None:
        return None
    names = {stage.name for stage in stages}
    stops = []
    for stage, what, numbers, is_shared in way:
        if stage not in names or numbers is None:
            continue
        known = [number for number in numbers if number is not None]
        is_whole = len(known) == len(numbers)
        stops.append(
            WeightStop(
                stage=stage,
                what=what,
                by_worker=known if notes.values and is_whole else None,
                is_equal=len(set(known)) == 1 if is_shared and is_whole else None,
            )
        )
    return Weight(name=notes.weight.name, index=list(notes.weight.index), stops=stops)
