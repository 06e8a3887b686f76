"""Several models through deaths and at other sizes: a death undoes the open turn alone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.files import RunFolder, read_events
from tests.faults import TrainingFaults, assert_survived, run_training, train_alone

SCRIPT = Path(__file__).with_name("models_script.py")
EVERYWHERE = (
    TrainingFaults()
    .kill(rank=0, step=2, where="before the sum")
    .kill(rank=1, step=5, where="after the last bucket", signal=signal.SIGSEGV)
    .kill(rank=2, step=8, where="in the commit")
    .kill(rank=None, step=8, where="while healing")
    .kill(rank=0, step=12, where="step")
    .kill(rank=1, step=16, where="between steps")
    .kill(rank=None, step=16, where="while starting")
    .kill(rank=0, step=20, where="in the commit")
    .kill(rank=2, step=20, where="before the sum")
    .kill(rank=1, step=25, where="before the sum")
    .stop(rank=0, step=30, where="before the sum")
)


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
def test_deaths_in_any_turn_leave_no_trace(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TRANSPORT", transport)
    reference = train_alone(SCRIPT, "--folder", tmp_path / "alone")
    done = run_training(
        *(SCRIPT, "--folder", tmp_path / "run"),
        workers=3,
        faults=EVERYWHERE,
        flags=["--stall-after", 2],
    )
    assert_survived(done, reference, rtol=1e-10, atol=1e-12)


def test_a_block_that_is_entered_again_keeps_what_schedulers_did_in_applied_turns(
    tmp_path: Path,
) -> None:
    reference = train_alone(SCRIPT, "--folder", tmp_path / "alone")
    command = SCRIPT, "--folder", tmp_path / "run", "--leave-last-turn", 4
    done = run_training(*command, workers=3)
    assert_survived(done, reference, rtol=1e-10, atol=1e-12)


def metrics_of(folder: Path) -> list[Any]:
    events = read_events(RunFolder(folder))
    return [each["metrics"] for each in events if each["kind"] == "epoch"]


def test_metrics_of_applied_turns_outlive_workers(tmp_path: Path) -> None:
    reference = train_alone(SCRIPT, "--folder", tmp_path / "alone")
    faults = TrainingFaults().kill(rank=2, step=12, where="in the commit")
    done = run_training(
        *(SCRIPT, "--folder", tmp_path / "run", "--kill-in-last-turn", 4),
        workers=3,
        faults=faults,
    )
    assert_survived(done, reference, rtol=1e-10, atol=1e-12)
    assert (tmp_path / "run" / "killed").exists()
    expected = [pytest.approx(each, rel=1e-9) for each in metrics_of(tmp_path / "alone")]
    assert metrics_of(tmp_path / "run") == expected
    assert {"critic_loss", "generator_loss", "gap"} <= metrics_of(tmp_path / "run")[0].keys()


def test_metrics_outlive_a_worker_that_dies_in_the_first_steps_of_a_start(tmp_path: Path) -> None:
    train_alone(SCRIPT, "--folder", tmp_path / "alone")
    command = SCRIPT, "--folder", tmp_path / "run", "--break-after", 13
    assert run_training(*command, workers=3).exit_code == 0
    faults = TrainingFaults().kill(rank=1, step=1, where="at the vote")
    done = run_training(*command, workers=3, faults=faults)
    assert [strike.step <= 16 for strike in done.strikes] == [True], done.output
    expected = [pytest.approx(each, rel=1e-9) for each in metrics_of(tmp_path / "alone")]
    assert metrics_of(tmp_path / "run") == expected
