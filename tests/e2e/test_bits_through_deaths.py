"""The same bits on any number of processes, through deaths and resumes at other sizes."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.files import RunFolder, read_events
from paceline.show.compare import compare, read_hashes
from tests.faults.trainings import environment

SCRIPT = """
import glob, os, signal, sys, torch, paceline
from tests.faults import wait_for_replacements
from torch import nn
from torch.nn.functional import cross_entropy

folder, epochs, update = sys.argv[1], int(sys.argv[2]), sys.argv[3]
kills = [(int(step), int(rank), where) for step, rank, where in map(str.split, sys.argv[4:])]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(90, 8, generator=g), torch.randint(3, (90,), generator=g))
options = paceline.RunOptions(progress="quiet", same_bits=True, precision="bf16", clip_norm=1.0,
                              update=update)

def die(where):
    struck = sorted(int(name.rpartition(".")[2]) for name in glob.glob(f"{folder}.*"))
    if len(struck) >= len(kills) or run.membership.size < int(os.environ["WORLD_SIZE"]):
        return
    first, rank, place = kills[len(struck)]
    is_turn = step.number >= first and step.number not in struck
    if is_turn and (run.world.rank, where) == (rank, place):
        open(f"{folder}.{step.number}", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02), data, global_batch=30,
                   epochs=epochs, shards=6, folder=folder, options=options)
for step in run:
    with step:
        for x, y in step.batches():
            die("before")
            out = run.model(x)
            step.backward(cross_entropy(out, y))
            die("between")
            run.log("right", (out.argmax(1) == y).double().mean() / 3, weight=len(y))
        die("after")
    die("behind")
    if kills:
        wait_for_replacements(run)
open("after", "w").close()
"""


WHERE = ("before", "between", "after", "behind")


def train(
    where: Path, name: str, workers: int, epochs: int, *kills: str, update: str = "whole"
) -> None:
    """A kill is step, rank and where: before a backward or after it, after the loop over batches
    or behind the block. It waits for a step in which all workers are there."""
    (where / "train.py").write_text(SCRIPT)
    launcher = ["-m", "paceline", "run", "--workers", workers] if workers > 1 else []
    command = [sys.executable, *launcher, "train.py", name, epochs, update, *kills]
    done = subprocess.run(
        list(map(str, command)),
        cwd=where,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [each for each in read_events(RunFolder(folder)) if each["kind"] == kind]


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """Those of epochs, by epoch, as the run folder has them."""
    return {each["epoch"]: each["metrics"] for each in events_of(folder, "epoch")}


EPOCHS = 5


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("alone")
    train(where, "run", 1, EPOCHS)
    assert sorted(read_hashes(where / "run")) == [3 * EPOCHS]
    assert metrics_of(where / "run")[EPOCHS - 1].keys() == {"loss", "right", "grad_norm"}
    return where / "run"


def assert_same(found: Path, expected: Path) -> None:
    assert compare(read_hashes(expected), read_hashes(found))["step"] is None
    assert metrics_of(found) == metrics_of(expected)


@pytest.mark.parametrize("update", ["whole", "sharded"])
def test_deaths_change_no_bit(update: str, alone: Path, tmp_path: Path) -> None:
    draw = random.Random(update)
    places = [*draw.sample(WHERE, 4), draw.choice(WHERE)]
    kills = [f"{2 + 2 * number} {number % 3} {place}" for number, place in enumerate(places)]
    train(tmp_path, "run", 3, EPOCHS, *kills, update=update)
    assert sum(len(each["died"]) for each in events_of(tmp_path / "run", "generation")) == 5
    assert_same(tmp_path / "run", alone)


@pytest.mark.parametrize("update", ["whole", "sharded"])
def test_other_sizes_change_no_bit(update: str, alone: Path, tmp_path: Path) -> None:
    for epochs, workers in enumerate((3, 2, 1, 4), 2):
        train(tmp_path, "run", workers, epochs, update=update)
    assert_same(tmp_path / "run", alone)


def test_the_first_difference_is_named() -> None:
    one = {100: {"model/a": "1", "all": "x"}, 200: {"model/a": "2", "all": "y"}}
    other = {100: {"model/a": "1", "all": "x"}, 200: {"model/a": "3", "all": "z"}}
    found = compare(one, other)
    assert (found["step"], found["equal_until"], found["tensors"]) == (200, 100, ["model/a"])
    assert compare(one, one)["step"] is None
    with pytest.raises(UsageError, match=r"step.*100 to 200.*7 to 7"):
        compare(one, {7: {}})


def replay(where: Path, *arguments: str) -> Any:
    command = [sys.executable, "-m", "paceline", "replay", "run", *arguments]
    return subprocess.run(
        command,
        cwd=where,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_recorded_step_is_computed_again_on_one_worker(tmp_path: Path) -> None:
    train(tmp_path, "run", 3, 4, "5 1 before")
    (tmp_path / "after").unlink()
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    script = ["--script", "train.py run 4 whole"]
    done = replay(tmp_path, "--step", "12", *script)
    assert done.returncode == 0, done.stderr
    assert "Steps 10 to 12" in done.stdout
    assert read_hashes(tmp_path / "run")[12]["all"][:16] in done.stdout
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
    assert not (tmp_path / "after").exists()

    (tmp_path / "train.py").write_text(SCRIPT.replace("manual_seed(1)", "manual_seed(2)"))
    other = replay(tmp_path, "--step", "12", *script)
    assert other.returncode == 1
    assert "model/" in other.stdout
    for wrong in (["--step", "11", *script], ["--step", "12"]):
        assert replay(tmp_path, *wrong).returncode == 2
