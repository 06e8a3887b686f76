"""Two Gloo ranks on one GPU are killed in turn, and the training ends as if they were not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = """
import os, pathlib, signal, sys, time, torch, torch.distributed as dist
import paceline
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

here = pathlib.Path(sys.argv[1])
kills = [(0, 7), (1, 12), (0, 17)] if sys.argv[2] == "kill" else []
torch.manual_seed(0)
layers = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3)
net = nn.Sequential(*layers).double().to("cuda:0")
optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))
run = paceline.Run(net, optimizer, TensorDataset(x, (x.sum(1) * 2).long() % 3), global_batch=12,
                   epochs=3, shards=4,
                   options=paceline.RunOptions(progress="quiet"))
for step in run:
    with step:
        for x, y in step.batches():
            loss = cross_entropy(run.model(x), y)
            for victim, first in kills:
                done = here / f"{victim}.{first}"
                is_time = step.number >= first and run.membership.size == 2
                if victim == rank and is_time and not done.exists():
                    done.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
    if kills and run.membership.size < 2:
        time.sleep(0.6)  # a replacement loads CUDA first
torch.save([net.state_dict(), run.step], here / f"end{rank}.pt")
"""


def test_ranks_on_a_gpu_are_killed_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ends = {}
    for what, workers in (("calm", 1), ("kill", 2)):
        folder = tmp_path / what
        folder.mkdir()
        command = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), "train.py"]
        done = subprocess.run(
            [*command, str(folder), what],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        last = sorted(folder.glob("end*.pt"))[0]  # a replacement may come after the last step
        ends[what] = torch.load(last, map_location="cpu")
    assert len(re.findall("was killed by signal 9", done.stderr)) == 3, done.stderr
    assert len(re.findall("no step was lost", done.stderr)) == 3, done.stderr
    assert ends["kill"][1] == ends["calm"][1] == 24
    for name, value in ends["calm"][0].items():
        torch.testing.assert_close(ends["kill"][0][name], value, rtol=1e-9, atol=1e-12)
