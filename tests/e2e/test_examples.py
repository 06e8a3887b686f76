"""Every example runs, on several workers and on one, and shows what it says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"

# What each prints, whatever the number of workers.
SHOWN = {
    "accumulation.py": r"difference to one process on all sentences: \d+e-0[789]\b|: 0e\+00",
    "checkpoint_clean_keys.py": r"saved under the wrapper: 0\.weight, .*loaded into the bare model",
    "comm_hook.py": r"8,320 bytes .* difference [1-9]e-0[45]",
    "data_parallel.py": r"1\d\d of 101 right.*loaded into the bare model",
    "ddp_plain.py": r"epoch 2: loss 0\.[01]\d\d ",
    "evaluation.py": r"52 of 101 right: accuracy 0\.5149",
    "notebook_launch.py": r"rank 1: loss \d+\.\d\d -> 0\.0\d+",
}


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_shown(output: str, name: str) -> None:
    assert re.search(SHOWN[name], output, re.S), output


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.py")) == sorted(SHOWN)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(SHOWN.keys() - {"notebook_launch.py"}))
def test_an_example_runs_on_any_number_of_workers(
    name: str, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        runpy.run_path(str(FOLDER / name), run_name="__main__")

    paceline.launch(run, workers=workers, label=False)
    assert_shown(capsys.readouterr().out, name)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_code_of_the_readme_runs(workers: int) -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    begin = lines.index("```python") + 1
    assert begin < 25
    code = "\n".join(lines[begin : lines.index("```", begin)])

    def run() -> float:
        names: dict[str, Any] = {}
        exec(code, names)
        names["model"].check_in_sync()
        names["world"].close()
        return float(names["loss"])

    assert len(paceline.launch(run, workers=workers)) == workers


def test_the_plain_loop_runs_under_the_launcher() -> None:
    script = str(FOLDER / "ddp_plain.py")
    output = run_python("-m", "paceline", "run", "--workers", "2", script)
    assert_shown(output, "ddp_plain.py")
    assert "[rank 0] epoch 0" in output


@pytest.mark.parametrize("name", ["ddp_plain.py", "notebook_launch.py"])
def test_an_example_runs_under_plain_python(name: str) -> None:
    assert_shown(run_python(str(FOLDER / name)), name)
