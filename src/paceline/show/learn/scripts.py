"""The small scripts that lessons run: a correct one, and some that are broken on purpose.

Each is what a reader might write, and returns plain data, by rank.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from paceline.checkpoint import load_weights
from paceline.data import DistributedSampler
from paceline.ddp import DistributedDataParallel
from paceline.dp import DataParallel
from paceline.group import find_tensors, init_process_group
from paceline.islands import Islands, Outer
from paceline.record import record_step, to_json
from paceline.show.trace.preparation import draw_weights
from paceline.show.trace.task import Task
from paceline.telemetry import start_spans, stop_spans

CPU = torch.device("cpu")
TIMED_ROWS, TIMED_STEPS = 512, 24
SPINS = 400_000


def prepared(task: Task, seed: int, folder: str) -> dict[str, Any]:
    """A complete script for several processes, which records its steps."""
    steps = []
    with init_process_group(device_id=CPU) as world:
        steps.append("meet: init_process_group()")
        if world.rank:
            draw_weights(task.model, seed + world.rank)  # every worker has different weights
        model = task.model.to(world.device)
        steps.append("place: model.to(world.device)")
        before = first_weight(model)
        wrapped = DistributedDataParallel(model)
        steps.append("wrap: DistributedDataParallel(model)")
        after = first_weight(model)
        sampler = DistributedSampler(task.dataset, seed=seed)
        loader = DataLoader(task.dataset, batch_size=8, sampler=sampler)
        steps.append("deal: DistributedSampler(data)")
        sampler.set_epoch(0)
        optimizer = task.optimizer(wrapped.parameters())
        take_step(wrapped, task, next(iter(loader)))
        optimizer.step()
        steps.append("train: forward, backward, step")
        if world.is_main:
            torch.save(wrapped.state_dict(), Path(folder, f"rank{world.rank}.pt"))
        world.barrier()
        steps.append("save: if world.is_main")
        return {
            "rank": world.rank,
            "size": world.size,
            "pid": os.getpid(),
            "threads": threading.active_count(),
            "before": before,
            "after": after,
            "steps": steps,
            "files": sorted(os.listdir(folder)),
        }


def with_another_model() -> str:
    """The last worker builds a model with one more output; returns the error, if any."""
    with init_process_group(device_id=CPU) as world:
        outputs = 5 + (world.rank == world.size - 1)
        return raised(lambda: DistributedDataParallel(nn.Linear(10, outputs)))


def without_averaging(seed: int) -> str:
    """Every worker steps with its own gradients; returns the error of comparing the copies."""
    with init_process_group(device_id=CPU) as world:
        model = DistributedDataParallel(nn.Linear(10, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(seed + world.rank)
        with model.no_sync():
            loss = model(torch.randn(8, 10, generator=generator)).square().mean()
            torch.autograd.backward(loss)
        optimizer.step()
        return raised(model.check_in_sync)


def without_sampler(task: Task, rows: int) -> dict[str, Any]:
    """A recorded step in which every worker takes the first rows: there is no sampler."""
    with init_process_group(device_id=CPU):
        model = DistributedDataParallel(task.model)
        optimizer = task.optimizer(model.parameters())
        own = list(range(rows))
        options: dict[str, Any] = {"dataset": task.dataset, "loss_fn": task.loss_fn, "values": True}
        with record_step(model, optimizer, **options) as recording:
            recording.note_batch(own)
            take_step(model, task, default_collate([task.dataset[row] for row in own]), recording)
            optimizer.step()
        assert recording.trace is not None
        return to_json(recording.trace)


def take_step(model: Any, task: Task, batch: Any, recording: Any = None) -> None:
    """Forward, loss and backward on one batch."""
    inputs, targets = batch
    output = model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    loss = task.loss_fn(output, targets)
    if recording is not None:
        recording.note_loss(loss, targets=targets)
    torch.autograd.backward(loss)


def timed_steps(folder: str, seed: int, slow_s: float) -> str:
    """A training of about a second, recorded; returns the messages about slow workers.

    The last worker may be slow on purpose.
    """
    with init_process_group(device_id=CPU) as world, redirect_stderr(io.StringIO()) as said:
        generator = torch.Generator().manual_seed(seed)
        own = torch.randn(TIMED_ROWS, 256, generator=generator)[world.rank :: world.size]
        start_spans(folder, world.rank)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(TIMED_STEPS):
            optimizer.zero_grad()
            output = model(own)
            if slow_s and world.rank == world.size - 1:
                time.sleep(slow_s)
            torch.autograd.backward(output.square().mean())
            optimizer.step()
        world.barrier()
        stop_spans()
        return said.getvalue().strip()


@dataclass(frozen=True, slots=True)
class Apart:
    """The results of a short training on islands."""

    locals: list[float]
    """The first weight on each island before the first round."""
    average: float
    """The first weight after it, equal on all."""
    weights: Tensor
    """All final weights."""
    rounds: list[int]
    """The steps that ended with a round."""


def train_apart(
    make: Callable[[], Task], batch: int, steps: int, options: Islands, islands: int
) -> Apart:
    """Train each island on its part of every batch, with rounds between them."""
    tasks = [make() for _ in range(islands)]
    optimizers = [task.optimizer(task.model.parameters()) for task in tasks]
    outers = [Outer(list(task.model.parameters()), [], options) for task in tasks]
    local, average, rounds, length = list[float](), 0.0, list[int](), len(tasks[0].dataset)
    for step in range(1, steps + 1):
        taken = [row % length for row in range((step - 1) * batch, step * batch)]
        parts = [taken[number::islands] for number in range(islands)]
        for task, optimizer, rows in zip(tasks, optimizers, parts, strict=True):
            optimizer.zero_grad()
            take_step(task.model, task, default_collate([task.dataset[row] for row in rows]))
            optimizer.step()
        if numbers := options.starts(step, steps):
            local = local or [first_weight(task.model) for task in tasks]
            sent = [outer.begin(step, numbers) for outer in outers]
            weights = [[float(len(rows))] for rows in parts]
            for own, outer in enumerate(outers):
                outer.finish(numbers, weights, sent, own)
            average = average if rounds else first_weight(tasks[0].model)
            rounds.append(step)
    return Apart(local, average, flat_weights(tasks[0].model), rounds)


def flat_weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


@dataclass(frozen=True, slots=True)
class SavedFile:
    """Weights saved under torch's DataParallel, and the results of loading them."""

    bare: list[str]
    """Names in the model."""
    names: list[str]
    """Names in the file."""
    refusal: str
    """The error of torch's `load_state_dict`; empty if it loads them."""
    loaded: list[str]
    renamed: dict[str, str]
    is_equal: bool
    """Whether the model has the saved bits after `load_weights`."""
    back: str
    """The error of torch's wrapped model for a file without `module.`."""


