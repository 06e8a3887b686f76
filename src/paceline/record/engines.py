"""The stages of a step, built from what was recorded: tensors, bytes moved, and sentences.

    DistributedDataParallel   data sampler batch forward loss backward buckets all-reduce update
    DataParallel              data batch split copy forward gather loss backward sum update main

An engine provides the workers' parts of a stage, and a sentence; the order of sentences is that of
the stages. So a new stage needs a new part and a new sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.ddp import bare
from paceline.record import facts
from paceline.record.hooks import ForwardPass, StepRecording, fill, join, memories
from paceline.record.stages import Part, Sample, SampleStop, Stage, TensorFacts, Weight, WeightStop
from paceline.telemetry import bytes_text, count_text, list_text

Picture = tuple[list[Stage], Sample | None, Weight | None]
"""The stages, and the sample and the weight that are followed through them."""
TITLES = {"copy": "copy the model", "sum": "add up gradients", "main": "the main device"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """What every rank needs from the others to describe its own part of the step."""

    rows: list[int]
    """By forward pass."""
    indices: list[int] | None
    engine_weight: float | None
    """The engine's weight for this rank's gradients; None without a backward pass."""
    loss_weight: float | None
    """How many items its losses are sums over, according to the caller."""
    loss: float | None
    """The sum of its losses."""
    has_update: bool
    has_older_gradients: bool
    weight: list[float | None]
    """The followed weight's value, own gradient, averaged gradient and new value."""


def describe_rank(
    rec: StepRecording, ranks: Sequence[RankCounts], rank: int, is_equal: bool | None
) -> Picture:
    """The stages with this rank's parts, the followed sample if it has it, and the weight."""
    own = ranks[rank]
    tree, flat = (partial(each, values=rec.values) for each in (facts.tree_facts, facts.flat_facts))
    # Each rank's gradients are scaled so that their plain mean is the averaged gradient.
    scale = loss_factor(ranks) * len(ranks)
    local = [rec.local[name] * scale for name in rec.trained if name in rec.local]
    batch = join(rec.calls)
    held = {
        "batch": tree("input", fill(rec.calls[0].arguments, batch.inputs)) if batch else [],
        "forward": tree("output", fill(rec.calls[0].output, batch.outputs)) if batch else [],
        "loss": _loss(rec, own.loss_weight),
        "backward": flat("own gradients", local),
        "all-reduce": flat("averaged gradients", rec.averaged.values()),
    }
    if all(each.indices is not None for each in ranks):
        rows = tree("row numbers", torch.tensor(own.indices).long())
        held["sampler"] = [replace(numbers, stats=None) for numbers in rows]
    if all(each.has_update for each in ranks):
        held["update"] = flat("weights", rec.trained.values())
    seconds = {**rec.seconds_by_stage, "forward": sum(call.seconds for call in rec.calls)}
    place = partial(Part, title=f"worker {rank}", worker=rank, device=str(rec.model.device))
    parts = {
        name: [place(tensors=tensors, seconds=seconds.get(name))] for name, tensors in held.items()
    }
    moved = {"batch": sum(tensor.bytes for tensor in held["batch"])}
    if rec.buckets:
        moved["all-reduce"] = sum(bucket.tensors[0].bytes for bucket in rec.buckets)
        sends = f"sends {bytes_text(moved['all-reduce'])}"
        parts["all-reduce"] = [replace(part, text=sends) for part in parts["all-reduce"]]
        parts["buckets"] = rec.buckets
    stages = _stages(rec, _rank_sentences(rec, ranks, is_equal), parts, moved, seconds)
    before, gradients, averaged, new = zip(*(each.weight for each in ranks), strict=True)
    weight = _follow_weight(
        rec,
        stages,
        ("forward", "value", before, True),
        ("backward", "gradient", [None if g is None else g * scale for g in gradients], False),
        ("all-reduce", "averaged gradient", averaged, True),
        ("update", "new value", new, True),
    )
    first_row = sum(sum(each.rows) for each in ranks[:rank])
    return stages, _follow_sample(rec, stages, rec.calls, rank, first_row), weight


