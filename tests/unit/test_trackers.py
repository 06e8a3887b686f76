"""Trackers: chosen by name, off the hot path, and never a reason to stop."""

from __future__ import annotations

import csv
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError
from paceline.files.run_folder import RunFolder, RunInfo, read_info
from paceline.telemetry import Point, Tracker, make_trackers, trackers
from paceline.telemetry.sinks import Summary

PATIENCE_S = 60.0
INFO = RunInfo(name="first", created=0.0, updated=0.0)


class Memory(Tracker):
    """Keeps what it is given, for as long as it can."""

    def __init__(self, *, fails_in: str = "", until: threading.Event | None = None) -> None:
        super().__init__()
        self.fails_in, self.until = fails_in, until
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
        if self.until is not None:
            self.until.wait(PATIENCE_S)
        if name == self.fails_in:
            raise OSError(28, "No space left on device")


def train(
    folder: Path,
    *trackers: Any,
    epochs: int = 2,
    at_last_step: Callable[[], None] = lambda: None,
    config: Mapping[str, Any] | None = None,
) -> paceline.Run:
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
        config=config,
        options=paceline.RunOptions(progress="plain", ema=0.9),
    )
    for step in run:
        with step:
            for inputs, targets in step.batches():
                step.backward(nn.functional.cross_entropy(run.model(inputs), targets))
        if run.step == 4 * epochs:
            at_last_step()
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


def test_hyperparameters_of_the_script_are_settings_beside_those_of_the_run(
    tmp_path: Path,
) -> None:
    memory = Memory()
    own = {"lr": 0.1, "seed": 7, "ema": 0.5, "data": {"crop": 224}, "tag": "x" * 1000}
    train(tmp_path / "run", memory, config=own | {f"n{number}": 0 for number in range(1000)})
    wanted = {"lr": "0.1", "config.seed": "7", "seed": 0, "ema": "0.9", "config.ema": "0.5"}
    assert {name: memory.settings[name] for name in wanted} == wanted
    assert memory.settings["data.crop"] == "224"
    info = read_info(RunFolder(tmp_path / "run"))
    assert info is not None
    assert len(info.settings["tag"]) == 200
    assert len(info.settings) < 250


def test_a_second_evaluation_after_one_step_is_tracked_too() -> None:
    memory, until_s = Memory(), time.monotonic() + PATIENCE_S
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
    assert len(re.findall(r"\bMemory\b.* off\b", said.out + said.err)) == 1
    assert "No space left on device" in said.out + said.err


def test_a_tracker_that_is_slow_does_not_hold_training_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_POINTS", 3)
    trained = threading.Event()
    slow = Memory(until=trained)  # it takes nothing before training has done every step
    with pytest.warns(UserWarning, match=r"Memory .*\b\d+ points\b"):
        run = train(tmp_path / "run", slow, epochs=20, at_last_step=trained.set)
    assert run.step == 80
    assert 0 < len(slow.points) < 20


def test_a_tracker_that_hangs_with_a_full_queue_is_named_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_POINTS", 1)
    monkeypatch.setattr(trackers, "CLOSE_TIMEOUT_S", 0.01)
    hung = threading.Event()
    tracker = Memory(until=hung)
    tracker.start(INFO, 0, [])
    for step in (1, 2):
        tracker.evaluation(Summary(0, step, {"loss": 0.5}, 0.1, 8))
    with pytest.warns(UserWarning, match=r"Memory") as warned:
        tracker.stop(2, "finished", "")
    assert len(warned) == 2
    hung.set()
    tracker._queue.put("finished", timeout=PATIENCE_S)
    assert tracker._thread is not None
    tracker._thread.join(PATIENCE_S)


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


@pytest.mark.parametrize("kept", ["12", "120,0,eval,12"])
def test_a_row_that_a_full_disk_has_cut_is_no_row_of_an_earlier_step(
    tmp_path: Path, kept: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for begin, end in ((0, 120), (120, 121)):
        (sink,) = make_trackers(["csv"], folder.path)
        sink.start(INFO, begin, [])
        for step in range(begin + 1, end + 1):
            sink.evaluation(Summary(0, step, {"loss": step + 0.5}, 1.0, 8))
        sink.stop(end, "finished", "")
        if not begin:
            path = folder.path / "metrics.csv"
            path.write_bytes(path.read_bytes().partition(b"120,")[0] + kept.encode())
    rows = [(int(row["step"]), row["eval/loss"]) for row in rows_of(folder.path)]
    assert rows == [(step, f"{step}.5") for step in (*range(1, 120), 121)]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("tensorbord", "no tracker 'tensorbord'.*Did you mean 'tensorboard'"),
        ("", "no tracker ''"),
        (None, r"trackers\[0\] .*None.* start\b"),
        ("wandb", "needs wandb, which.* not installed.*pip install 'paceline\\[wandb\\]'"),
        ("mlflow:x", "needs mlflow, which.* not installed"),
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
