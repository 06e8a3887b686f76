"""The demo's three trainings: on several workers, resumed on others, and alone to compare."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.comm.world import init_process_group
from paceline.demo.options import BATCH_ROWS, RECORDED_STEP, Options
from paceline.demo.outcome import Epoch, Outcome, Resumed
from paceline.demo.task import (
    make_data,
    make_held_out_data,
    make_model,
    make_optimizer,
    train_alone,
)
from paceline.demo.words import policy
from paceline.explain import report
from paceline.launcher import launch
from paceline.observe import spans
from paceline.observe.run_folder import Event, RunFolder, read_events
from paceline.record.step import record_step
from paceline.run import Run, RunOptions


def train(options: Options, folder: Path) -> Outcome:
    """Train on several workers, go on from their checkpoint with others, compare, report."""
    # The first optimizer imports half of torch: once here, not once per worker.
    make_optimizer(make_model(options.seed))
    run, copy = RunFolder(folder / "demo"), RunFolder(folder / "resumed")
    results = launch(train_on_worker, options, str(run.path), workers=options.workers, label=False)
    events = read_events(run)
    _copy_checkpoint(run, copy, events, options.checkpoint_step)
    later = launch(
        train_on_worker, options, str(copy.path), workers=options.other_workers, label=False
    )
    states = [result["state"] for result in results]
    return Outcome(
        epochs=[Epoch(*row) for row in results[0]["epochs"]],
        rows_by_worker=[result["rows"] for result in results],
        parameters=sum(tensor.numel() for tensor in states[0].values()),
        is_bit_equal=all(torch.equal(s[name], states[0][name]) for s in states for name in s),
        difference=_difference(states[0], train_alone(options)),
        resumed=Resumed(
            workers=options.other_workers,
            step=options.checkpoint_step,
            steps=later[0]["steps"],
            difference=_difference(states[0], later[0]["state"]),
        ),
        checkpoints=sum(event["kind"] == "checkpoint" for event in events),
        noise=next((e["advice"] for e in reversed(events) if e["kind"] == "noise"), ""),
        folder=str(folder),
        report=str(report.write(run.path)),
    )


def train_on_worker(options: Options, folder: str) -> dict[str, Any]:
    """What each worker does: its shards of every batch, in step with the others."""
    with init_process_group(device_id=torch.device("cpu")) as world, timeline(folder, world.rank):
        model = make_model(options.seed)
        optimizer = make_optimizer(model)
        held_out = make_held_out_data(options.seed)
        run = Run(
            model,
            optimizer,
            make_data(options.seed),
            global_batch=BATCH_ROWS,
            epochs=options.epochs,
            seed=options.seed,
            folder=folder,
            shards=options.shards,
            options=RunOptions(
                checkpoint_every=options.checkpoint_step,
                keep=2 * options.epochs + 2,
                noise_every=1,
                progress="quiet",
                policy=[policy(options)],
            ),
        )

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
            x, y = batch
            scores = run.model(x)
            loss = F.cross_entropy(scores, y, reduction="sum")
            return {"loss": (loss, len(y)), "accuracy": ((scores.argmax(1) == y).sum(), len(y))}

        rows, steps = 0, 0
        table = []
        begin_s = time.perf_counter()
        for step in run:
            with recorded(run, optimizer, step.number, folder) as note_loss, step:
                for x, y in step.batches():
                    loss = F.cross_entropy(run.model(x), y, reduction="sum")
                    note_loss(loss, len(y))
                    step.backward(loss, reduction="sum")
            rows, steps = rows + step.local_samples, steps + 1
            if step.ends_epoch:
                seconds = time.perf_counter() - begin_s
                means = run.evaluate(score, held_out, reduction="sum")
                table.append((step.epoch + 1, means["loss"], means["accuracy"], seconds))
                begin_s = time.perf_counter()
        return {"epochs": table, "rows": rows, "steps": steps, "state": model.state_dict()}


@contextmanager
def timeline(folder: str, rank: int) -> Iterator[None]:
    """Record when this worker does what, for the report."""
    place = RunFolder(folder)
    place.create()
    spans.start(place.timeline_of(rank), rank)
    try:
        yield
    finally:
        spans.stop()


@contextmanager
def recorded(
    run: Run, optimizer: Optimizer, step: int, folder: str
) -> Iterator[Callable[[Tensor, int], None]]:
    """Follow one of the steps stage by stage, for the report; gives what wants to know the loss."""
    if step != RECORDED_STEP:
        yield lambda loss, rows: None
        return
    with record_step(run.model, optimizer, step=step, folder=folder, values=True) as recording:
        yield recording.note_loss


def _copy_checkpoint(run: RunFolder, copy: RunFolder, events: list[Event], step: int) -> None:
    """Begin another run with one checkpoint of this one, as if it had stopped there."""
    name = next(e["name"] for e in events if e["kind"] == "checkpoint" and e["step"] == step)
    copy.create()
    shutil.copytree(run.checkpoints / name, copy.checkpoints / name)


def _difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)
