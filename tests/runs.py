"""Small trainings for tests of `Run`: data, models, and what is left of a training afterwards.

A training keeps its own ledger of samples: the dataset yields each sample's index with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.checkpoint import Written
from paceline.files.run_folder import Event, RunInfo
from paceline.group.world import World
from paceline.run import Message, Run, RunOptions, StepReport, Summary
from paceline.testing import seeded

WIDTH, CLASSES = 6, 3
QUIET = RunOptions(progress="quiet")


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor, int]]):
    """`count` rows with a label and the row's own number."""

    def __init__(self, count: int = 50) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


def mlp() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)))


@dataclass
class Trained:
    """What a training left on one worker."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    """By step, the sum of this worker's losses and over how many samples."""
    ledger: list[tuple[int, int, int]] = field(default_factory=list)
    """Epoch, step and index of every sample this worker has computed, in order."""
    between: list[float] = field(default_factory=list)
    """Random numbers drawn after each step."""


def train(
    world: World | None = None,
    build: Callable[[], nn.Module] = mlp,
    dataset: Any = None,
    *,
    stop_after: int | None = None,
    weigh: bool = True,
    reduction: str = "sum",
    options: RunOptions = QUIET,
    global_batch: int | None = 8,
    epochs: int = 2,
    lr: float = 0.05,
    **arguments: Any,
) -> Trained:
    """Train with AdamW, whose moments show a wrong gradient for long; stop early on request."""
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
    run = Run(
        net,
        optimizer,
        Rows() if dataset is None and "loader" not in arguments else dataset,
        global_batch=global_batch,
        epochs=epochs,
        scheduler=scheduler,
        world=world,
        options=options,
        **arguments,
    )
    trained = Trained()
    for step in run:
        with step:
            total = [0.0, 0.0]
            for x, y, indices in step.batches():
                loss = F.cross_entropy(run.model(x), y, reduction=reduction)
                step.backward(loss, items=len(y) if weigh else None, reduction=reduction)
                factor = len(y) if reduction == "mean" else 1
                total = [total[0] + loss.item() * factor, total[1] + len(y)]
                trained.ledger += [(step.epoch, step.number, i) for i in indices.tolist()]
        trained.losses[step.number] = total
        trained.between.append(torch.rand(()).item())
        if step.number == stop_after:
            run.save()
            break
    trained.parameters = {name: p.detach().clone() for name, p in net.state_dict().items()}
    return trained


class Told:
    """A sink that keeps what it is told, by method."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def of(self, method: str) -> list[Any]:
        """What was told by calls of this method."""
        return [args[0] if len(args) == 1 else args for name, args in self.calls if name == method]

    def start(self, info: RunInfo, step: int, lines: Sequence[str]) -> None:
        self.calls.append(("start", (info, step, lines)))

    def step(self, report: StepReport) -> None:
        self.calls.append(("step", (report,)))

    def epoch(self, summary: Summary) -> None:
        self.calls.append(("epoch", (summary,)))

    def evaluation(self, summary: Summary) -> None:
        self.calls.append(("evaluation", (summary,)))

    def message(self, message: Message) -> None:
        self.calls.append(("message", (message,)))

    def checkpoint(self, written: Written) -> None:
        self.calls.append(("checkpoint", (written,)))

    def stop(self, step: int, status: str, reason: str) -> None:
        self.calls.append(("stop", (step, status, reason)))


def losses(workers: list[Trained]) -> dict[int, float]:
    """The mean loss of every step, over the samples of all workers."""
    steps = sorted({step for each in workers for step in each.losses})
    sums = {
        step: [sum(each.losses.get(step, [0, 0])[i] for each in workers) for i in (0, 1)]
        for step in steps
    }
    return {step: total / count for step, (total, count) in sums.items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], **tolerance)


def still_valid(events: Iterable[Event]) -> list[Event]:
    """The events without those that a restart has undone, in the order of their times."""
    kept: list[Event] = []
    for event in sorted(events, key=lambda event: event["t"]):
        if event["kind"] == "start" and event["rank"] == 0:
            kept = [each for each in kept if not _is_undone(each, event.get("step", 0))]
        kept.append(event)
    return kept


def _is_undone(event: Event, step: int) -> bool:
    is_progress = event["kind"] not in {"start", "stop", "message"}
    return is_progress and isinstance(event.get("step"), int) and event["step"] > step
