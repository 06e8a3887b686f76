"""`paceline demo`: a small model, trained on several workers before your eyes.

The data set is generated, so nothing is downloaded. Every batch of 100 rows is cut among the
workers, and the losses are weighted by their rows, so the result is that of one process on whole
batches: the demo trains that one too, and prints the difference.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from paceline.world import World

ROWS, FEATURES, HIDDEN, CLASSES = 1_000, 10, 32, 2
BATCH_ROWS = 100
LEARNING_RATE = 0.3
NOISE = 0.1
ROUNDING = 1e-4
"""More than rounding can explain between two trainings of this size."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to train."""

    workers: int = 2
    epochs: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= BATCH_ROWS:
            raise UsageError(
                f"--workers is {self.workers}, but a batch of {BATCH_ROWS} rows can be cut among "
                f"1 to {BATCH_ROWS} workers."
            )
        if self.epochs < 1:
            raise UsageError(f"--epochs is {self.epochs}.", advice="Train for at least one.")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed is {self.seed}.", advice="Use a number from 0 to 2**32 - 1.")


@dataclass(frozen=True, slots=True)
class Epoch:
    """One row of the table: how well all rows are predicted after this epoch."""

    epoch: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a training on several workers."""

    epochs: list[Epoch]
    rows_by_worker: list[int]
    """How many rows each worker has trained on, all epochs together."""
    parameters: int
    is_bit_equal: bool
    """Whether all workers ended with the same parameters, to the last bit."""
    difference: float
    """The largest between their parameters and those of one process on whole batches."""

    @property
    def is_as_promised(self) -> bool:
        return self.is_bit_equal and self.difference < ROUNDING


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline demo`."""
    parser.description = (
        f"Train a small model on {ROWS:,} generated rows with several workers on the CPU, and "
        "compare the result with one process on whole batches."
    )
    default = Options()
    for name, help_text in (
        ("workers", "how many processes share every batch"),
        ("epochs", "how many passes over the data"),
        ("seed", "generates the data, the model and the order of the rows"),
    ):
        value = getattr(default, name)
        parser.add_argument(
            f"--{name}",
            metavar="N",
            type=int,
            default=value,
            help=f"{help_text} (default: {value})",
        )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: argparse.Namespace) -> int:
    """Train and print; 1 if the workers did not end as promised."""
    options = Options(args.workers, args.epochs, args.seed)
    if not args.json:
        print(introduction(options), flush=True)  # importing torch takes a moment
    with warnings.catch_warnings():
        # torch without NumPy says so once; nothing here needs it.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        outcome = train(options)
    print(json.dumps({**asdict(options), **asdict(outcome)}) if args.json else report(outcome))
    return 0 if outcome.is_as_promised else 1


def train(options: Options) -> Outcome:
    """Train on several workers, and once more in this process to compare."""
    import torch

    from paceline.launcher import launch

    # The first optimizer imports half of torch: once here, not once per worker.
    make_optimizer(make_model(options.seed))
    results = launch(train_on_worker, options, workers=options.workers, label=False)
    states = [result["state"] for result in results]
    first, alone = states[0], train_alone(options)
    return Outcome(
        epochs=[Epoch(*row) for row in results[0]["epochs"]],
        rows_by_worker=[result["rows"] for result in results],
        parameters=sum(tensor.numel() for tensor in first.values()),
        is_bit_equal=all(torch.equal(s[name], first[name]) for s in states for name in first),
        difference=max((first[name] - alone[name]).abs().max().item() for name in first),
    )


def train_on_worker(options: Options) -> dict[str, Any]:
    """What each worker does: its part of every batch, in step with the others."""
    import torch
    from torch.nn import functional as F

    from paceline.ddp import DistributedDataParallel
    from paceline.world import init_process_group

    with init_process_group(device_id=torch.device("cpu")) as world:
        data = make_data(options.seed)
        model = DistributedDataParallel(make_model(options.seed))
        optimizer = make_optimizer(model)
        rows = 0
        table = []
        for epoch, loader in enumerate(epochs(data, options, world.size, world.rank)):
            begin_s = time.perf_counter()
            for x, y in loader:
                optimizer.zero_grad()
                with model.weighted(len(y)):
                    F.cross_entropy(model(x), y, reduction="sum").backward()
                optimizer.step()
                rows += len(y)
            seconds = time.perf_counter() - begin_s
            table.append((epoch + 1, *evaluate(model, data, world), seconds))
        return {"epochs": table, "rows": rows, "state": model.state_dict()}


