"""`Run` on files: the same training at any number of workers, which read and count their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Rows, Told, Trained, assert_same, mlp, train

from paceline.data import Files
from paceline.errors import UsageError
from paceline.run import Run, RunOptions
from paceline.testing import run_ranks

COUNTS = [9, 1, 14, 0, 20, 6]


class RowFiles:
    """Six files of the fifty rows; each remembers who counted and how many rows were read."""

    def __init__(self, broken: int | None = None) -> None:
        self.rows, self.counted, self.read_rows, self.broken = Rows(50), [], 0, broken

    def count(self, file: int) -> int:
        if file == self.broken:
            raise OSError("it is gone")
        self.counted.append(file)
        return COUNTS[file]

    def read(self, file: int, start: int) -> Iterator[Any]:
        first = sum(COUNTS[:file])
        for row in range(first + start, first + COUNTS[file]):
            self.read_rows += 1
            yield self.rows[row]


def run_on_files(world: Any = None, *, format: Any = None, **arguments: Any) -> Trained:
    names = ("window", "lanes")
    given = {name: arguments.pop(name) for name in names if name in arguments}
    files = Files(range(len(COUNTS)), format or RowFiles(), **{"window": 4, "lanes": 2, **given})
    return train(world, dataset=files, shards=4, **arguments)


EVERY_ROW_ONCE = Counter((epoch, row) for epoch in range(2) for row in range(50))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (3, 2)])
def test_another_number_of_workers_continues_in_mid_epoch_with_the_same_training(
    before: int, after: int, tmp_path: Path
) -> None:
    alone = run_on_files()
    folder = tmp_path / "run"
    first = run_ranks(before, lambda w: run_on_files(w, folder=folder, stop_after=10))
    rest = run_ranks(after, lambda w: run_on_files(w, folder=folder))
    seen = [entry for each in [*first, *rest] for entry in each.ledger]
    assert sorted(seen) == sorted(alone.ledger)
    assert Counter((epoch, row) for epoch, _, row in seen) == EVERY_ROW_ONCE
    assert_same(rest[0].parameters, alone.parameters, rtol=1e-4, atol=1e-6)


def test_every_file_is_counted_by_one_worker_and_read_by_those_who_need_it() -> None:
    formats = [RowFiles() for _ in range(3)]
    run_ranks(3, lambda w: run_on_files(w, format=formats[w.rank], epochs=1))
    assert [each.counted for each in formats] == [[0, 3], [1, 4], [2, 5]]
    assert sum(each.read_rows for each in formats) <= 50 + 8  # a look at what follows a lane


def test_a_file_that_cannot_be_counted_stops_every_worker() -> None:
    def body(world: Any) -> str:
        with pytest.raises(UsageError) as raised:
            run_on_files(world, format=RowFiles(broken=4))
        return str(raised.value)

    messages = run_ranks(3, body)
    assert all("4 cannot be counted: it is gone" in each for each in messages)


def test_fewer_files_than_shards_are_said_and_trained_on_as_exactly() -> None:
    told = Told()
    trained = train(
        dataset=Files([2, 4], RowFiles(), window=3), shards=4, global_batch=4, sinks=[told]
    )
    ((_, _, lines),) = told.of("start")
    assert any(line.startswith("2 files for 4 shards") for line in lines)
    rows = [*range(10, 24), *range(24, 44)]
    assert Counter((e, row) for e, _, row in trained.ledger) == Counter(
        (epoch, row) for epoch in range(2) for row in rows
    )


def test_a_resumed_run_has_the_same_files_windows_and_lanes(tmp_path: Path) -> None:
    run_on_files(folder=tmp_path / "run", stop_after=2)
    for changed in ({"window": 5}, {"lanes": 1}):
        with pytest.raises(UsageError, match=r"order.* '6 files .*, window 4, lanes 2' there"):
            run_on_files(folder=tmp_path / "run", **changed)
    with pytest.raises(UsageError, match=r"files are read one after.* other"):
        run_on_files(options=RunOptions(progress="quiet", order="keyed"))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_evaluation_on_files_counts_every_sample_once(size: int) -> None:
    formats = [RowFiles() for _ in range(size)]

    def body(world: Any) -> dict[str, float]:
        net = mlp()

        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        quiet = RunOptions(progress="quiet")
        files = Files(range(len(COUNTS)), formats[world.rank], counts=COUNTS)
        run = Run(net, optimizer, Rows(), global_batch=6, epochs=1, world=world, options=quiet)
        return run.evaluate(lambda batch: {"row": batch[2].double().mean()}, files, batch=7)

    assert [each["row"] for each in run_ranks(size, body)] == pytest.approx([24.5] * size)
    assert sum(each.read_rows for each in formats) == 50
