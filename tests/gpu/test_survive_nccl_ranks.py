"""Workers that share a GPU with `--share-gpus` are killed, twice and more; the others continue."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
import torch, paceline
from torch.nn.functional import cross_entropy

marks, kills = sys.argv[1], {int(step) for step in sys.argv[2].split(",") if step}
world = paceline.init_process_group()
joins = "nccl" not in torch.distributed.get_backend()  # a replacement, which is alone until it does
g = torch.Generator().manual_seed(0)
x = torch.randn(300, 10, generator=g, dtype=torch.float64)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
net = net.double().to(world.device)
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.01), data, global_batch=30,
                   epochs=8, seed=0, shards=6, options=paceline.RunOptions(progress="quiet"))
for step in run:
    with step:
        for x, y in step.batches():
            mark = f"{marks}/{step.number}"
            due = step.number in kills and run.world.rank == step.number % 3
            if due and not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(cross_entropy(run.model(x), y))
    time.sleep(0.05)
assert "nccl" in torch.distributed.get_backend()
if joins:
    print("joined", flush=True)
total = sum(p.double().sum().item() for p in net.parameters())
print(f"ended after {run.step} steps with {total:.12f}", flush=True)
"""


def train(folder: Path, kills: str) -> tuple[list[float], int, str]:
    """What workers ended with, how many of them were replacements, and what was said."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--share-gpus", "--workers", "3"]
    done = subprocess.run(
        [*command, str(script), str(folder), kills],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    ends = re.findall(r"ended after 80 steps with (\S+)", done.stdout)
    return [float(each) for each in ends], done.stdout.count("joined"), done.stderr


@pytest.mark.parametrize("kills", ["7", "7,20,34"])
def test_a_run_over_nccl_survives_its_workers(kills: str, tmp_path: Path) -> None:
    undisturbed, _, _ = train(tmp_path / "calm", "")
    ends, joined, errors = train(tmp_path / "killed", kills)
    assert len(ends) == 3
    assert joined
    assert ends == pytest.approx([undisturbed[0]] * len(ends), abs=1e-9)
    assert "collective timeout" not in errors, errors[-6000:]
