"""The demo's trainings: on several workers, resumed on others, on one, and in plain torch.

With `--kill`, `paceline run` starts this module on every worker.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.data import DistributedSampler
from paceline.files import RunFolder, encode, read_events
from paceline.group import init_process_group
from paceline.launcher import launch
from paceline.run import Run, RunOptions, hash_state
from paceline.show import report
from paceline.show.demo import BATCH_ROWS, DemoOptions, DemoOutcome
from paceline.show.trace.task import Task, built_in
from paceline.telemetry import count_text


def train(task: Task, options: DemoOptions, folder: Path) -> DemoOutcome:
    """Train on several workers, continue from their checkpoint with others, compare, report."""
    # The first optimizer imports the compiler: here once, before workers are forked, not in each.
    alone = train_alone(task, options)
    on_one = train_run(options, str(folder / "on-one"), same_bits=True)
    run, exact, copy = (RunFolder(folder / name) for name in ("demo", "same-bits", "resumed"))
    ends = launch(
        train_on_worker,
        *(options, str(run.path), str(exact.path)),
        workers=options.workers,
        label=False,
    )
    states = [usual for usual, _ in ends]
    events: dict[str, list[Any]] = {}
    for event in read_events(run):
        events.setdefault(event["kind"], []).append(event)
    name_by_step = {event["step"]: event["name"] for event in events["checkpoint"]}
    # Begin another run with a checkpoint of this one, as if this one had stopped there.
    name = name_by_step[options.checkpoint_step]
    copy.create()
    shutil.copytree(exact.checkpoints / name, copy.checkpoints / name)
    later = launch(
        train_on_worker, options, None, str(copy.path), workers=options.other_workers, label=False
    )
    return DemoOutcome(
        epochs=[
            {"epoch": done["epoch"] + 1, **scores["metrics"], "seconds": done["seconds"]}
            for done, scores in zip(events["epoch"], events["evaluation"], strict=True)
        ],
        rows_by_worker=[
            sum(event["samples"] for event in events["step"] if event["rank"] == rank)
            for rank in range(options.workers)
        ],
        is_bit_equal=are_bit_equal(states),
        difference=largest_difference(states[0], alone),
        hashes={
            "1 worker": hash_state(on_one)["all"],
            count_text(options.workers, "worker"): hash_state(ends[0][1])["all"],
            count_text(options.other_workers, "worker"): hash_state(later[0][1])["all"],
        },
        resumed={
            "workers": options.other_workers,
            "step": options.checkpoint_step,
            "steps": sum((e["kind"], e["rank"]) == ("step", 0) for e in read_events(copy)),
        },
        checkpoints=len(name_by_step),
        noise=events["noise"][-1]["advice"],
        folder=str(run.path),
        report=str(report.write(run.path)),
    )


def train_on_worker(
    options: DemoOptions, folder: str | None, exact: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each worker's part: train, and train again with `same_bits`."""
    with init_process_group(device_id=torch.device("cpu")):
        usual = {} if folder is None else train_run(options, folder)
        return usual, train_run(options, exact, same_bits=True)


def main() -> None:
    """One worker of a training in which another one is killed: there is no code for that."""
    folder, pause_s, *numbers = sys.argv[1:]
    state = train_run(DemoOptions(*map(int, numbers)), folder, pause_s=float(pause_s))
    Path(folder, f"parameters{os.environ['RANK']}").write_bytes(encode(state))


def train_run(
    options: DemoOptions, folder: str, *, same_bits: bool = False, pause_s: float = 0.0
) -> dict[str, Tensor]:
    """Train on this worker's shards of every batch, with the other workers if there are any."""
    task = built_in(options.seed)
    run = Run(
        task.model,
        task.optimizer(task.model.parameters()),
        task.dataset,
        global_batch=BATCH_ROWS,
        epochs=options.epochs,
        seed=options.seed,
        folder=folder,
        shards=options.shards,
        options=RunOptions(
            checkpoint_every=options.checkpoint_step,
            keep=2 * options.epochs + 2,
            noise_every=0 if same_bits else 1,
            trace_step=0 if same_bits else 3,
            timeline=not same_bits,
            same_bits=same_bits,
            progress="quiet",
            policy=[options.policy],
        ),
    )

    def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        scores = run.model(x)
        accuracy = ((scores > 0) == (y > 0)).float().mean()
        return {"loss": task.loss_fn(scores, y), "accuracy": accuracy}

    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(task.loss_fn(run.model(x), y))
            time.sleep(pause_s)
        if step.ends_epoch:
            run.evaluate(score, task.evaluation)
    return task.model.state_dict()


def train_alone(task: Task, options: DemoOptions) -> dict[str, Tensor]:
    """Train in plain torch, in one process on whole batches in the same order."""
    optimizer = task.optimizer(task.model.parameters())
    order = DistributedSampler(task.dataset, 1, 0, seed=options.seed)
    for epoch in range(options.epochs):
        order.set_epoch(epoch)
        for x, y in DataLoader(task.dataset, BATCH_ROWS, sampler=order):
            optimizer.zero_grad()
            task.loss_fn(task.model(x), y).backward()
            optimizer.step()
    return task.model.state_dict()


def are_bit_equal(states: Sequence[dict[str, Tensor]]) -> bool:
    return all(torch.equal(state[name], states[0][name]) for state in states for name in state)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


if __name__ == "__main__":
    main()
