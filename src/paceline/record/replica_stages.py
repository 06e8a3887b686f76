"""The stages of one step of `DataParallel`: one process, a replica of the model on each device.

    data -> batch -> split -> copy -> forward -> gather -> loss -> backward -> update

The replicas' forward passes were seen by hooks on the module, which fire in every replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.record.facts import tree_facts
from paceline.record.follow import rows_of
from paceline.record.rank_stages import data_stage
from paceline.record.stages import (
    Part,
    Sample,
    SampleStop,
    Stage,
    TensorFacts,
    Weight,
    WeightStop,
)
from paceline.record.watch import Call, Memory
from paceline.record.words import count, join_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """What was seen of the replicas, in the order of the devices."""

    devices: list[str]
    rows: list[int]
    inputs: list[list[TensorFacts]]
    outputs: list[list[TensorFacts]]
    seconds: list[float]
    forward_s: float
    """From the first one's beginning to the last one's end."""
    prepare_s: float | None = None
    """Cutting the batch and bringing the replicas up to date."""
    split_bytes: int = 0
    copy_bytes: int = 0
    model_bytes: int = 0
    batch: list[TensorFacts] = field(default_factory=list)
    gathered: list[TensorFacts] = field(default_factory=list)
    gather_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What happened to the module itself after the forward pass."""

    loss: TensorFacts | None = None
    gradients: TensorFacts | None = None
    parameters: TensorFacts | None = None
    home: str = ""
    batch_s: float | None = None
    loss_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    has_update: bool = False


def in_order(calls: Sequence[Call], device_ids: Sequence[Any]) -> list[Call]:
    """The replicas' calls in the order of their rows.

    On one device the parts are views of one batch, or were made one after the other; devices are
    in the order of `device_ids`.
    """
    uses = Counter(call.memories[0] for call in calls if call.memories)
    places = [_device_name(device) for device in device_ids]

    def key(numbered: tuple[int, Call]) -> tuple[int, int, int]:
        number, call = numbered
        memory = call.memories[0] if call.memories else Memory("", 0)
        first = next((i for i, name in enumerate(places) if _is_on(name, memory)), len(places))
        return first, memory.offset if uses[memory] > 1 else 0, number

    return [call for _, call in sorted(enumerate(calls), key=key)]


def see_replicas(
    calls: Sequence[Call],
    whole: Call | None,
    device_ids: Sequence[Any],
    weights: set[Memory],
    weight_bytes: int,
    *,
    values: bool,
) -> Replicas:
    """Turn the calls, already in order, into facts."""
    names = [_device_name(device) for device in device_ids]
    home = set(whole.memories) if whole is not None else set()
    copied = [
        tensor.numel() * tensor.element_size()
        for call in calls
        for tensor, memory in zip(call.inputs, call.memories, strict=True)
        if memory not in home
    ]
    foreign = {frozenset(call.weights) for call in calls if not call.weights <= weights}
    begin, end = min(c.begin_ns for c in calls), max(c.end_ns for c in calls)
    last = max(c.leave_ns for c in calls)
    first = min(c.arrive_ns for c in calls)
    return Replicas(
        devices=[names[i] if i < len(names) else "" for i in range(len(calls))],
        rows=[rows_of(call) for call in calls],
        inputs=[tree_facts("input", (c.args, c.kwargs), values=values) for c in calls],
        outputs=[tree_facts("output", c.output, values=values) for c in calls],
        seconds=[(c.end_ns - c.begin_ns) / 1e9 for c in calls],
        forward_s=(end - begin) / 1e9,
        prepare_s=None if whole is None else (first - whole.begin_ns) / 1e9,
        split_bytes=sum(copied) if whole is not None else 0,
        copy_bytes=weight_bytes * len(foreign),
        model_bytes=weight_bytes,
        batch=tree_facts("batch", (whole.args, whole.kwargs), values=values) if whole else [],
        gathered=tree_facts("output", whole.output, values=values) if whole else [],
        gather_s=None if whole is None else max(0, whole.end_ns - last) / 1e9,
    )


def build_stages(
    seen: Replicas, rest: Rest, data: TensorFacts | None, dataset_rows: int | None
) -> list[Stage]:
    """The picture of the step, in order."""
    stages = [] if dataset_rows is None else [data_stage(data, dataset_rows)]
    if seen.batch:
        stages.append(_batch(seen, rest, dataset_rows))
    stages += [_split(seen), _copy(seen), _forward(seen)]
    if seen.gathered:
        stages.append(_gather(seen, rest))
    stages += [_loss(seen, rest), _backward(seen, rest)]
    if rest.has_update:
        stages.append(_update(rest))
    return stages


def follow_sample(
    index: int,
    row: int,
    rows: Sequence[int],
    values: tuple[list[float] | None, list[float] | None],
    has_data: bool,
) -> Sample | None:
    """Where the sample went: `row` is its place in the batch, `rows` are the replicas' shares."""
    into, out = values
    start = 0
    for worker, share in enumerate(rows):
        if row < start + share:
            own = row - start
            stops = [SampleStop(stage="data", worker=None, row=index, values=into)]
            stops += [
                SampleStop(stage="batch", worker=None, row=row, values=into),
                SampleStop(stage="split", worker=worker, row=own, values=into),
                SampleStop(stage="forward", worker=worker, row=own, values=out),
                SampleStop(stage="gather", worker=None, row=row, values=out),
            ]
            return Sample(index=index, stops=stops if has_data else stops[1:])
        start += share
    return None


