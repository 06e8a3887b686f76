"""A training that is killed and resumed, read back from every tracker by its own library."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MISSING = [
    name
    for name in ("mlflow", "tensorboard", "trackio", "wandb")
    if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

SCRIPT = """
import os, pathlib, sys, time
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Linear(4, 2)
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())
run = paceline.Run(
    net, torch.optim.SGD(net.parameters(), lr=0.1), data, global_batch=16, epochs=4, folder="run",
    trackers=["csv", "tensorboard", "wandb:mine", "mlflow:mine", "trackio:mine"],
    options=paceline.RunOptions(progress="plain", checkpoint_every=3))


def score(batch):
    return {"loss": nn.functional.cross_entropy(run.model(batch[0]), batch[1])}


for step in run:
    with step:
        for inputs, targets in step.batches():
            step.backward(nn.functional.cross_entropy(run.model(inputs), targets))
    if step.number % 4 == 0:
        run.evaluate(score, data)
    if step.number == 11 and sys.argv[1:] == ["die"]:
        for name in ("csv", "tensorboard", "wandb", "mlflow", "trackio"):
            path = pathlib.Path(f"run/tracker-{name}.json")
            while not path.exists() or "train" not in path.read_text():
                time.sleep(0.1)
        # W&B writes to its disk every 15 s; what it has not written is lost with the process.
        files = pathlib.Path("run/wandb")
        written = lambda: sum(path.stat().st_size for path in files.glob("o*/*.wandb"))
        before = written()
        while written() == before:
            time.sleep(0.1)
        os._exit(3)
"""
STEPS, EVALUATIONS = list(range(1, 17)), [4, 8, 12, 16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two workers trained, died after step 11, and trained to the end from step 9."""
    folder = tmp_path_factory.mktemp("trackers")
    (folder / "train.py").write_text(SCRIPT)
    environ = {
        **os.environ,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    launcher = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--no-survive"]
    for arguments, code in (["die"], 3), ([], 0):
        done = subprocess.run(
            [*launcher, "train.py", *arguments],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "switched off" not in done.stdout + done.stderr
    assert "continues after step 9" in done.stdout
    return folder


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[int, float]:
    """Every step's loss, as CSV has it."""
    with open(folder / "run" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(int(row["step"]), float(row["train/loss"])) for row in rows if row["train/loss"]]
    assert [step for step, _ in found] == STEPS
    assert [int(row["step"]) for row in rows if row["eval/loss"]] == EVALUATIONS
    return dict(found)


def test_tensorboard_has_every_step_once(folder: Path, losses: dict[int, float]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in found] == STEPS
    assert dict(found) == pytest.approx(losses, rel=1e-6)
    assert [event.step for event in events.Scalars("eval/loss")] == EVALUATIONS
    assert "settings/text_summary" in events.Tags()["tensors"]


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a W&B file: a log in blocks of 32 KiB, with pieces of records in them."""
    data, at, begun = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        rest = -at % 2**15
        if rest < 7:
            at += rest
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield begun
            begun = b""


def ask(folder: Path, code: str) -> Any:
    """What a program of its own prints, as JSON."""
    environ = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_wandb_has_every_step_once_under_one_id(folder: Path, losses: dict[int, float]) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    found: list[tuple[int, float]] = []
    ids, artifacts = set(), 0
    for path in sorted((folder / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in records_of(path):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            artifacts += record.HasField("artifact") or (
                record.HasField("request") and record.request.HasField("log_artifact")
            )
            values = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if "train/loss" in values:
                step = int(values.get("_step", record.history.step.num))
                found.append((step, float(values["train/loss"])))
    assert len(ids) == 1
    assert [step for step, _ in found] == STEPS
    assert dict(found) == pytest.approx(losses)
    assert artifacts == 1


def test_mlflow_has_every_step_once_and_the_checkpoint(
    folder: Path, losses: dict[int, float]
) -> None:
    found = ask(
        folder,
        f"""
import mlflow
client = mlflow.MlflowClient("sqlite:///{folder}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
history = client.get_metric_history(run.info.run_id, "train/loss")
saved = [each.path for each in client.list_artifacts(run.info.run_id, "checkpoints")]
history = sorted((each.step, each.value) for each in history)
print(json.dumps([history, run.info.status, run.data.params, saved]))
""",
    )
    history, status, params, (saved,) = found
    assert [step for step, _ in history] == STEPS
    assert dict(history) == pytest.approx(losses)
    assert status == "FINISHED"
    assert params["global_batch"] == "16"
    assert saved.startswith("checkpoints/step-00000016")


def test_trackio_has_every_step_once(folder: Path, losses: dict[int, float]) -> None:
    runs, logs = ask(
        folder,
        """
import trackio
runs = list(trackio.Api().runs("mine"))
logs = trackio.SQLiteStorage.get_logs("mine", runs[0].name)
print(json.dumps([len(runs), [[each["step"], each.get("train/loss")] for each in logs]]))
""",
    )
    found = [(step, loss) for step, loss in logs if loss is not None]
    assert runs == 1
    assert [step for step, _ in found] == STEPS
    assert dict(found) == pytest.approx(losses)
