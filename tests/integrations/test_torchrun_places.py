"""The same script under `paceline.launch` and torchrun gives the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import paceline

SCRIPT = """
import json, os, torch
from pathlib import Path
from paceline import Run, RunOptions
from torch.utils.data import TensorDataset

def fit():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    data = TensorDataset(torch.randn(20, 4))
    run = Run(net, torch.optim.SGD(net.parameters(), lr=0.1), data, global_batch=6, epochs=2,
              shards=2, options=RunOptions(progress="quiet"))
    for step in run:
        with step:
            for (x,) in step.batches():
                step.backward(run.model(x).square().sum(), reduction="sum")
    return net[0].weight.flatten().tolist()

if __name__ == "__main__":
    Path(f"weights{os.environ.get('RANK', '')}.json").write_text(json.dumps(fit()))
"""


def weights(folder: Path, *command: str) -> list[list[float]]:
    """What each rank wrote, to a file of its own: lines of several ranks can run together."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = sorted(folder.glob("weights*.json"))
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


@pytest.mark.usefixtures("_half_of_torch")
def test_the_place_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fitting.py").write_text(textwrap.dedent(SCRIPT))
    torchs = weights(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node=2", "fitting.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    from fitting import fit  # type: ignore[import-not-found]

    (alone,) = paceline.launch(fit, workers=1)
    launched = paceline.launch(fit, workers=2)
    assert len(torchs) == len(launched) == 2
    for found in (*torchs, *launched):
        assert found == pytest.approx(alone, rel=1e-4, abs=1e-6)
