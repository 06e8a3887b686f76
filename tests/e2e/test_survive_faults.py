"""TrainingFaults at every moment of a training leave no trace in it.

Each run has many of them, because starting a run takes longer than surviving a death.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from tests.faults import Training, TrainingFaults, assert_survived, run_training, train_alone

SCRIPT = Path(__file__).with_name("survive_script.py")
EVERYWHERE = (
    TrainingFaults()
    .kill(rank=0, step=2, where="before the sum")
    .kill(rank=1, step=3, where="between buckets", signal=signal.SIGSEGV)
    .kill(rank=2, step=8, where="while evaluating")
    .kill(rank=0, step=9, where="after the last bucket", signal=signal.SIGABRT)
    .kill(rank=1, step=10, where="in the commit")
    .kill(rank=None, step=10, where="while healing")
    .kill(rank=2, step=20, where="between steps")
    .kill(rank=None, step=20, where="while starting")
    .kill(rank=None, step=25, where="while saving")
    .exit(rank=0, step=30, where="before the sum", code=0)
    .kill(rank=None, step=30, where="while joining")
    .fail(rank=1, step=35, where="before the sum")
    .kill(rank=None, step=35, where="while a group is formed")
    .kill(rank=0, step=45, where="before the sum")
    .kill(rank=2, step=45, where="before the sum")
    .cut(rank=1, step=55)
    .delay(rank=2, step=60, seconds=0.5)
    .stop(rank=0, step=65, where="before the sum")
    .kill(rank=1, step=80, where="before the sum")
)
# Those in which ranks wait for each other's gradients, or leave a group and make a new one.
IN_A_SUM = (
    TrainingFaults()
    .kill(rank=0, step=2, where="before the sum")
    .kill(rank=1, step=10, where="between buckets", signal=signal.SIGSEGV)
    .kill(rank=None, step=10, where="while healing")
    .kill(rank=0, step=20, where="after the last bucket", signal=signal.SIGABRT)
    .kill(rank=None, step=20, where="while a group is formed")
    .kill(rank=0, step=30, where="before the sum")
    .kill(rank=2, step=30, where="before the sum")
    .cut(rank=1, step=45)
    .stop(rank=0, step=55, where="before the sum")
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path]:
    """The training on one worker, and its folder."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return train_alone(SCRIPT, "--folder", folder), folder


def summaries(folder: Path) -> Counter[Any]:
    """What was written of epochs and evaluations, and how often."""
    found: Counter[Any] = Counter()
    for path in sorted((folder / "events").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["kind"] in ("epoch", "evaluation"):
                metrics = {name: f"{each:.5g}" for name, each in event["metrics"].items()}
                # Rank 0 counts it, and may die in the step.
                metrics.pop("grad_norm", None)
                found[event["kind"], event["step"], str(metrics)] += 1
    return found


def assert_flat(training: Training) -> None:
    """What processes hold does not grow with the number of generations."""
    generations = max(step.generation for step in training.steps)
    assert generations > len(training.planned.planned)
    launcher = [each["launcher"] for each in training.footprints]
    for (fds, threads, kib, processes), name in ((launcher[0], "first"), (launcher[-1], "last")):
        assert fds < 60, name
        assert threads < 6, name
        assert kib < launcher[0][2] + 4096, name
        assert processes < 12, name
    assert max(each["store"][0] for each in training.footprints if "store" in each) < 30
    assert max(each["worker"][0] for each in training.footprints) < 100
    assert max(each["worker"][1] for each in training.footprints) < 50


@pytest.mark.parametrize(
    ("transport", "faults"), [("shared_memory", EVERYWHERE), ("c10d", IN_A_SUM)]
)
def test_faults_at_every_moment_leave_no_trace(
    transport: str,
    faults: TrainingFaults,
    undisturbed: tuple[Training, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_TRANSPORT", transport)
    reference, folder = undisturbed
    with tempfile.TemporaryDirectory() as temporary:  # sockets have short paths
        done = run_training(
            *(SCRIPT, "--folder", tmp_path / "run"),
            workers=3,
            faults=faults,
            flags=["--stall-after", 2, "--survive-errors"],
            environ={"TMPDIR": temporary},
            timeout_s=100,
        )
        left = os.listdir(temporary)
    assert_survived(done, reference)
    assert summaries(tmp_path / "run") == summaries(folder)
    assert "was silent" not in done.output  # who is slow is not ended
    assert "worker 0 was stopped by a signal" in done.output
    assert_flat(done)
    assert not [name for name in left if "torchinductor" not in name]


def test_a_stream_is_read_on_where_a_worker_died() -> None:
    """Without a folder, so that nothing but the survivors knows the state."""
    reference = train_alone(SCRIPT, "--stream", "--epochs", 2)
    plan = TrainingFaults.random(
        7, ranks=3, steps=range(2, 12), count=2, wheres=["step", "before the sum", "between steps"]
    )
    done = run_training(SCRIPT, "--stream", "--epochs", 2, workers=3, faults=plan)
    assert_survived(done, reference)


def test_a_moment_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"'before a sum'.*Did you mean 'before the sum'"):
        run_training(
            SCRIPT, workers=2, faults=TrainingFaults().kill(rank=0, step=1, where="before a sum")
        )
