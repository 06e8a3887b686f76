"""The stages of one step of `DistributedDataParallel`, put together from what every worker saw.

    data -> sampler -> batch -> forward -> loss -> backward -> buckets -> all-reduce -> update

`Seen` is what one worker tells the others, as plain data; the rest is arithmetic on a list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.record.inside import BucketFacts
from paceline.record.stages import (
    FIRST_VALUES,
    Part,
    Sample,
    SampleStop,
    Stage,
    TensorFacts,
    Weight,
    WeightStop,
)
from paceline.record.words import count, count_bytes, shape_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one worker has seen of its own part of a step."""

    rank: int
    device: str
    rows: int
    indices: list[int] | None = None
    """Which rows of the dataset its batch has."""
    has_values: bool = False
    passes: int = 1
    inputs: list[TensorFacts] = field(default_factory=list)
    outputs: list[TensorFacts] = field(default_factory=list)
    loss: TensorFacts | None = None
    loss_weight: float | None = None
    gradients: TensorFacts | None = None
    averaged: TensorFacts | None = None
    parameters: TensorFacts | None = None
    has_update: bool = False
    batch_s: float | None = None
    forward_s: float | None = None
    loss_s: float | None = None
    backward_s: float | None = None
    all_reduce_s: float | None = None
    update_s: float | None = None
    step_s: float = 0.0
    sample_row: int | None = None
    sample_input: list[float] | None = None
    sample_output: list[float] | None = None
    weight: list[float | None] | None = None
    """The followed weight's value, own gradient, averaged gradient and new value."""


def build_stages(
    everyone: Sequence[Seen],
    buckets: Sequence[BucketFacts],
    data: TensorFacts | None,
    dataset_rows: int | None,
    is_equal: bool | None,
) -> list[Stage]:
    """The picture of the step, in order."""
    stages = []
    if dataset_rows is not None:
        stages.append(data_stage(data, dataset_rows))
    if all(seen.indices is not None for seen in everyone):
        stages.append(_sampler(everyone, dataset_rows))
    stages += [_batch(everyone), _forward(everyone), _loss(everyone), _backward(everyone)]
    stages += [_buckets(everyone, buckets), _all_reduce(everyone, buckets)]
    if all(seen.has_update for seen in everyone):
        stages.append(_update(everyone, is_equal))
    return stages


def data_stage(data: TensorFacts | None, rows: int) -> Stage:
    """The dataset, before any row of it was taken."""
    shape = f", {shape_words(data.shape)}" if data else ""
    return Stage(
        name="data",
        title="input data",
        text=f"The dataset: {count(rows, 'row')}{shape}.",
        parts=[Part(title="dataset", tensors=[data] if data else [])],
    )


def follow_sample(index: int, everyone: Sequence[Seen], has_data: bool) -> Sample | None:
    """Where the sample went, stage by stage."""
    owner = next((seen for seen in everyone if seen.sample_row is not None), None)
    if owner is None or owner.sample_row is None:
        return None
    row, rank = owner.sample_row, owner.rank
    stops = []
    if has_data and owner.indices is not None:
        stops.append(SampleStop(stage="data", worker=None, row=index, values=owner.sample_input))
    if owner.indices is not None:
        stops.append(SampleStop(stage="sampler", worker=rank, row=row))
    stops += [
        SampleStop(stage="batch", worker=rank, row=row, values=owner.sample_input),
        SampleStop(stage="forward", worker=rank, row=row, values=owner.sample_output),
    ]
    return Sample(index=index, stops=stops)


def follow_weight(
    name: str,
    index: Sequence[int],
    flat: int,
    everyone: Sequence[Seen],
    buckets: Sequence[BucketFacts],
    *,
    values: bool,
) -> Weight:
    """What became of the weight on every worker."""
    bucket, position = None, None
    for number, each in enumerate(buckets):
        if name in each.names:
            bucket, position = number, each.starts[each.names.index(name)] + flat
    rows = [seen.weight or [None] * 4 for seen in everyone]
    stops = []
    for column, (stage, what) in enumerate(
        (
            ("forward", "value"),
            ("backward", "gradient"),
            ("all-reduce", "averaged gradient"),
            ("update", "new value"),
        )
    ):
        numbers = [row[column] for row in rows]
        if column == 3 and not all(seen.has_update for seen in everyone):
            continue
        known = [number for number in numbers if number is not None]
        is_whole = len(known) == len(numbers)
        stops.append(
            WeightStop(
                stage=stage,
                what=what,  # type: ignore[arg-type]
                by_worker=known if values and is_whole else None,
                is_equal=None if what == "gradient" or not is_whole else len(set(known)) == 1,
            )
        )
    return Weight(name=name, index=list(index), bucket=bucket, position=position, stops=stops)


def _sampler(everyone: Sequence[Seen], dataset_rows: int | None) -> Stage:
    total = sum(seen.rows for seen in everyone)
    of = "" if dataset_rows is None else f" of {dataset_rows:,}"
    taken = [set(seen.indices or []) for seen in everyone]
    is_once = sum(map(len, taken)) == len(set().union(*taken))
    once = "no row goes to two workers" if is_once else "some rows go to several workers"
    return Stage(
        name="sampler",
        title="sampler",
        text=f"Picks {count(total, 'row')}{of} for this step and deals them out: {once}."
        if len(everyone) > 1
        else f"Picks {count(total, 'row')}{of} for this step.",
        parts=[_part(s, _row_numbers(s), None) for s in everyone],
    )


