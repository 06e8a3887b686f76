"""Workers that run out of memory, under the launchers: nobody waits for ever, nothing is lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import Training, assert_survived, run_training, train_alone
from tests.faults.trainings import environment

SCRIPT = Path(__file__).with_name("fit_script.py")


@pytest.fixture(scope="module")
def undisturbed() -> Training:
    return train_alone(SCRIPT)


@pytest.mark.parametrize(
    ("workers", "update", "kill"), [(2, "whole", 0), (3, "whole", 11), (3, "sharded", 11)]
)
def test_a_hundred_times_without_memory_leave_no_trace(
    workers: int, update: str, kill: int, undisturbed: Training, tmp_path: Path
) -> None:
    given = ["--count", tmp_path, "--kill", kill, "--update", update]
    training = run_training(SCRIPT, *given, workers=workers)
    assert_survived(training, undisturbed, rtol=1e-9, atol=1e-10)
    assert (tmp_path / "killed").exists() == bool(kill)
    assert len(list(tmp_path.iterdir())) > 100


def test_under_torchrun_too(undisturbed: Training, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*torchrun, str(SCRIPT), "--count", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, env=environment(), timeout=200, check=True, text=True
    )
    sums = re.findall(r"^(-?\d+\.\d{12})$", done.stderr, flags=re.MULTILINE)
    alone = re.findall(r"^(-?\d+\.\d{12})$", undisturbed.output, flags=re.MULTILINE)
    assert set(sums) == set(alone)
    assert len(sums) == 2
    assert len(list(tmp_path.iterdir())) > 100


LIMITED = """
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Linear):
    def forward(self, x):
        if len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return super().forward(x)

net = Net(4, 1)
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), TensorDataset(torch.ones(64, 4)),
                   global_batch=32, epochs=1000, shards=2, folder="{folder}")
for step in run:
    with step:
        for x, in step.batches():
            step.backward(run.model(x).square().mean())
"""


def test_the_command_finds_the_sizes_that_fit_and_leaves_the_folder_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LIMITED.replace("{folder}", str(tmp_path / "run")))
    command = [sys.executable, "-m", "paceline", "fit", "--workers", "2", "--json", str(script)]
    done = subprocess.run(command, capture_output=True, timeout=200, check=True, text=True)
    table = json.loads(done.stdout)
    assert [(row["piece"], row["fits"]) for row in table["sizes"]] == [
        *((16, False), (8, True), (4, True), (2, True), (1, True)),
    ]
    assert table["choice"] in (8, 4, 2, 1)
    assert not (tmp_path / "run").exists()


TALKS = """
import sys, torch, torch.distributed as dist, paceline
from torch import nn
from torch.utils.data import TensorDataset

paceline.init_process_group()
net = nn.Linear(4, 1)
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), TensorDataset(torch.ones(64, 4)),
                   global_batch=8, epochs=1, shards=2, options=paceline.RunOptions(fit="auto"))
for step in run:
    with step:
        for x, in step.batches():
            out = run.model(x)
            if dist.get_rank() == 1 and step.number == int(sys.argv[1]):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
            dist.all_reduce(mean := out.detach().mean())
            step.backward((out - mean).square().mean())
"""


@pytest.mark.parametrize("step", [1, 3])
def test_a_collective_in_a_pass_ends_the_run_with_the_reason(step: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TALKS)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--stall-after", "2"]
    command += ["--stall-end", "4", str(script), str(step)]
    done = subprocess.run(command, capture_output=True, timeout=200, check=False, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert f"worker 1 failed in step {step}" in said
    assert "Tried to allocate 1 GiB" in said
    # Before the first such collective nobody knows: the others are waited for, but not for ever.
    assert ("FitError" in said) == (step == 1)
    assert "collective" in said
