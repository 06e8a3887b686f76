"""A run whose update is shared out, under the launcher: what a death costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Checkpoints
from paceline.files import RunFolder, read_events
from tests.faults import Training, assert_survived, run_training, train_alone
from tests.faults.planned import Faults

SCRIPT = Path(__file__).with_name("survive_script.py")
ARGUMENTS = ("--epochs", 2, "--keep", 99)
LAST_STEP = 16
DEATHS = {
    "shared_memory": Faults()
    .kill(rank=1, step=3, where="before the gather")
    .kill(rank=2, step=8, where="while evaluating")
    .kill(rank=None, step=8, where="while healing")
    .kill(rank=1, step=LAST_STEP, where="in the commit"),
    "shared_memory, in saves": Faults()
    .kill(rank=1, step=5, where="while gathering")
    .kill(rank=None, step=10, where="while saving"),
    "c10d": Faults()
    .kill(rank=0, step=5, where="while saving")
    .kill(rank=2, step=LAST_STEP, where="before the gather"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path]:
    """The training on one worker, and its folder."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return train_alone(SCRIPT, "--folder", folder, *ARGUMENTS), folder


def epochs_in(folder: Path) -> dict[Any, str]:
    """What was last written of every epoch and every evaluation."""
    found = {}
    for event in read_events(RunFolder(folder)):
        if event["kind"] in ("epoch", "evaluation"):
            names = ("loss", "hits")
            metrics = {n: f"{event['metrics'][n]:.5g}" for n in names if n in event["metrics"]}
            found[event["kind"], event["step"]] = str(metrics)
    return found


def assert_whole(run: Path, steps: set[int], alone: Path) -> None:
    """Fail unless all these checkpoints can be read, and hold what those of one worker do."""
    ours, theirs = (Checkpoints(RunFolder(each).checkpoints) for each in (run, alone))
    for step in steps:
        saved = ours.load(step)
        assert saved is not None
        assert saved.step == step
        if step in (5, 8, 10, 15, LAST_STEP):
            expected = theirs.load(step)
            assert expected is not None
            assert saved.state.keys() == expected.state.keys()
            for name in ("model", "optimizer", "ema", "state"):
                torch.testing.assert_close(
                    *(each.state[name] for each in (saved, expected)), rtol=1e-9, atol=1e-11
                )


@pytest.mark.parametrize("deaths", DEATHS)
def test_after_deaths_the_others_train_the_same_and_go_back_only_where_memory_is_not_shared(
    deaths: str,
    alone: tuple[Training, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_TRANSPORT", deaths.partition(",")[0])
    done = run_training(
        *(SCRIPT, "--folder", tmp_path / "run", "--update", "sharded", *ARGUMENTS),
        workers=3,
        faults=DEATHS[deaths],
        timeout_s=100,
    )
    assert_survived(done, alone[0])
    assert epochs_in(tmp_path / "run") == epochs_in(alone[1])
    said = " ".join(done.output.split())
    goes_back = deaths == "c10d"
    assert bool(re.search(r"go back to the checkpoint of step \d+: ", said)) == goes_back
    if deaths.endswith("in saves"):
        events = read_events(RunFolder(tmp_path / "run"))
        saved = {event["step"] for event in events if event["kind"] == "checkpoint"}
        # Who gathers tries again; where the writer was not done when it died, all save later.
        assert 5 in saved
        assert saved & {10, 11, 12, 13}
        assert_whole(tmp_path / "run", saved, alone[1])
