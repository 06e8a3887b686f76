"""A worker that computes wrong is replaced, and the training is the one that was meant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.show.compare import compare, read_hashes

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys, torch, paceline
from torch import nn
from torch.nn.functional import cross_entropy

folder, audit, lies, root = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
sys.path.insert(0, root)
from tests.faults.flips import Flip

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
g = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(90, 8, generator=g), torch.randint(3, (90,), generator=g))
options = paceline.RunOptions(progress="quiet", same_bits=True, audit=audit)
run = paceline.Run(net, torch.optim.AdamW(net.parameters(), lr=0.02), data, global_batch=30,
                   epochs=5, shards=6, folder=folder, options=options)
lie, mark = lies.get(str(run.world.rank)), f"{folder}.{run.world.rank}"
if os.path.exists(mark):  # the worker that takes its place computes right
    lie = None
planned = lie and Flip(net[3], bit=22, **lie)
for step in run:
    if lie:
        planned.begin(step.number)
        if step.number >= lie["step"]:
            open(mark, "w").close()
    with step:
        for x, y in step.batches():
            step.backward(cross_entropy(run.model(x), y))
"""


def train(where: Path, name: str, workers: int, audit: float, **lies: Any) -> Any:
    (where / "train.py").write_text(SCRIPT)
    launcher = ["-m", "paceline", "run", "--workers", workers] if workers > 1 else []
    by_rank = json.dumps({rank[1:]: lie for rank, lie in lies.items()})
    command = [sys.executable, *launcher, "train.py", name, audit, by_rank, ROOT]
    return subprocess.run(
        list(map(str, command)),
        cwd=where,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def read_findings(folder: Path) -> list[dict[str, Any]]:
    lines = [
        json.loads(line)
        for path in sorted((folder / "events").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [each for each in lines if each["kind"] == "audit"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("alone")
    assert train(where, "run", 1, 0.0).returncode == 0
    return where / "run"


@pytest.mark.parametrize(
    ("workers", "rank", "lie"),
    [
        (3, 1, {"where": "gradient", "step": 4, "stays": True}),
        (3, 0, {"where": "weight", "step": 9}),
        (2, 1, {"where": "activation", "step": 6}),
        (2, 0, {"where": "weight", "step": 9}),
    ],
    ids=["a gradient, always", "a weight of rank 0", "an activation, once", "a weight of two"],
)
def test_a_worker_that_lies_is_replaced_and_changes_no_bit(
    workers: int, rank: int, lie: dict[str, Any], undisturbed: Path, tmp_path: Path
) -> None:
    done = train(tmp_path, "run", workers, 1.0, **{f"r{rank}": lie})
    assert done.returncode == 0, done.stderr
    assert compare(read_hashes(undisturbed), read_hashes(tmp_path / "run"))["step"] is None
    [found] = read_findings(tmp_path / "run")
    assert (found["step"], found["culprit"]) == (lie["step"], rank)
    assert "AuditError" in done.stderr


def test_two_that_disagree_for_good_end_with_an_error(tmp_path: Path) -> None:
    lie = {"where": "gradient", "step": 4, "stays": True}
    done = train(tmp_path, "run", 2, 1.0, r1=lie)
    assert done.returncode == 1
    assert [each["culprit"] for each in read_findings(tmp_path / "run")] == [None]
