"""Trackers: chosen by name, off the hot path, and never a reason to stop."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError
from paceline.observe.run_folder import RunFolder, RunInfo
from paceline.run.sinks import Summary
from paceline.trackers import Point, Tracker, make_trackers, tracker

INFO = RunInfo(name="first", created=0.0, updated=0.0)


class Memory(Tracker):
    """Keeps what it is given, for as long as it can."""

    def __init__(self, *, fails_in: str = "", waits_s: float = 0.0) -> None:
        super().__init__()
        self.fails_in, self.waits_s = fails_in, waits_s
        self.points: list[Point] = []
        self.status = ""

    def open(self, info: RunInfo, settings: Mapping[str, Any], step: int) -> None:
        self._pass("open")
        self.settings = settings

    def write(self, points: Sequence[Point]) -> None:
        self._pass("write")
        self.points += points

    def close(self, status: str) -> None:
        self._pass("close")
        self.status = status

    def _pass(self, name: str) -> None:
        time.sleep(self.waits_s)
        if name == self.fails_in:
            raise OSError(28, "No space left on device")


def train(folder: Path, *trackers: Any, epochs: int = 2) -> paceline.Run:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    run = paceline.Run(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        TensorDataset(x, (x.sum(1) > 0).long()),
        global_batch=8,
        epochs=epochs,
        folder=folder,
        trackers=trackers,
        options=paceline.RunOptions(progress="plain", ema=0.9),
    )
    for step in run:
        with step:
            for inputs, targets in step.batches():
                step.backward(nn.functional.cross_entropy(run.model(inputs), targets))
    return run


def rows_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_tracker_gets_every_step_and_epoch_and_the_settings(tmp_path: Path) -> None:
    memory = Memory()
    train(tmp_path / "run", memory)
    assert [p.step for p in memory.points if p.kind == "train"] == list(range(1, 9))
    assert [(p.step, p.epoch) for p in memory.points if p.kind == "epoch"] == [(4, 0), (8, 1)]
    assert memory.points[0].values.keys() == {"train/loss", "train/lr", "train/samples_per_s"}
    wanted = {"global_batch": 8, "optimizer": "SGD", "ema": "0.9", "progress": "plain"}
    assert {name: memory.settings[name] for name in wanted} == wanted
    assert "precision" not in memory.settings, "it is as it comes"
    assert memory.status == "finished"


def test_a_second_evaluation_after_one_step_is_tracked_too() -> None:
    memory, until_s = Memory(), time.monotonic() + 20
    memory.start(INFO, 0, [])
    for count, name in enumerate(("accuracy", "ema_accuracy"), start=1):
        memory.evaluation(Summary(0, 9, {name: 0.5}, 0.1, 32))
        while len(memory.points) < count and time.monotonic() < until_s:
            time.sleep(0.001)
    memory.stop(9, "finished", "")
    names = [name for point in memory.points for name in point.values]
    assert names == ["eval/accuracy", "eval/ema_accuracy"]


@pytest.mark.parametrize("call", ["open", "write", "close"])
def test_a_tracker_that_fails_is_named_once_and_training_ends_as_if_it_were_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    run = train(tmp_path / "run", Memory(fails_in=call))
    assert run.step == 8
    said = capsys.readouterr()
    assert (said.out + said.err).count("The sink Memory is switched off") == 1
    assert "No space left on device" in said.out + said.err


def test_a_tracker_that_is_slow_does_not_hold_training_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "QUEUE_POINTS", 3)
    slow = Memory(waits_s=0.2)
    with pytest.warns(UserWarning, match=r"Memory could not keep up: \d+ points? are missing"):
        train(tmp_path / "run", slow, epochs=20)
    assert len(slow.points) < 80


def test_rows_of_steps_that_are_done_again_replace_the_first_ones(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for begin, end in ((0, 10), (6, 12)):
        (sink,) = make_trackers(["csv"], folder.path)
        sink.start(INFO, begin, [])
        for step in range(begin + 1, end + 1):
            sink.evaluation(Summary(0, step, {f"loss{begin}": step + begin / 10}, 1.0, 8))
        sink.stop(end, "finished", "")
    rows = rows_of(folder.path)
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert [row["eval/loss6"] for row in rows][5:8] == ["", "7.6", "8.6"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("tensorbord", "There is no tracker 'tensorbord'.*Did you mean 'tensorboard'"),
        ("", "There is no tracker ''"),
        (None, r"trackers\[0\] \(NoneType\) has no method start"),
        ("wandb", "needs wandb, which is not installed.*pip install 'paceline\\[wandb\\]'"),
        ("mlflow:x", "needs mlflow, which is not installed"),
    ],
)
def test_what_cannot_work_is_said_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Any, said: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"(?s){said}"):
        train(tmp_path / "run", wanted)


def test_csv_without_a_folder_and_wandb_without_a_login_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match=r'(?s)nowhere to write.*folder="runs/first"'):
        make_trackers(["csv"], None)
    with pytest.raises(UsageError, match=r"(?s)not logged in.*wandb login"):
        make_trackers(["wandb"], tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert make_trackers(["wandb:mine"], tmp_path)[0].project == "mine"