def save_and_load(make: Callable[[], Task]) -> SavedFile:
    """Save under torch's wrapper, then load without it: with torch, and with `load_weights`."""
    trained, fresh = make().model, make().model
    draw_weights(trained, 1)
    with tempfile.TemporaryDirectory(prefix="paceline-learn-") as folder:
        path = Path(folder, "model.pt")
        torch.save(nn.DataParallel(trained).state_dict(), path)
        state = torch.load(path, weights_only=True)
        refusal = raised(lambda: fresh.load_state_dict(state))
        report = load_weights(fresh, path)
    pairs = zip(trained.state_dict().values(), fresh.state_dict().values(), strict=True)
    return SavedFile(
        bare=list(trained.state_dict()),
        names=list(state),
        refusal=refusal,
        loaded=report.loaded,
        renamed=report.renamed,
        is_equal=all(torch.equal(*pair) for pair in pairs),
        back=raised(lambda: nn.DataParallel(fresh).load_state_dict(trained.state_dict())),
    )


def raised(call: Callable[[], object]) -> str:
    """The error that a call raises; empty if it succeeds."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def first_weight(model: nn.Module) -> float:
    return float(next(find_tensors(list(model.parameters()))).detach().reshape(-1)[0])


def plain_loop(task: Task, devices: list[str]) -> None:
    """Some steps on one device."""
    model = task.model
    optimizer = task.optimizer(model.parameters())
    for batch in islice(DataLoader(task.dataset, batch_size=8), 3):
        optimizer.zero_grad()
        take_step(model, task, batch)
        optimizer.step()


def parallel_loop(task: Task, devices: list[str]) -> None:
    """The same steps on several devices."""
    model = DataParallel(task.model, devices)
    optimizer = task.optimizer(model.parameters())
    for batch in islice(DataLoader(task.dataset, batch_size=8), 3):
        optimizer.zero_grad()
        take_step(model, task, batch)
        optimizer.step()


class Counting(nn.Module):
    """Records the rows and the process of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.pids: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        self.pids.add(os.getpid())
        return x


def spin() -> float:
    """Run plain Python several times; returns the median time."""
    times_s = []
    for _ in range(7):
        begin_s = time.perf_counter()
        total = 0
        for number in range(SPINS):
            total += number
        times_s.append(time.perf_counter() - begin_s)
    return median(times_s)  # the first and last may have run alone
