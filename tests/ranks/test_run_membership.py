"""A run that continues on another process group, of the same ranks or of fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, QUIET, WIDTH, Rows, assert_same, mlp, train
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.testing import assert_replicas_equal, run_ranks, seeded
from paceline.testing.ranks import gloo_group

TIMEOUT_S = 60.0
SHARDS = 3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        data = Rows(48)
        return (data[index] for index in range(len(data)))


def with_statistics() -> nn.Module:
    """Without a bias before the normalisation: its gradient would be nothing but rounding."""
    first = nn.Linear(WIDTH, 8, bias=False)
    return seeded(nn.Sequential(first, nn.BatchNorm1d(8), nn.Linear(8, CLASSES)))


def next_group(world: World, size: int) -> Any:
    store = PrefixStore("generation 1", world.group.get_group_store())
    return gloo_group(store, world.rank, size, TIMEOUT_S)


def train_and_move(
    world: World, size: int, build: Any, dataset: Any, folder: Path | None
) -> tuple[dict[str, Tensor], list[tuple[int, int]]] | None:
    """Train as `runs.train` does, and continue in the middle of the first epoch as `size` ranks."""
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    options = RunOptions(progress="quiet", shuffle=False, checkpoint_every=5)
    run = Run(
        net,
        optimizer,
        dataset,
        global_batch=8,
        epochs=2,
        shards=SHARDS,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9),
        world=world,
        folder=folder,
        options=options,
    )
    ledger = []
    for step in run:
        with step:
            for x, y, indices in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
                ledger += [(step.epoch, index) for index in indices.tolist()]
        if step.number == 4:
            if world.rank >= size:
                run.message("leaving", "warning")
                break
            run.membership.move_on(next_group(world, size))
        if step.ends_epoch and step.epoch == 1:
            scores = run.evaluate(lambda batch: {"label": batch[1].double().mean()}, Rows(13))
            assert scores == {"label": pytest.approx(Rows(13).y.double().mean().item())}
    return dict(net.state_dict()), ledger


@pytest.mark.parametrize(
    ("first", "second", "build", "dataset"),
    [
        (2, 2, mlp, Rows(48)),
        (3, 3, with_statistics, Stream()),
        (3, 2, with_statistics, Rows(48)),
        (3, 2, mlp, Stream()),
        (2, 1, with_statistics, Rows(48)),
    ],
)
def test_a_run_continues_on_another_group_as_if_nothing_had_happened(
    first: int, second: int, build: Any, dataset: Any, tmp_path: Path
) -> None:
    plain = RunOptions(progress="quiet", shuffle=False)
    expected = train(build=build, dataset=dataset, options=plain, shards=SHARDS)
    folder = tmp_path / "run"
    results = run_ranks(first, train_and_move, second, build, dataset, folder, timeout_s=TIMEOUT_S)
    stayed = [parameters for parameters, _ in results[:second]]
    assert_replicas_equal(stayed)
    assert_same(stayed[0], expected.parameters, rtol=1e-4, atol=1e-6)
    seen = sorted(entry for _, ledger in results for entry in ledger)
    assert seen == sorted((epoch, index) for epoch in (0, 1) for index in range(48))
    # And the checkpoints are those of the run.
    again = train(build=build, dataset=dataset, options=plain, folder=folder, epochs=3)
    assert sorted(again.losses) == list(range(13, 19))


def test_who_becomes_rank_0_writes_the_checkpoints(tmp_path: Path) -> None:
    """Rank 0 leaves: rank 1 of two trains alone, and saves where rank 0 did."""

    def body(world: World) -> int | None:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        folder = tmp_path / "run"
        run = Run(
            net, optimizer, Rows(), global_batch=8, epochs=1, world=world, folder=folder,
            options=QUIET,
        )  # fmt: skip
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            if step.number == 3:
                if world.rank == 0:
                    return None
                store = PrefixStore("generation 1", world.group.get_group_store())
                run.membership.move_on(gloo_group(store, 0, 1, TIMEOUT_S))
        return run.step

    assert run_ranks(2, body, timeout_s=TIMEOUT_S) == [None, 7]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert [name for name in names if name.startswith("step-")] == ["step-00000007.0001"]
