"""Overhead of `Run` over a hand-written loop with the same model, data, engine and optimizer.

The loop has a `DataLoader`, a `DistributedSampler` and our DistributedDataParallel. It is compared
with `Run` without a folder, with one (an event per step), and with a checkpoint every so many
steps. All run in the same processes, one thread each, and alternate in intervals; an interval ends
when the slowest rank ends it, and has as many steps as lie between two checkpoints.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.models import MODELS, Model
from benchmarks.spread import ratio, rotated, slowest
from benchmarks.tables import print_table
from paceline import DistributedDataParallel, DistributedSampler, Run, RunOptions, World
from paceline.testing import run_processes

LOOP = "written by hand"
ROWS, LENGTH = 512, 2**20
"""So many different samples, repeated so that no epoch ends while it is measured."""

Steps = Iterator[None]
"""Every `next` is one step of training."""


class Repeated(Dataset[Any]):
    """A few samples, repeated to a large dataset."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index % ROWS]


def data_of(model: Model) -> tuple[Repeated, int]:
    """A dataset like the model's batches, and the number of rows of a batch."""
    generator = torch.Generator().manual_seed(0)
    batches = [model.batch(generator)]
    rows = len(batches[0][0])
    batches += [model.batch(generator) for _ in range(-(-ROWS // rows) - 1)]
    inputs, targets = zip(*batches, strict=True)
    return Repeated(TensorDataset(torch.cat(inputs), torch.cat(targets))), rows


def by_hand(world: World, model: Model) -> Steps:
    dataset, rows = data_of(model)
    ddp = DistributedDataParallel(_seeded(model))
    optimizer = torch.optim.AdamW(ddp.parameters())
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=rows, sampler=sampler)
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            model.loss(ddp, (x, y)).backward()
            optimizer.step()
            yield


def with_run(
    world: World,
    model: Model,
    folder: str | None,
    checkpoint_every: int,
    *,
    shards: int | None = None,
    **options: Any,
) -> Steps:
    dataset, rows = data_of(model)
    net = _seeded(model)
    run = Run(
        net,
        torch.optim.AdamW(net.parameters()),
        dataset,
        global_batch=rows * world.size,
        epochs=10**6,
        folder=folder,
        shards=shards,
        world=world,
        options=RunOptions(
            progress="quiet",
            handle_signals=False,
            checkpoint_every=checkpoint_every,
            keep=2,
            **options,
        ),
    )
    for step in run:
        with step:
            for x, y in step.batches():
                loss: Tensor = model.loss(run.model, (x, y))
                step.backward(loss)
        yield


def _seeded(model: Model) -> nn.Module:
    torch.manual_seed(0)
    return model.build()


def measure(
    world: World, name: str, stretch: int, rounds: int, folder: str
) -> dict[str, list[float]]:
    """The seconds of each interval, by contestant, on this rank."""
    torch.set_num_threads(1)
    model = MODELS[name]
    makers: dict[str, Callable[[], Steps]] = {
        LOOP: lambda: by_hand(world, model),
        "Run": lambda: with_run(world, model, None, 0),
        "Run, with a folder": lambda: with_run(world, model, f"{folder}/events", 0),
        f"Run, a checkpoint every {stretch} steps": lambda: with_run(
            world, model, f"{folder}/checkpoints", stretch
        ),
    }
    return take_turns(world, {each: make() for each, make in makers.items()}, stretch, rounds)


def take_turns(
    world: World, contestants: dict[str, Steps], stretch: int, rounds: int
) -> dict[str, list[float]]:
    """The seconds of each interval, by contestant, after a few warm-up steps of each."""
    seconds: dict[str, list[float]] = {each: [] for each in contestants}
    for steps in contestants.values():
        for _ in range(3):
            next(steps)
    for number in range(rounds):
        for each in rotated(list(contestants), number):
            world.barrier()
            begin = perf_counter()
            for _ in range(stretch):
                next(contestants[each])
            seconds[each].append(perf_counter() - begin)
    for steps in contestants.values():
        steps.close()  # type: ignore[attr-defined]
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt-17M", choices=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--steps", type=int, default=50, help="steps per interval (default 50)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a short test that it runs")


def main(args: argparse.Namespace) -> dict[str, Any]:
    stretch, rounds = (4, 2) if args.quick else (args.steps, args.rounds)
    folder = tempfile.mkdtemp(prefix="paceline-run-overhead-")
    try:
        ranks = run_processes(
            args.ranks, measure, args.model, stretch, rounds, folder, timeout_s=3600
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = {name: slowest([rank[name] for rank in ranks]) for name in ranks[0]}
    rows = []
    for name, times in seconds.items():
        against = ratio(times, seconds[LOOP])
        rows.append(
            {
                "contestant": name,
                "ms per step": round(statistics.median(times) / stretch * 1e3, 2),
                f"/ {LOOP}": round(against.median, 3),
                "quartiles": f"{against.low:.3f} to {against.high:.3f}",
                "best": round(min(times) / min(seconds[LOOP]), 3),
            }
        )
    print_table(f"{args.model}, {args.ranks} ranks, stretches of {stretch} steps", rows)
    return {f"{args.model}, {args.ranks} ranks, stretches of {stretch} steps": rows}
