"""Scripts for other frameworks train on our engine as on torch's, to the last printed digit."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

LIBRARIES = ("accelerate", "transformers", "lightning")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"
LAUNCHER = ("-m", "paceline", "run", "--workers", "2", "--no-label")
EPOCHS = {
    "accelerate_loop.py": 3,
    "hf_trainer.py": 7,
    "lightning_trainer.py": 3,
    "fabric_loop.py": 3,
}
"""Lines about epochs that each example prints."""


@pytest.fixture(scope="module")
def _imported() -> None:
    """The workers on torch are forks, so that these seconds are spent once."""
    for name in (*LIBRARIES, "lightning.fabric", "lightning.pytorch"):
        importlib.import_module(name)


def run(folder: Path, *command: str | Path, **environ: str) -> str:
    """What `python command` prints."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_on_torch(name: str) -> None:
    """On a worker: the example, as if the call to enable() were not there."""
    sys.argv = [name]
    paceline.enable = lambda: None  # type: ignore[assignment]
    runpy.run_path(str(FOLDER / name), run_name="__main__")


def split(output: str) -> tuple[str, list[str]]:
    """Whose engine it was, and what was printed about epochs."""
    engine = re.search(r"^engine: (\w+)", output, re.M)
    assert engine is not None, output
    return engine[1], re.findall(r"^epoch .*", output, re.M)


@pytest.mark.usefixtures("_imported")
@pytest.mark.parametrize("name", EPOCHS)
def test_an_example_prints_the_losses_that_it_prints_on_torch(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    paceline.launch(train_on_torch, name, workers=2, label=False)
    engine, expected = split(capsys.readouterr().out)
    assert (engine, len(expected)) == ("torch", EPOCHS[name])

    # Lightning's start their own workers.
    launcher = () if re.match("lightning|fabric", name) else LAUNCHER
    assert split(run(tmp_path, *launcher, FOLDER / name)) == ("paceline", expected)
