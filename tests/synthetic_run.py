"""Run folders without a run: what training would have written, made up from a seed.

Everything goes through the writers of `observe.run_folder`, so a folder here has the form of a real
one. Times and losses follow simple laws: a loss that falls, a slow rank that the others wait for.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.files.run_folder import (
    EventWriter,
    RunFolder,
    RunInfo,
    make_private,
    write_info,
)
from paceline.record.stages import (
    Answer,
    Check,
    EngineName,
    Epoch,
    Layer,
    Model,
    Part,
    Sample,
    SamplePrediction,
    SampleStop,
    Stage,
    Stats,
    TensorFacts,
    Trace,
    TrainedEpochs,
    Weight,
    WeightStop,
)
from paceline.record.stages import write as write_trace

BEGAN = 1_700_000_000.0
GENERATIONS: list[dict[str, Any]] = [
    {
        "step": 7,
        "generation": 1,
        "workers": 3,
        "died": [{"worker": 1, "how": "was killed by signal 9", "step": 8}],
        "joined": [],
    },
    {"step": 9, "generation": 2, "workers": 4, "died": [], "joined": [1]},
]
BATCH = 128


def synthetic_run(
    path: Path,
    *,
    steps: int = 200,
    ranks: int = 4,
    epochs: int = 5,
    slow_rank: int | None = 2,
    name: str | None = None,
    status: str = "finished",
    messages: Sequence[str] = (),
    timeline_steps: int = 0,
    trace: Trace | None = None,
    scaling: dict[str, Any] | None = None,
    seed: int = 0,
) -> RunFolder:
    """Write a run of `steps` steps on `ranks` workers, of which `slow_rank` is slow in backward."""
    folder = RunFolder(path)
    folder.create()
    steps_per_epoch = max(1, steps // epochs)
    info = RunInfo(
        name=path.name if name is None else name,
        created=BEGAN,
        updated=BEGAN + steps * 0.05,
        epochs=epochs,
        global_batch=BATCH,
        shards=ranks,
        workers=ranks,
        dataset_size=steps_per_epoch * BATCH,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        step=steps,
        model="DigitsNet",
        parameters=52_650,
        device="cpu",
        host="laptop",
        versions={"paceline": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        policy=[
            "The batch of 128 is cut into 4 shards of 32, so more workers change nothing.",
            "The learning rate stays at 0.1: the batch is the one it was chosen for.",
        ],
    )
    write_info(folder, replace(info, status=status))
    if scaling is not None:
        folder.scaling.write_text(json.dumps(scaling))
    if trace is not None:
        write_trace(trace, folder.pipeline_of(trace.step))
    for rank in range(ranks):
        _write_rank(folder, rank, info, slow_rank, random.Random(seed * 1000 + rank), messages)
        if timeline_steps:
            _write_timeline(folder, rank, timeline_steps, slow_rank, random.Random(rank))
    return folder


SCALING = {
    "schema": 1,
    "mode": "strong",
    "sizes": [
        {"workers": 1, "speedup": 1.0, "efficiency": 1.0, "step_s": 0.1},
        {"workers": 2, "speedup": 1.86, "efficiency": 0.93, "step_s": 0.0538},
        {
            "workers": 4,
            "speedup": 3.33,
            "efficiency": 0.8325,
            "step_s": 0.03,
            "lost": {
                "sharing": 0.0012,
                "communication": 0.0021,
                "waiting": 0.001,
                "data": 0.0003,
                "optimizer": 0.0002,
                "other": 0.0002,
            },
        },
    ],
    "predicted": [
        {"workers": 8, "speedup": 6.1, "network": "100 Gb/s"},
        {"workers": 64, "speedup": 39.0, "network": "100 Gb/s"},
        {"workers": 8, "speedup": 2.1, "network": "1 Gb/s"},
        {"workers": 64, "speedup": 3.4, "network": "1 Gb/s"},
    ],
    "suggestion": {"text": "Use a batch of 256: predicted gain 12 %."},
    "check": {"text": "Predicted 0.0311 s for 4 workers, measured 0.03 s: 4 % off."},
}


def _loss(progress: float) -> float:
    return 0.08 + 2.2 * math.exp(-6 * progress)


def _write_rank(
    folder: RunFolder,
    rank: int,
    info: RunInfo,
    slow_rank: int | None,
    rng: random.Random,
    messages: Sequence[str],
) -> None:
    ranks, steps = info.workers, info.step
    writer = EventWriter(folder, rank)
    begin = {"size": ranks, "pid": 1000 + rank, "host": info.host, "device": "cpu", "step": 0}
    writer.write("start", t=BEGAN, **begin)
    share = BATCH // ranks + (rank < BATCH % ranks)
    seconds = 0.036 if slow_rank is None else 0.048
    for text in messages:
        writer.write("message", t=BEGAN, text=text, level="info")
    for step in range(1, steps + 1):
        t = BEGAN + step * seconds
        loss = _loss(step / steps) * rng.uniform(0.85, 1.15) + rng.uniform(0, 0.02)
        right = (1 - math.exp(-5 * step / steps)) * 0.97 * rng.uniform(0.97, 1.02)
        slow = rank == slow_rank
        phases = {
            "data": 0.0021 * rng.uniform(0.9, 1.2),
            "forward": 0.0092 * rng.uniform(0.95, 1.05),
            "backward": (0.0275 if slow else 0.0152) * rng.uniform(0.95, 1.05),
            "transfer": 0.0021 * rng.uniform(0.9, 1.3),
            "optimizer": 0.0018,
            "other": 0.0006,
        }
        phases["wait"] = max(0.0002, seconds - sum(phases.values()))
        writer.write(
            "step",
            t=t,
            step=step,
            epoch=(step - 1) // (info.steps_per_epoch or 1),
            samples=share,
            seconds=round(sum(phases.values()), 6),
            metrics={
                "loss": [round(loss * share, 5), share],
                "accuracy": [round(min(1.0, right) * share), share],
            },
            phases={name: round(value, 6) for name, value in phases.items()},
            lr=0.1 * 0.5 ** (step * 4 // steps),
        )
        if rank == 0:
            _write_rank_0(writer, info, step, t, slow_rank)
    if rank == 0:
        writer.write("stop", t=BEGAN + steps * seconds, step=steps, reason="all epochs are done")
    writer.close()


def _write_rank_0(
    writer: EventWriter, info: RunInfo, step: int, t: float, slow_rank: int | None
) -> None:
    per_epoch = info.steps_per_epoch or 1
    if step % per_epoch == 0:
        epoch, progress = step // per_epoch - 1, step / info.step
        metrics = {"loss": _loss(progress), "accuracy": 0.97 * (1 - math.exp(-5 * progress))}
        facts = {"epoch": epoch, "step": step}
        writer.write(
            "epoch",
            t=t,
            **facts,
            metrics=metrics,
            seconds=per_epoch * 0.048,
            samples=per_epoch * BATCH,
        )
        held_out = {"loss": metrics["loss"] * 1.1 + 0.02, "accuracy": metrics["accuracy"] - 0.012}
        writer.write("evaluation", t=t, **facts, metrics=held_out, samples=500, seconds=0.2)
        writer.write(
            "checkpoint",
            t=t,
            step=step,
            name=f"step{step:08d}",
            bytes=423_104,
            seconds=0.031,
            metric=held_out["accuracy"],
            better="higher",
        )
    if step % per_epoch == per_epoch // 2:
        writer.write("noise", t=t, step=step, noise_scale=310.0, advice="Up to 300 pays off.")
    if step % 50 == 0 and slow_rank is not None:
        facts = {"step": step, "slow_rank": slow_rank, "phase": "backward", "steps": 50}
        writer.write("blame", t=t, **facts, slower_by_s=0.0123)


def _write_timeline(
    folder: RunFolder, rank: int, steps: int, slow_rank: int | None, rng: random.Random
) -> None:
    """A Chrome trace as `observe.spans` writes it: one event a line, no closing bracket."""
    make_private(folder.timeline)
    lines = ["["]

    def write(event: dict[str, Any]) -> None:
        lines.append(json.dumps({"pid": rank, **event}) + ",")

    def span(name: str, begin: float, end: float, lane: int, **args: Any) -> None:
        write({"name": name, "ph": "X", "ts": begin, "dur": end - begin, "tid": lane, "args": args})

    header = {"schema": 1, "rank": rank, "machine": "here"}
    write({"name": "paceline", "ph": "M", "ts": 0, "tid": 0, "args": header})
    clock, slowest_us = 5_000_000.0, 11_300 + 27_500
    for step in range(1, steps + 1):
        computed = clock + 2100
        span("data", clock, computed, 1, step=step)
        span("forward", computed, computed + 9200, 1, step=step)
        computed += 9200
        long = (27_500 if rank == slow_rank else 15_200) * rng.uniform(0.95, 1.0)
        for bucket in range(3):
            ready, facts = computed + long * (bucket + 1) / 3, {"step": step, "bucket": bucket}
            write({"name": "ready", "ph": "i", "s": "t", "ts": ready, "tid": 2, "args": facts})
            summed = clock + 11_300 + 27_500 * (bucket + 1) / 3 + 700
            span("in flight", ready, summed, 2, **facts)
        span("backward", computed, computed + long, 1, step=step)
        summed = clock + slowest_us + 700
        span("wait", computed + long, summed, 1, step=step, last=True)
        span("optimizer", summed, summed + 1800, 1, step=step + 1)
        clock = summed + 4100
    folder.timeline_of(rank).write_text("\n".join(lines) + "\n")


def _tensor(name: str, shape: list[int], rng: random.Random, device: str = "cpu") -> TensorFacts:
    values = [round(rng.gauss(0, 1), 4) for _ in range(6)]
    return TensorFacts(
        name=name,
        shape=shape,
        dtype="float32",
        device=device,
        bytes=4 * math.prod(shape),
        stats=Stats(min=-2.31, mean=0.012, max=2.74, zeros=0.0),
        first=values[: math.prod(shape)],
    )


def synthetic_trace(workers: int = 2, *, engine: EngineName = "DistributedDataParallel") -> Trace:
    """One step of a small model as a recording would have it."""
    build = _ddp_stages if engine == "DistributedDataParallel" else _dp_stages
    rng = random.Random(7)
    part = 100 // workers
    stages = build(workers, part, rng)
    stops = [
        SampleStop(
            stage="batch", worker=0 if "Dist" in engine else None, row=3, values=[0.4, -1.2]
        ),
        SampleStop(stage="forward", worker=0, row=3, values=[0.731]),
    ]
    gradients = [round(0.01 * (w + 1), 4) for w in range(workers)]
    mean = round(sum(gradients) / workers, 6)
    return Trace(
        engine=engine,
        step=1,
        created=BEGAN,
        workers=workers,
        devices=[f"cpu:{w}" for w in range(workers)],
        model=Model(name="Linear", parameters=11, bytes=44),
        batch_rows=100,
        dataset_rows=1000,
        has_values=True,
        seconds=0.004,
        stages=stages,
        sample=Sample(index=417, stops=stops),
        weight=Weight(
            name="weight",
            index=[0, 3],
            bucket=0,
            position=3,
            stops=[
                WeightStop(stage="backward", what="gradient", by_worker=gradients),
                WeightStop(
                    stage="all-reduce",
                    what="averaged gradient",
                    by_worker=[mean] * workers,
                    is_equal=True,
                ),
            ],
        ),
        check=Check(
            how="whole batch",
            text="same as one process on the whole batch: difference 3e-08",
            is_same=True,
            difference=3e-8,
            tolerance=1e-6,
            is_equal_on_all=True,
        ),
        training=TrainedEpochs(
            epochs=[
                Epoch(epoch=1, loss=0.81, seconds=0.4, accuracy=0.7, observation="a good start"),
                Epoch(epoch=2, loss=0.32, seconds=0.4, accuracy=0.9, observation="still falling"),
            ],
            observation="The loss fell by 60 % in two epochs.",
        ),
        prediction=SamplePrediction(
            index=417,
            input=[_tensor("x", [1, 10], rng)],
            layers=[
                Layer(name="0", kind="Linear", output=_tensor("0", [1, 8], rng), parameters=88),
                Layer(name="1", kind="ReLU", output=_tensor("1", [1, 8], rng)),
                Layer(name="2", kind="Linear", output=_tensor("2", [1, 1], rng), parameters=9),
            ],
            answer=Answer(kind="value", text="The model says 0.73, the dataset 0.70.", value=0.73),
        ),
    )


def _lanes(
    name: str, workers: int, shape: list[int], rng: random.Random, title: str = "worker"
) -> list[Part]:
    return [
        Part(
            title=f"{title} {worker}",
            worker=worker,
            device="cpu",
            tensors=[_tensor(name, shape, rng)],
            seconds=rng.uniform(0.0004, 0.0006),
        )
        for worker in range(workers)
    ]


def _ddp_stages(workers: int, rows: int, rng: random.Random) -> list[Stage]:
    def stage(name: str, text: str, parts: list[Part], moved: int = 0) -> Stage:
        times = [part.seconds for part in parts if part.seconds is not None]
        seconds = max(times) if times else None
        return Stage(
            name=name, title=name, text=text, parts=parts, bytes_moved=moved, seconds=seconds
        )

    data = [Part(title="dataset", tensors=[_tensor("x", [1000, 10], rng)])]
    bucket = [Part(title="bucket 0", tensors=[_tensor("bucket 0", [15], rng)])]
    return [
        stage("data", "The dataset: 1,000 rows, 1,000 x 10.", data),
        stage(
            "sampler",
            "Picks 100 rows of 1,000 for this step and deals them out: no row goes to two workers.",
            _lanes("row numbers", workers, [rows], rng),
        ),
        stage(
            "batch",
            "Every worker loads its own rows into its own memory.",
            _lanes("x", workers, [rows, 10], rng),
            4000,
        ),
        stage(
            "forward",
            "Every worker runs its own copy of the model on its own rows, all at the same time.",
            _lanes("output", workers, [rows, 1], rng),
        ),
        stage(
            "loss",
            "How wrong each worker's predictions are, as one number.",
            _lanes("loss", workers, [], rng),
        ),
        stage(
            "backward",
            "Every worker finds out how each weight should change for its own rows: its gradients. "
            "They still differ.",
            _lanes("gradients", workers, [11], rng),
        ),
        stage("buckets", "The gradients of 2 parameters are packed into one message.", bucket),
        stage(
            "all-reduce",
            "The workers add up their gradients and divide. Now all have the same ones.",
            _lanes("averaged", workers, [11], rng),
            60 * workers,
        ),
        stage(
            "update",
            "Every worker makes the same change: all copies are equal to the last bit.",
            _lanes("parameters", workers, [11], rng),
        ),
    ]


def _dp_stages(workers: int, rows: int, rng: random.Random) -> list[Stage]:
    data = [Part(title="dataset", tensors=[_tensor("x", [1000, 10], rng)])]
    batch = [Part(title="batch", device="cpu:0", tensors=[_tensor("x", [100, 10], rng)])]
    out = [Part(title="output", device="cpu:0", tensors=[_tensor("output", [100, 1], rng)])]
    return [
        Stage(name="data", title="input data", text="The dataset: 1,000 rows.", parts=data),
        Stage(name="batch", title="batch", text="100 rows are taken.", parts=batch),
        Stage(
            name="split",
            title="split",
            text="The batch is cut into 50 and 50 rows, a part for each device.",
            parts=_lanes("x", workers, [rows, 10], rng, "cpu"),
        ),
        Stage(
            name="forward",
            title="forward, in parallel",
            text="All copies compute at the same time, each on its own rows.",
            parts=_lanes("output", workers, [rows, 1], rng, "cpu"),
            seconds=0.0006,
        ),
        Stage(
            name="gather",
            title="gather",
            text="The outputs are joined on the first device, in the batch's order.",
            parts=out,
            bytes_moved=400,
        ),
    ]
