"""A run whose update is shared out, under the launcher: what a death costs."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from paceline.testing import run_ranks

SCRIPT = """
import os, torch
from pathlib import Path
from paceline import Run, RunOptions
from paceline.testing import seeded
from torch.utils.data import TensorDataset

def fit(world=None, folder=None, update="whole"):
    net = seeded(torch.nn.Sequential(torch.nn.Linear(4, 90), torch.nn.Linear(90, 1)))
    data = TensorDataset(torch.linspace(-1, 1, 48 * 4).view(48, 4))
    options = RunOptions(update=update, checkpoint_every=3, progress="plain", handle_signals=False)
    run = Run(net, torch.optim.AdamW(net.parameters()), data, global_batch=4, epochs=1,
              folder=folder, world=world, options=options)
    for step in run:
        if step.number == 8 and run.world.rank == 1 and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), 9)
        with step:
            for (x,) in step.batches():
                step.backward(run.model(x).square().mean())
    return str([param.tolist() for param in net.parameters()])

if __name__ == "__main__":
    weights = fit(folder="run", update="sharded")
    Path("weights" + os.environ["RANK"]).write_text(weights)
"""


def test_after_a_death_all_start_again_from_the_newest_checkpoint_and_train_the_same(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "kill").touch()
    flags = ["--workers", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", *flags, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "A worker that dies takes its share along, so its death ends the run" in said
    # Checkpoints are written in the background: that of step 6 is there, or that of step 3.
    assert re.search("Step 7 is done again|Steps 4 to 7 are done again", said), said
    expected = run_ranks(2, runpy.run_path(str(tmp_path / "script.py"))["fit"])
    assert [(tmp_path / f"weights{rank}").read_text() for rank in (0, 1)] == expected
