"""The programs of the README run as they are printed, and print something."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import paceline

README = (Path(__file__).parents[2] / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_code_comes_early() -> None:
    assert README.splitlines().index("```python") < 24


@pytest.mark.usefixtures("_half_of_torch")
@pytest.mark.parametrize(
    ("name", "workers", "shown"),
    [
        ("train.py", 1, r"epoch 4: loss 0\.[0-4]\d\d"),
        ("train.py", 2, r"\[rank 1\] epoch 4: loss 0\.[0-4]\d\d"),
        ("steps.py", 2, r" 5 +0\.[0-4]\d{3}"),
    ],
)
def test_a_program_of_the_readme_runs_as_printed(
    name: str,
    workers: int,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (program,) = (each for each in PROGRAMS if each.partition("\n")[0].endswith(f"# {name}"))
    (tmp_path / name).write_text(program)
    monkeypatch.chdir(tmp_path)

    def run() -> None:
        names = runpy.run_path(name, run_name="__main__")
        if name == "train.py":
            names["model"].check_in_sync()

    paceline.launch(run, workers=workers)
    said = "".join(capsys.readouterr())
    assert re.search(shown, said), said
