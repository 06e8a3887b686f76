"""A step of a `Run`, recorded: its batches, its weights and its update are the run's own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.group.world import World
from paceline.record import read, record_step
from paceline.record.stages import Trace
from paceline.run import Run, RunOptions
from paceline.testing import run_ranks, seeded

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
QUIET = RunOptions(progress="quiet", handle_signals=False)


def train(
    world: World, folder: Path | None, chosen: int, shards: int, noise: int = 0
) -> tuple[Trace | None, list[Tensor]]:
    """Two epochs of a run; the trace of one step, and the weights at the end."""
    net = seeded(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    data = TensorDataset(X, Y)
    run = Run(
        net,
        optimizer,
        data,
        global_batch=20,
        epochs=2,
        shards=shards,
        world=world,
        options=replace(QUIET, noise_every=noise),
    )
    trace = None
    for step in run:
        is_chosen = step.number == chosen
        watch = record_step(run.model, optimizer, step=chosen, folder=folder, dataset=data)
        with watch if is_chosen else nullcontext() as recording, step:
            for x, y in step.batches():
                loss = F.cross_entropy(run.model(x), y, reduction="sum")
                if recording is not None:
                    recording.note_loss(loss, weight=len(y))
                step.backward(loss, reduction="sum")
        if recording is not None:
            trace = recording.trace
    return trace, [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize(
    ("size", "shards", "chosen", "noise"),  # the third batch of an epoch has ten rows only
    [
        (1, 1, 3, 0),
        (1, 3, 2, 0),
        (1, 3, 2, 1),
        (2, 2, 3, 0),
        (2, 5, 2, 0),
        (2, 5, 3, 1),
        (3, 3, 2, 1),
    ],
)
def test_a_step_of_a_run_is_the_same_as_one_process_on_the_whole_batch(
    size: int, shards: int, chosen: int, noise: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    trace, weights = run_ranks(size, train, folder, chosen, shards, noise)[0]
    assert trace is not None
    assert trace.check is not None
    assert (trace.check.how, trace.check.is_same) == ("whole batch", True)
    assert trace.check.is_equal_on_all is (None if size == 1 else True)
    assert trace.batch_rows == (10 if chosen == 3 else 20)
    assert read(folder / "pipeline" / f"step{chosen}.json") == trace
    _, undisturbed = run_ranks(size, train, None, -1, shards, noise)[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, undisturbed, strict=True))


def test_a_worker_without_rows_takes_part() -> None:
    def body(world: World) -> Trace | None:
        net = seeded(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = TensorDataset(X[:1], Y[:1])
        run = Run(net, optimizer, data, global_batch=2, epochs=1, world=world, options=QUIET)
        for step in run:
            with record_step(run.model, optimizer, step=1) as recording, step:
                for x, y in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
        return recording.trace

    trace = run_ranks(2, body)[0]
    assert trace is not None
    assert trace.check is not None
    assert (trace.check.how, trace.check.is_same) == ("whole batch", True)
    assert trace.check.is_equal_on_all


def test_a_step_that_fails_and_is_tried_again_is_recorded_once() -> None:
    def body(world: World) -> int:
        net = seeded(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run = Run(
            net,
            optimizer,
            TensorDataset(X, Y),
            global_batch=25,
            epochs=1,
            world=world,
            options=QUIET,
        )
        traces: list[Trace | None] = []
        fails = True
        for step in run:
            try:
                with record_step(run.model, optimizer, step=step.number) as recording, step:
                    for x, y in step.batches():
                        step.backward(F.cross_entropy(run.model(x), y))
                    if fails:
                        fails = False
                        raise ZeroDivisionError
                traces.append(recording.trace)
            except ZeroDivisionError:
                continue
        assert all(trace and trace.check and trace.check.is_same for trace in traces)
        return len(traces)

    assert run_ranks(1, body) == [2]
