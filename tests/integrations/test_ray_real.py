"""A `Run` on a real Ray cluster of this machine, one worker of which is killed.

Ray listens on every interface, so the cluster gets a network that has none but loopback.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UsageError
from tests.docs_code import ROOT
from tests.hosts import SPACES, why_not

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="not installed: ray"
)
EXAMPLE = ROOT / "examples" / "frameworks" / "ray_train.py"
KILL = """
        if step.number == 12 and run.world.rank == 1 and not os.path.exists({marker!r}):
            open({marker!r}, "w").close()
            os.kill(os.getpid(), 9)
        with step:
"""


def train_without_ray(folder: str) -> None:
    """On a worker: what the example trains, by a plain `Run`."""
    train = runpy.run_path(str(EXAMPLE))["train"]
    train.__globals__["RayRun"] = partial(paceline.Run, folder=folder)
    train({})


def weights(path: Path) -> list[torch.Tensor]:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    paceline.load_weights(net, path)
    return list(net.parameters())


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_killed_worker_changes_nothing_and_ray_has_metrics_and_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "killed"
    script = EXAMPLE.read_text().replace("\n        with step:\n", KILL.format(marker=str(marker)))
    (tmp_path / "train.py").write_text(script)
    on_loopback = [*SPACES, "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
    done = subprocess.run(
        [*on_loopback, sys.executable, "train.py", str(tmp_path / "storage")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    said = re.search(r"^loss (\S+) after step 24\nsaved in (.*)$", done.stdout, re.M)
    assert said is not None, done.stdout + done.stderr
    assert marker.exists()
    checkpoint = Path(said[2])
    names = sorted(path.name for path in checkpoint.parent.glob("step-*"))
    assert [int(name[5:13]) for name in names] == [8, 16, 24]

    paceline.launch(train_without_ray, str(tmp_path / "alone"), workers=2)
    assert re.search(rf"^ +3 +{float(said[1]):.4f} ", capfd.readouterr().out, re.M)
    for there, here in zip(weights(checkpoint), weights(tmp_path / "alone"), strict=True):
        assert torch.equal(there, here)


def test_a_ray_run_outside_of_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # as Ray itself sets it, for good
    from paceline.ray import RayRun

    net = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="outside of a worker of Ray Train"):
        RayRun(net, torch.optim.SGD(net.parameters()), [1], global_batch=1, epochs=1)
