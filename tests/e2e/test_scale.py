"""`paceline scale` on real scripts, through the real launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sentences import says

from tests.docs_code import ROOT, blocks

TRAINING = """
import sys
import torch
import paceline

with paceline.init_process_group() as world:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    model = paceline.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(int(sys.argv[1]) // world.size, 64)
    while True:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""


def scale(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "scale", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


def test_a_script_that_continues_its_run_is_measured_from_the_beginning(tmp_path: Path) -> None:
    program = next(block.code for block in blocks(ROOT / "README.md") if block.script == "train.py")
    (tmp_path / "train.py").write_text(program)
    done = scale("--workers", "2", "--repeats", "1", "--json", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)["sizes"]
    assert (one["samples"], two["samples"]) == (100, 100)
    assert one["steps"] == two["steps"] > 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_an_endless_job_is_measured_attributed_and_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    sizes = ["--workers", "2", "--repeats", "1", "--steps", "30"]
    options = ["--predict", "8", "--network", "1g", "--fail-under", "50", "--json"]

    done = scale(*sizes, *options, "--folder", "study", "train.py", "24", cwd=tmp_path)

    assert done.returncode == 1, done.stderr  # nobody reaches 50 times the ideal
    assert "below --fail-under 50" in done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "study" / "scaling.json").read_text())
    assert found["mode"] == "strong"
    one, two = found["sizes"]
    assert (one["samples"], two["samples"]) == (24, 24)
    assert one["steps"] >= 10
    for size in (one, two):
        assert sum(size["seconds"].values()) == pytest.approx(size["step_s"])
        lost = max(0.0, size["step_s"] - size["ideal_s"])
        assert sum(size["lost"].values()) == pytest.approx(lost)
    assert sum(bucket["bytes"] for bucket in two["buckets"]) >= 4 * (64 * 64 + 64 + 4 * 64 + 4)
    assert found["predicted"][0]["step_s"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study", "train.py"]


def test_a_job_that_fails_is_shown_as_it_failed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemError('no data today')\n")

    done = scale("--workers", "1", "--repeats", "1", "train.py", cwd=tmp_path)

    assert done.returncode == 1
    assert says(done.stderr, "job failed on 1 worker.")
    assert "no data today" in done.stderr


def test_a_study_that_is_terminated_ends_its_job(tmp_path: Path) -> None:
    script = "import os, time\nopen(f'{os.getpid()}.pid', 'w').close()\ntime.sleep(60)\n"
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "paceline", "scale", "--workers", "1", "train.py"]
    study = subprocess.Popen(command, cwd=tmp_path)
    while not (started := list(tmp_path.glob("*.pid"))):
        assert study.poll() is None
        time.sleep(0.05)
    study.terminate()
    assert study.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(started[0].stem), 0)


MAKING = """
import torch
from torch.nn import functional as F

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, a, b):
        return self.linear(a) + self.linear(b)

def make():
    inputs = torch.rand(5, 3), torch.rand(5, 3)
    return Two(), (inputs, torch.arange(5) % 4), F.cross_entropy

def wrong():
    return torch.nn.Linear(1, 1)
"""
ENGINES = ["bare", "DataParallel", "DataParallel, loss on replicas", "DistributedDataParallel"]


def test_every_engine_is_timed_on_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MAKING)

    done = scale("--engines", "--workers", "3", "--steps", "2", "model.py:make", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    head, *rows, verdict = done.stdout.splitlines()
    assert head.split() == ["step", "of", "bare"]
    assert [row.split("  ")[0] for row in rows] == ENGINES
    assert rows[0].split()[-1] == "1.00"
    assert verdict.startswith("Fastest here: ")


def test_a_function_that_makes_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MAKING)

    done = scale("--engines", "model.py:wrong", cwd=tmp_path)

    assert done.returncode == 2
    assert "Return (model, (inputs, targets), loss_fn)." in done.stderr