def _row_numbers(seen: Seen) -> list[TensorFacts]:
    numbers = seen.indices or []
    first = [float(number) for number in numbers[:FIRST_VALUES]] if seen.has_values else None
    size = 8 * len(numbers)
    shape = [len(numbers)]
    return [
        TensorFacts(
            name="row numbers", shape=shape, dtype="int64", device="cpu", bytes=size, first=first
        )
    ]


def _batch(everyone: Sequence[Seen]) -> Stage:
    own = "its own rows" if len(everyone) > 1 else "the rows"
    passes = max(seen.passes for seen in everyone)
    in_turns = f", in {passes} forward passes" if passes > 1 else ""
    return Stage(
        name="batch",
        title="batch",
        text=f"Every worker loads {own} into its own memory{in_turns}."
        if len(everyone) > 1
        else f"The worker loads the rows{in_turns}.",
        parts=[_part(s, s.inputs, s.batch_s) for s in everyone],
        bytes_moved=sum(t.bytes for seen in everyone for t in seen.inputs),
        seconds=_slowest([s.batch_s for s in everyone]),
    )


def _forward(everyone: Sequence[Seen]) -> Stage:
    return Stage(
        name="forward",
        title="forward",
        text="Every worker runs its own copy of the model on its own rows, all at the same time."
        if len(everyone) > 1
        else "The model is run on the rows.",
        parts=[_part(s, s.outputs, s.forward_s) for s in everyone],
        seconds=_slowest([s.forward_s for s in everyone]),
    )


def _loss(everyone: Sequence[Seen]) -> Stage:
    is_weighted = all(seen.loss_weight is not None for seen in everyone)
    mean = ": the mean over its rows" if is_weighted else ""
    told = f"How wrong each worker's predictions are, as one number{mean}."
    if len(everyone) == 1:
        told = "How wrong the predictions are, as one number."
    return Stage(
        name="loss",
        title="loss",
        text=told,
        parts=[_part(s, [s.loss] if s.loss else [], s.loss_s) for s in everyone],
        seconds=_slowest([s.loss_s for s in everyone]),
    )


def _backward(everyone: Sequence[Seen]) -> Stage:
    return Stage(
        name="backward",
        title="backward",
        text="Every worker finds out how each weight should change for its own rows: its "
        "gradients. They still differ."
        if len(everyone) > 1
        else "How should each weight change? These are the gradients.",
        parts=[_part(s, [s.gradients] if s.gradients else [], s.backward_s) for s in everyone],
        seconds=_slowest([s.backward_s for s in everyone]),
    )


def _buckets(everyone: Sequence[Seen], buckets: Sequence[BucketFacts]) -> Stage:
    if not buckets:
        return Stage(
            name="buckets", title="buckets", text="A single worker has nobody to send them to."
        )
    gradients = sum(len(bucket.names) for bucket in buckets)
    many = "one message" if len(buckets) == 1 else f"{len(buckets)} messages"
    return Stage(
        name="buckets",
        title="buckets",
        text=f"The gradients of {count(gradients, 'parameter')} are packed into {many}, the same "
        "way on every worker.",
        parts=[_bucket_part(number, bucket) for number, bucket in enumerate(buckets)],
        bytes_moved=0,
    )


def _bucket_part(number: int, bucket: BucketFacts) -> Part:
    ends = list(dict.fromkeys((*bucket.names[:1], *bucket.names[-1:])))
    inside = " to ".join(ends) or "no gradients"
    trailer = f", then {bucket.trailer} control numbers" if bucket.trailer else ""
    facts = TensorFacts(
        name=f"bucket {number}",
        shape=[bucket.numel + bucket.trailer],
        dtype=bucket.dtype,
        device=bucket.device,
        bytes=bucket.bytes,
    )
    return Part(
        title=f"bucket {number}",
        device=bucket.device,
        tensors=[facts],
        text=f"{inside}{trailer}",
    )


def _all_reduce(everyone: Sequence[Seen], buckets: Sequence[BucketFacts]) -> Stage:
    size = len(everyone)
    if size == 1:
        text = "With one worker there is nothing to average."
    else:
        text = (
            f"The {size} workers add up their gradients and divide by the number of "
            f"{'rows' if everyone[0].loss_weight is not None else 'workers'}. Now all have the "
            "same ones."
        )
    payload = sum(bucket.bytes for bucket in buckets)
    sends = f"sends {count_bytes(payload)}" if payload else ""
    return Stage(
        name="all-reduce",
        title="all-reduce",
        text=text,
        parts=[
            _part(s, [s.averaged] if s.averaged else [], s.all_reduce_s, sends) for s in everyone
        ],
        bytes_moved=payload * size,
        seconds=_slowest([s.all_reduce_s for s in everyone]),
    )


def _update(everyone: Sequence[Seen], is_equal: bool | None) -> Stage:
    if len(everyone) == 1:
        text = "The optimizer changes the weights."
    elif is_equal is False:
        text = "Every worker changes its weights, and they are NOT EQUAL afterwards."
    else:
        text = "Every worker makes the same change"
        text += ": all copies of the model are equal to the last bit." if is_equal else "."
    return Stage(
        name="update",
        title="update",
        text=text,
        parts=[_part(s, [s.parameters] if s.parameters else [], s.update_s) for s in everyone],
        seconds=_slowest([s.update_s for s in everyone]),
    )


def _part(
    seen: Seen, tensors: Sequence[TensorFacts], seconds: float | None, text: str = ""
) -> Part:
    return Part(
        title=f"worker {seen.rank}",
        worker=seen.rank,
        device=seen.device,
        tensors=list(tensors),
        seconds=seconds,
        text=text,
    )


def _slowest(times: Sequence[float | None]) -> float | None:
    known = [seconds for seconds in times if seconds is not None]
    return max(known) if known else None