def _rank_sentences(
    rec: StepRecording, ranks: Sequence[RankCounts], is_equal: bool | None
) -> dict[str, str]:
    total, most = facts.dataset_rows(rec.dataset), max((each.rows for each in ranks), key=len)
    of = "" if total is None else f" of {total:,}"
    taken = [index for each in ranks for index in set(each.indices or [])]
    overlap = len(taken) - len(set(taken))
    is_mean = all(each.loss_weight is not None for each in ranks)
    why = f": {rec.why_passes}" if rec.why_passes else ""
    return {
        "sampler": f"Picks {count_text(sum(sum(each.rows) for each in ranks), 'row')}{of} for this "
        f"step and deals them out. Overlap {overlap:,}: "
        + ("some rows go to more than one worker." if overlap else "no row goes to two workers."),
        "batch": "Every worker loads its own rows into its own memory"
        + (f", in {len(most)} passes of {list_text(most)} rows{why}." if most[1:] else "."),
        "forward": "Every worker runs its own copy of the model on its own rows, all at the same "
        "time.",
        "loss": "How wrong each worker's predictions are, as one number"
        + (": the mean over its rows." if is_mean else "."),
        "backward": "Every worker finds out how each weight should change for its own rows: its "
        "gradients." + (" They still differ." if len(ranks) > 1 else ""),
        "buckets": f"The gradients of {count_text(len(rec.bucket_starts), 'parameter')} are packed "
        f"into {count_text(len(rec.buckets), 'message')}, the same way on every worker.",
        "all-reduce": f"The {len(ranks)} workers add up their gradients and divide by the number "
        f"of {'rows' if is_mean else 'workers'}. Now all have the same ones."
        if len(ranks) > 1
        else "With one worker there is nothing to average.",
        "update": {
            True: "Every worker makes the same change: all copies of the model are equal to the "
            "last bit.",
            False: "Every worker changes its weights, and they are NOT EQUAL afterwards.",
            None: "Every worker makes the same change.",
        }[is_equal],
    }


def loss_factor(ranks: Sequence[RankCounts]) -> float:
    """The engine's factor on the sum of gradients."""
    total = sum(each.engine_weight or 0.0 for each in ranks)
    return 1 / total if total else 0.0


