"""The same bits on any number of processes, through deaths and resumes at other sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.show.compare import compare, read_hashes

SCRIPT = """
import os, signal, sys, torch, paceline
from torch import nn
from torch.nn.functional import cross_entropy

folder, epochs, kills = sys.argv[1], int(sys.argv[2]), [int(n) for n in sys.argv[3:]]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(90, 8, generator=g), torch.randint(3, (90,), generator=g))
options = paceline.RunOptions(progress="quiet", same_bits=True, precision="bf16", clip_norm=1.0)
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02), data, global_batch=30,
                   epochs=epochs, shards=6, folder=folder, options=options)
for step in run:
    with step:
        for x, y in step.batches():
            mark = f"{folder}.{step.number}"
            if step.number in kills and run.world.rank == 1 and not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(cross_entropy(run.model(x), y))
open("after", "w").close()
"""


def train(where: Path, name: str, workers: int, epochs: int, *kills: int) -> None:
    (where / "train.py").write_text(SCRIPT)
    launcher = ["-m", "paceline", "run", "--workers", workers] if workers > 1 else []
    command = [sys.executable, *launcher, "train.py", name, epochs, *kills]
    done = subprocess.run(
        list(map(str, command)),
        cwd=where,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_deaths_and_other_sizes_change_no_bit(tmp_path: Path) -> None:
    train(tmp_path, "alone", 1, 4)
    train(tmp_path, "disturbed", 2, 1)
    train(tmp_path, "disturbed", 3, 4, 5, 9)
    alone = read_hashes(tmp_path / "alone")
    assert sorted(alone) == [12]
    assert compare(alone, read_hashes(tmp_path / "disturbed"))["step"] is None


def test_the_first_difference_is_named() -> None:
    one = {100: {"model/a": "1", "all": "x"}, 200: {"model/a": "2", "all": "y"}}
    other = {100: {"model/a": "1", "all": "x"}, 200: {"model/a": "3", "all": "z"}}
    found = compare(one, other)
    assert (found["step"], found["equal_until"], found["tensors"]) == (200, 100, ["model/a"])
    assert compare(one, one)["step"] is None
    with pytest.raises(UsageError, match="No step"):
        compare(one, {7: {}})


def replay(where: Path, *arguments: str) -> Any:
    command = [sys.executable, "-m", "paceline", "replay", "run", *arguments]
    return subprocess.run(
        command, cwd=where, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_recorded_step_is_computed_again_on_one_worker(tmp_path: Path) -> None:
    train(tmp_path, "run", 3, 4, 5)
    (tmp_path / "after").unlink()
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    script = ["--script", "train.py run 4 5"]
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