def train_alone(options: Options) -> dict[str, Tensor]:
    """The same training with plain torch, in one process on whole batches; its parameters."""
    from torch.nn import functional as F

    model = make_model(options.seed)
    optimizer = make_optimizer(model)
    for loader in epochs(make_data(options.seed), options, size=1, rank=0):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


def evaluate(model: nn.Module, data: TensorDataset, world: World) -> tuple[float, float]:
    """Loss and accuracy over all rows, each row counted once by one worker."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    from paceline import comm
    from paceline.sampler import DistributedSampler

    mine = DistributedSampler(data, world.size, world.rank, shuffle=False)
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=BATCH_ROWS, sampler=mine):
            scores = model(x)
            loss = F.cross_entropy(scores, y, reduction="sum")
            hits = (scores.argmax(dim=1) == y).sum()
            sums += torch.stack([loss, hits, torch.tensor(len(y))])
    comm.all_reduce(world.group, sums, "Adding up the evaluation")
    loss_sum, hits_sum, count = sums.tolist()
    return loss_sum / count, hits_sum / count


def epochs(
    data: TensorDataset, options: Options, size: int, rank: int
) -> Iterator[DataLoader[tuple[Tensor, ...]]]:
    """For each epoch, one worker's part of every batch."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    from paceline.sampler import DistributedBatchSampler

    whole = BatchSampler(RandomSampler(data), BATCH_ROWS, drop_last=False)
    parts = DistributedBatchSampler(whole, size, rank, seed=options.seed, split=True)
    for epoch in range(options.epochs):
        parts.set_epoch(epoch)
        yield DataLoader(data, batch_sampler=parts)


def make_data(seed: int) -> TensorDataset:
    """Rows of random features; a plane divides the classes, with some rows on the wrong side."""
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    direction = torch.nn.functional.normalize(torch.randn(FEATURES, generator=generator), dim=0)
    noise = NOISE * torch.randn(ROWS, generator=generator)
    return TensorDataset(x, (x @ direction + noise > 0).long())


def make_model(seed: int) -> nn.Module:
    """Two layers, the same for the same seed."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def introduction(options: Options) -> str:
    """What is about to happen, in plain words."""
    steps = ROWS // BATCH_ROWS
    lines = [
        f"Training one model on {_count(options.workers, 'worker')}, each a process on the CPU.",
        "",
        f"  data    {ROWS:,} rows of {FEATURES} features, two classes (seed {options.seed})",
        f"  model   {FEATURES} -> {HIDDEN} -> {CLASSES}, a copy on each worker, equal at the start",
        f"  steps   {_count(options.epochs, 'epoch')} of {steps} steps of {BATCH_ROWS} rows",
        "",
        *_picture(options.workers),
        "",
    ]
    return "\n".join(lines)


def report(outcome: Outcome) -> str:
    """The table of epochs, and what was checked."""
    table = [
        f"{row.epoch:>7}   {row.loss:>8.4f}   {row.accuracy:>8.1%}   {row.seconds:>7.3f}"
        for row in outcome.epochs
    ]
    workers = len(outcome.rows_by_worker)
    equal = f"The {workers} workers' parameters are equal to the last bit."
    if workers == 1:
        equal = "One worker has nobody to differ from."
    elif not outcome.is_bit_equal:
        equal = f"The {workers} workers' parameters are NOT EQUAL."
    reference = "The same training in one process gives the same parameters"
    if outcome.difference >= ROUNDING:
        reference = "The same training in one process gives OTHER parameters"
    lines = [
        f"{'epoch':>7}   {'loss':>8}   {'accuracy':>8}   {'seconds':>7}",
        *table,
        "",
        equal,
        f"{reference}: difference {outcome.difference:.1e}.",
    ]
    return "\n".join(lines)


def _picture(workers: int) -> list[str]:
    """How a batch is cut, and where the gradients meet."""
    share, longer = divmod(BATCH_ROWS, workers)
    paths = [
        f"worker {rank}: {_count(share + (rank < longer), 'row')} -> forward -> backward"
        for rank in range(workers)
    ]
    if workers > 4:
        paths = [*paths[:2], "...", paths[-1]]
    width = max(map(len, paths))
    goals = ["gradients summed,", f"divided by {BATCH_ROWS},", "same step on all"]
    lines: list[str] = []
    for path, goal in zip_longest(paths, goals, fillvalue=""):
        batch, arrow = ("  ", "  ") if lines else (f"  {BATCH_ROWS} rows -", "->")
        middle = f"+-> {path:<{width}} -+" if path else ""
        lines.append(f"{batch:<12}{middle:<{width + 7}}{arrow} {goal}".rstrip())
    return lines


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