def merge_stages(by_rank: Sequence[Sequence[Stage]]) -> list[Stage]:
    """Put the ranks' parts side by side; a stage takes as long as its slowest worker."""
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
    rec: StepRecording,
    calls: Sequence[ForwardPass],
    devices: Sequence[str],
    contributions: Sequence[tuple[list[TensorFacts], float]] | None,
) -> Picture:
    """The stages of the replicas' calls.

    `contributions` are each replica's gradients, and that of the followed weight.
    """
    whole, size = rec.whole, len(calls)
    tree, flat = (partial(each, values=rec.values) for each in (facts.tree_facts, facts.flat_facts))
    weights = list(bare(rec.model).parameters())
    copies = {call.weights for call in calls if not call.weights <= memories(weights)}
    model = TensorFacts(
        name="model", shape=[], dtype="", device="", bytes=facts.tensor_bytes(weights)
    )
    on_replicas = {
        "split": [tree("input", call.arguments) for call in calls],
        "copy": [[model]] * size,
        "forward": [tree("output", call.output) for call in calls],
        "backward": [own for own, _ in contributions or [([], 0.0)] * size],
    }
    at_home = {
        "loss": _loss(rec, rec.loss_weight),
        "sum": flat("summed gradients", rec.averaged.values()),
    }
    if rec.has_update:
        at_home["update"] = flat("weights", rec.trained.values())
    begin_ns, end_ns = min(call.begin_ns for call in calls), max(call.end_ns for call in calls)
    seconds = {**rec.seconds_by_stage, "forward": (end_ns - begin_ns) / 1e9}
    moved = dict.fromkeys(("copy", "sum"), model.bytes * len(copies))
    if whole is not None:
        at_home["batch"] = tree("batch", whole.arguments)
        at_home["gather"] = tree("output", whole.output)
        seconds["split"] = (begin_ns - whole.begin_ns) / 1e9
        seconds["gather"] = max(0, whole.end_ns - end_ns) / 1e9
        moved["batch"] = facts.tensor_bytes(whole.inputs)
        moved["gather"] = facts.tensor_bytes(whole.outputs) if size > 1 else 0
        cut_off = [call.inputs for call in calls if not call.memories <= whole.memories]
        moved["split"] = facts.tensor_bytes(cut_off)
    parts = {
        name: [
            Part(title=place, worker=i, device=place, tensors=tensors[i])
            for i, place in enumerate(devices)
        ]
        for name, tensors in on_replicas.items()
    }
    parts["forward"] = [
        replace(part, seconds=call.seconds)
        for part, call in zip(parts["forward"], calls, strict=True)
    ]
    for name, tensors in at_home.items():
        part = Part(title=name, device=devices[0], tensors=tensors, seconds=seconds.get(name))
        parts[name] = [part]
    sentences = _replica_sentences(rec, [call.rows for call in calls], moved)
    if size > 1:
        through, sentences["main"] = _main_device(rec, calls, devices[0], model.bytes, moved)
        label = f"{bytes_text(through)} through this device"
        parts["main"] = [Part(title=devices[0], device=devices[0], text=label)]
    stages = _stages(rec, sentences, parts, moved, seconds)
    adds = [own for _, own in contributions] if contributions else None
    weight = _follow_weight(
        rec,
        stages,
        ("copy", "value", [rec.weight_before] * size, True),
        ("backward", "gradient", adds, False),
        ("sum", "summed gradient", [facts.read_weight(rec.weight, rec.averaged)], False),
        ("update", "new value", [facts.read_weight(rec.weight, rec.trained)], False),
    )
    return stages, _follow_sample(rec, stages, calls), weight


def _replica_sentences(
    rec: StepRecording, rows: Sequence[int], moved: Mapping[str, int]
) -> dict[str, str]:
    total = facts.dataset_rows(rec.dataset)
    of = "" if total is None else f" of the {total:,}"
    return {
        "batch": f"{count_text(sum(rows), 'row')}{of} are taken for this step.",
        "split": f"The batch is cut into {' + '.join(map(str, rows))} rows, a part for each device."
        + ("" if moved.get("split") else " Same memory, so nothing is copied."),
        "copy": "Each device has its own copy of the model. "
        + (
            "The weights are sent to devices with a memory of their own."
            if moved["copy"]
            else "They share the weights in one memory, so nothing is copied."
        ),
        "forward": "All copies compute at the same time, each on its own rows.",
        "gather": f"The outputs for {list_text(rows)} rows are joined on the first device, in the "
        "batch's order.",
        "loss": "How wrong the predictions for all rows are, as one number."
        + ("" if "gather" in moved else " It was computed on the replicas, without a gather."),
        "backward": "How should each weight change? Every copy answers for its own rows: its "
        "gradients.",
        "sum": "The gradients of all copies are added up on the main device.",
        "update": "The optimizer changes the weights once; the copies follow in the next step.",
    }


def _main_device(
    rec: StepRecording,
    calls: Sequence[ForwardPass],
    main: str,
    model_bytes: int,
    moved: Mapping[str, int],
) -> tuple[int, str]:
    """How many bytes pass through the main device in a step, and a sentence about them."""
    others = calls[1:]
    bytes_by_kind = {
        "rows": facts.tensor_bytes([call.inputs for call in others]),
        "weights": model_bytes * len(others),
        "outputs": facts.tensor_bytes([c.outputs for c in others]) if "gather" in moved else 0,
        "gradients": facts.tensor_bytes(list(rec.averaged.values())) * len(others),
    }
    kinds = [f"{bytes_text(number)} of {name}" for name, number in bytes_by_kind.items() if number]
    through, copied = sum(bytes_by_kind.values()), sum(moved.values()) - moved.get("batch", 0)
    text = f"In every step {list_text(kinds)} pass between {main} and the other devices: "
    text += f"{bytes_text(through)}, all of it through one device."
    if copied < through:
        text += f" These devices share memory, so only {bytes_text(copied)} were copied."
    return through, text