def follow_weight(
    name: str,
    index: Sequence[int],
    *,
    value: float | None,
    own: Sequence[float] | None,
    total: float | None,
    new: float | None,
    workers: int,
    has_update: bool,
    values: bool,
) -> Weight:
    """What became of the weight: its value in each replica, its gradient from each, their sum."""

    def stop(stage: str, what: Any, numbers: Sequence[float | None], equal: bool) -> WeightStop:
        known = [number for number in numbers if number is not None]
        return WeightStop(
            stage=stage,
            what=what,
            by_worker=known if values and known else None,
            is_equal=True if equal else None,
        )

    stops = [stop("copy", "value", [value] * workers, equal=True)]
    if own is not None:
        stops.append(stop("backward", "gradient", own, equal=False))
    stops.append(stop("backward", "summed gradient", [total], equal=False))
    if has_update:
        stops.append(stop("update", "new value", [new], equal=False))
    return Weight(name=name, index=list(index), stops=stops)


def _batch(seen: Replicas, rest: Rest, dataset_rows: int | None) -> Stage:
    rows = sum(seen.rows)
    of = "" if dataset_rows is None else f" of the {dataset_rows:,}"
    return Stage(
        name="batch",
        title="batch",
        text=f"{count(rows, 'row')}{of} are taken for this step.",
        parts=[_alone("batch", rest.home, seen.batch, rest.batch_s)],
        bytes_moved=sum(t.bytes for t in seen.batch),
        seconds=rest.batch_s,
    )


def _split(seen: Replicas) -> Stage:
    shares = " + ".join(map(str, seen.rows))
    views = "" if seen.split_bytes else " Same memory, so nothing is copied."
    return Stage(
        name="split",
        title="split",
        text=f"The batch is cut into {shares} rows, a part for each device.{views}"
        if len(seen.rows) > 1
        else "One device gets the whole batch.",
        parts=_each(seen, seen.inputs),
        bytes_moved=seen.split_bytes,
        seconds=seen.prepare_s,
    )


def _copy(seen: Replicas) -> Stage:
    shared = "They share the weights in one memory, so nothing is copied."
    sent = "The weights are sent to devices with a memory of their own."
    models = TensorFacts(name="model", shape=[], dtype="", device="", bytes=seen.model_bytes)
    return Stage(
        name="copy",
        title="copy the model",
        text=f"Each device has its own copy of the model. {sent if seen.copy_bytes else shared}"
        if len(seen.rows) > 1
        else "The model is where the batch is.",
        parts=[
            Part(title=name, worker=i, device=name, tensors=[models])
            for i, name in enumerate(seen.devices)
        ],
        bytes_moved=seen.copy_bytes,
    )


def _forward(seen: Replicas) -> Stage:
    return Stage(
        name="forward",
        title="forward, in parallel",
        text=f"The {len(seen.rows)} copies compute at the same time, each on its own rows."
        if len(seen.rows) > 1
        else "The model is run on the rows.",
        parts=_each(seen, seen.outputs, seen.seconds),
        seconds=seen.forward_s,
    )


def _gather(seen: Replicas, rest: Rest) -> Stage:
    rows = join_words([str(n) for n in seen.rows])
    return Stage(
        name="gather",
        title="gather",
        text=f"The outputs for {rows} rows are joined on the first device, in the batch's order."
        if len(seen.rows) > 1
        else "The output stays where it is.",
        parts=[_alone("output", rest.home, seen.gathered, seen.gather_s)],
        bytes_moved=sum(t.bytes for t in seen.gathered) if len(seen.rows) > 1 else 0,
        seconds=seen.gather_s,
    )


def _loss(seen: Replicas, rest: Rest) -> Stage:
    where = "" if seen.gathered else " It was computed on the replicas, without a gather."
    return Stage(
        name="loss",
        title="loss",
        text=f"How wrong the predictions for all rows are, as one number.{where}",
        parts=[_alone("loss", rest.home, [rest.loss] if rest.loss else [], rest.loss_s)],
        seconds=rest.loss_s,
    )


def _backward(seen: Replicas, rest: Rest) -> Stage:
    return Stage(
        name="backward",
        title="backward",
        text="How should each weight change? The answers of all copies, the gradients, are "
        "added up in one place."
        if len(seen.rows) > 1
        else "How should each weight change? These are the gradients.",
        parts=[
            _alone("module", rest.home, [rest.gradients] if rest.gradients else [], rest.backward_s)
        ],
        bytes_moved=seen.copy_bytes,
        seconds=rest.backward_s,
    )


def _update(rest: Rest) -> Stage:
    return Stage(
        name="update",
        title="update",
        text="The optimizer changes the weights once; the copies follow in the next step.",
        parts=[
            _alone("module", rest.home, [rest.parameters] if rest.parameters else [], rest.update_s)
        ],
        seconds=rest.update_s,
    )


def _each(
    seen: Replicas,
    tensors: Sequence[Sequence[TensorFacts]],
    seconds: Sequence[float] | None = None,
) -> list[Part]:
    return [
        Part(
            title=name,
            worker=i,
            device=name,
            tensors=list(tensors[i]),
            seconds=None if seconds is None else seconds[i],
        )
        for i, name in enumerate(seen.devices)
    ]


def _alone(title: str, device: str, tensors: Sequence[TensorFacts], seconds: float | None) -> Part:
    return Part(title=title, device=device, tensors=list(tensors), seconds=seconds)


def _device_name(device: Any) -> str:
    """`cuda:1` for an index, as in `device_ids`; `cpu:1` for a part of the CPU."""
    if isinstance(device, int):
        import torch

        accelerator = torch.accelerator.current_accelerator()
        return f"{accelerator.type if accelerator else 'cuda'}:{device}"
    return str(device)


def _is_on(name: str, memory: Memory) -> bool:
    return memory.device == name or (name.startswith("cpu") and memory.device == "cpu")
