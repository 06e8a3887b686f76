"""Whatever is recorded or watched, a death leaves no trace."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults import Training, TrainingFaults, assert_survived, run_training, train_alone

SCRIPT = Path(__file__).with_name("survive_script.py")
OPTIONS: dict[str, tuple[list[str], list[str]]] = {
    "--timeline": (["--timeline", "{folder}/timeline"], []),
    "--trace-step": (["--trace-step", "10"], []),
    "--stall-after": (["--stall-after", "2"], []),
    "--watch": (["--watch"], []),
    "timeline=": ([], ["--spans"]),
    "trace_step=": ([], ["--record", "18"]),
    "noise_every=": ([], ["--noise", "3"]),
}
"""By name, flags of the launcher and arguments of the script."""
CASES = {
    "the launcher's": [name for name in OPTIONS if name.startswith("--")],
    "the run's": [name for name in OPTIONS if name.endswith("=")],
    "all": list(OPTIONS),
}
"""Every one of them with and without those of the other side; `make matrix` has each of them with
and without every other."""
DEATHS = (
    TrainingFaults()
    .kill(rank=1, step=9, where="before the sum")
    .kill(rank=0, step=10, where="between buckets")
    .kill(rank=2, step=18, where="after the last bucket", signal=signal.SIGSEGV)
    .kill(rank=None, step=18, where="while healing")
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return train_alone(SCRIPT, "--folder", folder, "--epochs", 3)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_recorded_and_watched_survives_deaths(
    case: str, undisturbed: Training, tmp_path: Path
) -> None:
    def given(part: int) -> list[Any]:
        texts = [each for name in CASES[case] for each in OPTIONS[name][part]]
        return [each.format(folder=tmp_path) for each in texts]

    training = run_training(
        *(SCRIPT, "--folder", tmp_path / "run", "--epochs", 3, *given(1)),
        workers=3,
        faults=DEATHS,
        flags=given(0),
    )
    assert_survived(training, undisturbed)
