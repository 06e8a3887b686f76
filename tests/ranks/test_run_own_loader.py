"""`Run(loader=)`: batches that somebody else deals, exact means of uneven ones, and continuing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import QUIET, Rows, Told, Trained, assert_same, mlp, train
from torch.utils.data import DataLoader

from paceline import DistributedSampler
from paceline.errors import UsageError
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.run.user_loader import count_samples
from paceline.testing import run_ranks


class Batches:
    """A loader of the user's own: the rows of one rank, shuffled by epoch, in batches."""

    def __init__(self, world: Any, total: int = 50, batch: int = 4) -> None:
        self.rows, self.batch_size, self.epoch = Rows(total), batch, 0
        self.mine = range(world.rank, total, world.size)
        self.begun = 0

    def __len__(self) -> int:
        return -(-len(self.mine) // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        order = torch.randperm(
            len(self.mine), generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        for begin in range(0, len(order), self.batch_size):
            rows = [self.rows[self.mine[n]] for n in order[begin : begin + self.batch_size]]
            yield tuple(torch.utils.data.default_collate(rows))


class Remembering(Batches):
    """One that knows how far it is."""

    done, start, read = 0, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "rows": torch.tensor(list(self.mine))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rows"].tolist() == list(self.mine)
        self.start = state["done"]

    def __iter__(self) -> Iterator[Any]:
        self.done, self.start = self.start, 0
        for number, batch in enumerate(super().__iter__()):
            self.read += number >= self.done
            if number >= self.done:
                self.done = number + 1
                yield batch


def own(world: World | None, make: Any = Batches, **arguments: Any) -> Trained:
    arguments = {"weigh": False, "reduction": "mean", "global_batch": None, **arguments}
    return train(world, loader=make, **arguments)


def ledger(workers: list[Trained]) -> Counter[tuple[int, int]]:
    return Counter((epoch, index) for each in workers for epoch, _, index in each.ledger)


EVERY_ROW_ONCE = Counter((epoch, row) for epoch in range(2) for row in range(50))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_batch_of_every_worker_is_trained_on_and_uneven_ones_are_weighed(size: int) -> None:
    """50 rows in batches of 4 for 3 workers: 17, 17 and 16 rows, in 5, 5 and 4 batches."""
    workers = run_ranks(size, own)
    assert ledger(workers) == EVERY_ROW_ONCE
    for each in workers[1:]:
        assert_same(each.parameters, workers[0].parameters, rtol=0, atol=0)

    def by_hand() -> dict[str, Any]:
        """The mean over all samples of a step, on one process."""
        loaders = [Batches(SimpleNamespace(rank=rank, size=size)) for rank in range(size)]
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        for epoch in range(2):
            for loader in loaders:
                loader.set_epoch(epoch)
            iterators = [iter(loader) for loader in loaders]
            for _ in range(max(map(len, loaders))):
                parts = [batch for each in iterators if (batch := next(each, None)) is not None]
                x, y = (torch.cat([part[n] for part in parts]) for n in (0, 1))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                scheduler.step()
        return dict(net.state_dict())

    assert_same(workers[0].parameters, by_hand(), rtol=1e-4, atol=1e-6)


class LastSeen(torch.nn.Module):
    """Remembers the first number of the last batch."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.fill_(x[0, 0].detach())
        return self.inner(x)


def test_a_buffer_is_what_the_first_worker_with_a_batch_makes_of_it() -> None:
    """Rank 0 has no batch in the last steps."""

    def body(world: World) -> tuple[float, float]:
        loader = Batches(world, batch=4 if world.rank else 17)
        net = LastSeen()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run = Run(
            net, optimizer, loader=loader, world=world, global_batch=12, epochs=1, options=QUIET
        )
        first = 0.0
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    first = x[0, 0].item()
                    step.backward(torch.nn.functional.cross_entropy(run.model(x), y))
        return first, net.seen.item()

    firsts, seen = zip(*run_ranks(3, body), strict=True)
    assert seen == (firsts[1],) * 3


@pytest.mark.parametrize(("size", "make"), [(3, Batches), (1, Remembering), (3, Remembering)])
def test_a_run_continues_in_mid_epoch_with_the_batch_that_would_have_come(
    size: int, make: type[Batches], tmp_path: Path
) -> None:
    whole = run_ranks(size, lambda world: own(world, make))
    first = run_ranks(size, lambda w: own(w, make, folder=tmp_path / "run", stop_after=3))
    loaders: list[Batches] = []

    def keep(world: World) -> Batches:
        loaders.append(make(world))
        return loaders[-1]

    rest = run_ranks(size, lambda world: own(world, keep, folder=tmp_path / "run"))
    assert ledger([*first, *rest]) == EVERY_ROW_ONCE
    for rank in range(size):
        assert first[rank].ledger + rest[rank].ledger == whole[rank].ledger
        assert_same(rest[rank].parameters, whole[rank].parameters)
    if make is Remembering:  # nothing was read again and thrown away
        read: list[int] = [loader.read for loader in loaders]  # type: ignore[attr-defined]
        assert read == [2 * len(loader) - 3 for loader in loaders]


def test_at_another_number_of_workers_the_epoch_begins_anew_and_the_run_says_so(
    tmp_path: Path,
) -> None:
    arguments: dict[str, Any] = {"folder": tmp_path / "run", "global_batch": 8}
    run_ranks(2, lambda world: own(world, Remembering, stop_after=9, **arguments))
    told = Told()
    rest = own(None, Remembering, sinks=[told], **arguments)
    assert ledger([rest]) == Counter((1, row) for row in range(50))
    ((_, step, lines),) = told.of("start")
    assert step == 9
    assert any("Epoch 2 begins anew" in line and "2 workers" in line for line in lines)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"text": ["a", "b", "c"], "label": ["x", "y", "z"]}, 3),
        ({"text": ["a", "b", "c"], "label": torch.ones(2)}, 2),
        (["a", "b"], 2),
        ({}, 0),
        (7, 1),
    ],
)
def test_samples_are_the_rows_of_a_batch_and_not_its_columns(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


def test_torchs_loader_with_a_sampler_is_told_the_epoch() -> None:
    def make(world: World) -> DataLoader[Any]:
        rows = Rows()
        sampler = DistributedSampler(rows, world.size, world.rank, pad=False)
        return DataLoader(rows, batch_size=4, sampler=sampler)

    workers = run_ranks(2, lambda world: own(world, make))
    assert ledger(workers) == EVERY_ROW_ONCE
    orders = [[row for e, _, row in workers[0].ledger if e == epoch] for epoch in range(2)]
    assert orders[0] != orders[1]


def test_a_loader_without_end_has_epochs_of_so_many_steps() -> None:
    class Endless:
        batch_size = 4

        def __iter__(self) -> Iterator[Any]:
            rows = Rows(4)
            while True:
                yield torch.utils.data.default_collate([rows[n] for n in range(4)])

    options = RunOptions(progress="quiet", steps_per_epoch=3)
    trained = own(None, lambda world: Endless(), options=options)
    assert list(trained.losses) == [1, 2, 3, 4, 5, 6]


def test_a_failed_step_comes_again_with_its_batch() -> None:
    net = mlp()
    loader = Batches(SimpleNamespace(rank=0, size=1), total=12)
    run = Run(
        net, torch.optim.SGD(net.parameters(), lr=0.1), loader=loader, epochs=1, options=QUIET
    )
    seen: list[list[int]] = []
    for step in run:
        try:
            with step:
                for x, y, rows in step.batches():
                    seen.append(rows.tolist())
                    if len(seen) == 2:
                        raise ValueError("planned")
                    step.backward(torch.nn.functional.cross_entropy(run.model(x), y))
        except ValueError:
            pass
    assert seen[1] == seen[2]
    assert sorted(seen[0] + seen[2] + seen[3]) == list(range(12))
    assert loader.begun == 1
    with pytest.raises(UsageError, match="no dataset to evaluate on"):
        run.evaluate(lambda batch: {})


class WithoutLength:
    batch_size = 2

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loader": WithoutLength()}, "no length.*steps_per_epoch"),
        ({"loader": [torch.zeros(2)]}, "does not say how many samples.*global_batch="),
        ({"loader": iter([])}, "read only once"),
        ({"loader": 3}, "cannot be iterated over"),
        ({"loader": [1], "dataset": Rows()}, "both a dataset and"),
        ({}, "neither a dataset nor"),
        ({"loader": [1], "shards": 2}, "shards .*2"),
        ({"loader": [1], "loader_workers": 2}, "loader_workers .*2"),
        ({"dataset": Rows(), "global_batch": 4, "steps": 3}, "steps_per_epoch"),
        ({"dataset": Rows()}, "global_batch .*None"),
        ({"loader": [], "global_batch": 4}, "loaders of all workers are empty"),
        ({"loader": WithoutLength(), "global_batch": 4, "steps": 3}, "no more batches in epoch 1"),
    ],
)
def test_what_is_not_a_loader_is_refused_with_advice(
    arguments: dict[str, Any], message: str
) -> None:
    net = mlp()
    options = RunOptions(progress="quiet", steps_per_epoch=arguments.pop("steps", None))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=f"(?s){message}") as raised:
        list(Run(net, optimizer, epochs=1, options=options, **arguments))
    assert raised.value.advice
