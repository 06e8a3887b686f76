"""Loader processes that a fork leaves without life, or that are killed, are forked again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_convert,
    get_worker_info,
)

from paceline import Run
from paceline.run.forks import MOST_DEATHS, LivingBatches, LoaderKilled, let_live, take
from paceline.run.loader import make_loader
from paceline.torch_private import find_processes

_stuck_file = ""


def _stick() -> None:
    """In a new process: what a lock that nobody returns does, for the first one."""
    if _stuck_file:
        try:
            os.close(os.open(_stuck_file, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        Path(_stuck_file).write_text(str(os.getpid()))
        time.sleep(3600)


@pytest.mark.parametrize("whose", ["the run's", "a script's"])
def test_a_loader_process_that_does_not_come_to_life_is_forked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    os.register_at_fork(after_in_child=_stick)
    monkeypatch.setitem(globals(), "_stuck_file", str(tmp_path / "stuck"))
    data: Any = [10, 11, 12, 13]
    if whose == "the run's":
        loader = make_loader(data, {"num_workers": 2}, int, [0, 1, 2, 3])
    else:
        loader = DataLoader(data, num_workers=2)
        let_live(loader, lambda number: None)
    assert list(map(int, loader)) == data
    stuck = int((tmp_path / "stuck").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(stuck, 0)


def test_a_loader_that_says_how_its_processes_start_is_left_alone() -> None:
    data: Any = [10, 11]
    chosen = DataLoader(data, num_workers=1, multiprocessing_context="spawn")
    before = chosen.multiprocessing_context
    let_live(chosen, lambda number: None)
    assert chosen.multiprocessing_context is before
    here = DataLoader(data)
    let_live(here, lambda number: None)
    assert here.multiprocessing_context is None


class _Deadly(Dataset[Tensor]):
    """One of whose samples kills the process that loads it, so often."""

    def __init__(self, folder: Path, times: int, number: int = signal.SIGKILL) -> None:
        self.folder, self.times, self.number = folder, times, number

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        if index == 7 and get_worker_info() is not None:
            _die(self.folder, self.times, self.number)
        return torch.full((3,), index / 24)


class _DeadlyStream(IterableDataset[Tensor]):
    def __init__(self, folder: Path, times: int) -> None:
        self.samples = _Deadly(folder, times)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.samples[index] for index in range(24))


def _die(folder: Path, times: int, number: int) -> None:
    for each in range(times):
        try:
            (folder / str(each)).touch(exist_ok=False)
        except FileExistsError:
            continue
        os.kill(os.getpid(), number)


def _living(data: Dataset[Any], processes: int = 2) -> LivingBatches:
    loading = {"num_workers": processes, "prefetch_factor": 2}
    return LivingBatches(lambda left: make_loader(data, loading, default_convert, left), range(24))


@pytest.mark.parametrize("processes", [1, 2])
def test_no_batch_is_lost_or_comes_twice_where_loader_processes_are_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], processes: int
) -> None:
    batches = _living(_Deadly(tmp_path, MOST_DEATHS - 1), processes)
    assert [round(24 * batch[0].item()) for batch in batches] == list(range(24))
    said = capfd.readouterr().err
    assert said.count("DataLoader worker") == said.count("SIGKILL") == MOST_DEATHS - 1


def test_a_loader_process_killed_between_two_batches_interrupts_nothing(tmp_path: Path) -> None:
    batches = _living(_Deadly(tmp_path, 0))
    next(batches)
    for process in find_processes(batches._batches):
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()  # torch's handler has run since
    assert [round(24 * batch[0].item()) for batch in batches] == list(range(1, 24))


@pytest.mark.parametrize(("times", "number"), [(99, "SIGSEGV"), (1, "SIGTERM")])
def test_a_sample_that_kills_always_and_a_signal_that_is_meant_end_the_loop(
    tmp_path: Path, times: int, number: str
) -> None:
    batches = _living(_Deadly(tmp_path, times, getattr(signal, number)))
    with pytest.raises(LoaderKilled, match=number):
        list(batches)


def test_a_scripts_own_loader_whose_process_is_killed_raises_by_name(tmp_path: Path) -> None:
    batches: Any = iter(DataLoader(_Deadly(tmp_path, 1), num_workers=1))
    with pytest.raises(LoaderKilled, match="SIGKILL"):
        [take(batches) for _ in range(24)]
    batches._shutdown_workers()


@pytest.mark.parametrize("make", [_Deadly, _DeadlyStream])
def test_a_run_whose_loader_process_is_killed_trains_the_same(
    tmp_path: Path, make: Callable[[Path, int], Any]
) -> None:
    def train(name: str, times: int) -> Tensor:
        (folder := tmp_path / name).mkdir()
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = make(folder, times)
        for step in Run(net, optimizer, data, global_batch=4, shards=2, epochs=2, loader_workers=1):
            with step:
                for x in step.batches():
                    step.backward(mse_loss(net(x), x.sum(1, keepdim=True)))
        return net.weight.detach()

    assert torch.equal(train("killed", 2), train("undisturbed", 0))
    assert (tmp_path / "killed" / "1").exists()
