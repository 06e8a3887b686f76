"""The stages of a step of which nobody recorded anything: from the run's settings alone.

There are sizes in it and no values, because nothing else is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.report.markup import count
from paceline.observe.run_folder import RunInfo
from paceline.record.stages import Model, Part, Stage, Trace


def imagined(info: RunInfo) -> Trace:
    """The stages of any step of this run, from its settings alone."""
    workers, batch = info.workers, info.global_batch
    share = [batch // workers + (rank < batch % workers) for rank in range(workers)]

    def each(title: str, lines: Sequence[str]) -> list[Part]:
        return [
            Part(title=f"{title} {rank}", worker=rank, text=lines[rank]) for rank in range(workers)
        ]

    def same(line: str) -> list[str]:
        return [line] * workers

    samples = count(batch, "sample")
    stages = [
        Stage(
            name="batch",
            title="A batch is drawn",
            text=f"Each step trains on {samples}.",
            parts=[Part(title="batch", text=samples)],
        ),
        Stage(
            name="split",
            title="It is dealt out",
            text=f"{count(workers, 'worker')} share it; no sample goes to two of them.",
            parts=each("worker", [count(n, "sample") for n in share]),
        ),
        Stage(
            name="forward",
            title="Every worker computes the loss",
            text="All have the same model, and each computes on its own samples.",
            parts=each("worker", same("loss")),
        ),
        Stage(
            name="backward",
            title="Every worker computes gradients",
            text="They say how to change each weight; each worker finds different ones.",
            parts=each("worker", same("gradients")),
        ),
        Stage(
            name="reduce",
            title="The gradients are averaged",
            text="Workers exchange them, and all end with the same average.",
            parts=[Part(title="average", text="of all gradients")],
        ),
        Stage(
            name="update",
            title="All make the same update",
            text="Equal weights and equal gradients give equal weights: the copies stay in step.",
            parts=each("worker", same("same weights")),
        ),
    ]
    return Trace(
        engine="DistributedDataParallel",
        step=0,
        created=info.created,
        workers=workers,
        devices=[info.device] * workers,
        model=Model(name=info.model, parameters=info.parameters, bytes=0),
        batch_rows=batch,
        stages=stages,
    )
