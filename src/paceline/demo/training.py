"""The demo's three trainings: on several workers, resumed on others, and alone to compare."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.comm.world import init_process_group
from paceline.data import DistributedSampler
from paceline.demo import (
    BATCH_ROWS,
    CLASSES,
    FEATURES,
    HELD_OUT_ROWS,
    HIDDEN,
    ROWS,
    DemoOptions,
    DemoOutcome,
)
from paceline.explain import report
from paceline.launcher import launch
from paceline.observe.run_folder import RunFolder, read_events
from paceline.run import Run, RunOptions

LEARNING_RATE = 0.3
NOISE = 0.1
RECORDED_STEP = 3
"""The step that is followed stage by stage, for the report."""


def train(options: DemoOptions, folder: Path) -> DemoOutcome:
    """Train on several workers, continue from their checkpoint with others, compare, report."""
    # The first optimizer imports half of torch: once here, not once per worker.
    make_model(options.seed)
    run, copy = RunFolder(folder / "demo"), RunFolder(folder / "resumed")
    results = launch(train_on_worker, options, str(run.path), workers=options.workers, label=False)
    events = read_events(run)
    saves = {event["step"]: event["name"] for event in events if event["kind"] == "checkpoint"}
    # Begin another run with one checkpoint of this one, as if it had stopped there.
    name = saves[options.checkpoint_step]
    copy.create()
    shutil.copytree(run.checkpoints / name, copy.checkpoints / name)
    later = launch(
        train_on_worker, options, str(copy.path), workers=options.other_workers, label=False
    )
    states = [result["state"] for result in results]
    return DemoOutcome(
        epochs=results[0]["epochs"],
        rows_by_worker=[result["rows"] for result in results],
        is_bit_equal=all(torch.equal(s[name], states[0][name]) for s in states for name in s),
        difference=_difference(states[0], train_alone(options)),
        resumed={
            "workers": options.other_workers,
            "step": options.checkpoint_step,
            "steps": later[0]["steps"],
            "difference": _difference(states[0], later[0]["state"]),
        },
        checkpoints=len(saves),
        noise=next((e["advice"] for e in reversed(events) if e["kind"] == "noise"), ""),
        folder=str(folder),
        report=str(report.write(run.path)),
    )


def train_on_worker(options: DemoOptions, folder: str) -> dict[str, Any]:
    """What each worker does: its shards of every batch, in step with the others."""
    with init_process_group(device_id=torch.device("cpu")):
        data, held_out = make_data(options.seed)
        model, optimizer = make_model(options.seed)
        run = Run(
            model,
            optimizer,
            data,
            global_batch=BATCH_ROWS,
            epochs=options.epochs,
            seed=options.seed,
            folder=folder,
            shards=options.shards,
            options=RunOptions(
                checkpoint_every=options.checkpoint_step,
                keep=2 * options.epochs + 2,
                noise_every=1,
                trace_step=RECORDED_STEP,
                timeline=True,
                progress="quiet",
                policy=[options.policy],
            ),
        )

        def score(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            x, y = batch
            scores = run.model(x)
            accuracy = (scores.argmax(1) == y).float().mean()
            return {"loss": F.cross_entropy(scores, y), "accuracy": accuracy}

        rows, steps = 0, 0
        table = []
        begin_s = time.perf_counter()
        for step in run:
            with step:
                for x, y in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            rows, steps = rows + step.local_samples, steps + 1
            if step.ends_epoch:
                seconds = time.perf_counter() - begin_s
                means = run.evaluate(score, held_out)
                table.append({"epoch": step.epoch + 1, **means, "seconds": seconds})
                begin_s = time.perf_counter()
        return {"epochs": table, "rows": rows, "steps": steps, "state": model.state_dict()}


def train_alone(options: DemoOptions) -> dict[str, Tensor]:
    """In one process, on whole batches in the same order, with plain torch; the parameters."""
    data, _ = make_data(options.seed)
    model, optimizer = make_model(options.seed)
    order = DistributedSampler(data, 1, 0, seed=options.seed)
    for epoch in range(options.epochs):
        order.set_epoch(epoch)
        for x, y in DataLoader(data, BATCH_ROWS, sampler=order):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def make_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Rows of random features; a plane divides the classes, with some rows on the wrong side.

    The second data set is more of the same kind, which nobody trains on.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = F.normalize(torch.randn(FEATURES, generator=generator), dim=0)
    x = torch.randn(ROWS + HELD_OUT_ROWS, FEATURES, generator=generator)
    noise = NOISE * torch.randn(ROWS + HELD_OUT_ROWS, generator=generator)
    y = (x @ direction + noise > 0).long()
    return TensorDataset(x[:ROWS], y[:ROWS]), TensorDataset(x[ROWS:], y[ROWS:])


def make_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers, the same for the same seed, and what trains them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def _difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)