def _stages(
    rec: StepRecording,
    sentences: Mapping[str, str],
    parts: Mapping[str, Sequence[Part]],
    moved: Mapping[str, int],
    seconds: Mapping[str, float | None],
) -> list[Stage]:
    """The stages in the order of their sentences; a stage without parts is left out.

    A stage "data" comes first, if there is a dataset with a length.
    """
    stages = [
        Stage(
            name=name,
            title=TITLES.get(name, name),
            text=text,
            parts=list(parts[name]),
            bytes_moved=moved.get(name, 0),
            seconds=seconds.get(name),
        )
        for name, text in sentences.items()
        if name in parts
    ]
    rows = facts.dataset_rows(rec.dataset)
    if rows is None:
        return stages
    data = rec.dataset.tensors[0] if isinstance(rec.dataset, TensorDataset) else rec.dataset
    known = facts.tree_facts(
        "inputs", data if isinstance(data, Tensor) else None, values=rec.values
    )
    text = f"The dataset has {count_text(rows, 'row')}."
    part = Part(title="dataset", tensors=known)
    return [Stage(name="data", title="input data", text=text, parts=[part]), *stages]


def _loss(rec: StepRecording, weight: float | None) -> list[TensorFacts]:
    """The mean loss. It is a statistic, so it is kept without `values` too."""
    if rec.loss is None:
        return []
    return facts.tree_facts("loss", rec.loss / weight if weight else rec.loss, values=True)


def _follow_sample(
    rec: StepRecording,
    stages: Sequence[Stage],
    calls: Sequence[ForwardPass],
    rank: int | None = None,
    first_row: int = 0,
) -> Sample | None:
    """The followed sample at each stage; None where this process does not have it."""
    index = rec.sample
    places = [(call, number, row) for number, call in enumerate(calls) for row in range(call.rows)]
    indices = rec.indices
    if indices is None:
        indices = list(range(first_row, first_row + len(places)))
    if index is None or index not in indices[: len(places)]:
        return None
    row = indices.index(index)
    call, number, own = places[row]
    into, out = (
        facts.row_values(each, own, call.rows) if rec.values else None
        for each in (call.inputs, call.outputs)
    )
    way: dict[str, tuple[int | None, int, list[float] | None]]
    way = {"data": (None, index, into)} if rec.indices is not None else {}
    if rank is None:
        way |= {"batch": (None, row, into), "split": (number, own, into)}
        way |= {"forward": (number, own, out), "gather": (None, row, out)}
    else:
        way |= {"sampler": (rank, row, None), "batch": (rank, row, into)}
        way |= {"forward": (rank, row, out)}
    names = {stage.name for stage in stages}
    stops = [
        SampleStop(stage=stage, worker=worker, row=at, values=values)
        for stage, (worker, at, values) in way.items()
        if stage in names
    ]
    return Sample(index=index, stops=stops)


def _follow_weight(
    rec: StepRecording,
    stages: Sequence[Stage],
    *way: tuple[str, Any, Sequence[float | None] | None, bool],
) -> Weight | None:
    """The followed weight at each stage: its numbers, and whether all workers have the same."""
    if rec.weight is None:
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
                by_worker=known if rec.values and is_whole else None,
                is_equal=len(set(known)) == 1 if is_shared and is_whole else None,
            )
        )
    name, index = rec.weight
    bucket, position = rec.bucket_starts.get(name, (None, None))
    if position is not None:
        strides = torch.empty(rec.trained[name].shape, device="meta").stride()
        position += sum(i * stride for i, stride in zip(index, strides, strict=True))
    return Weight(name=name, index=list(index), bucket=bucket, position=position, stops=stops)
