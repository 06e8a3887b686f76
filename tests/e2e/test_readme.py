"""The programs of the README run as they are printed, and print something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train.py", r"\[rank 1\] epoch 4: loss 0\.[0-4]\d\d"),
        ("steps.py", r" 5 +0\.[0-4]\d{3}"),
    ],
)
def test_a_program_of_the_readme_runs_as_printed(tmp_path: Path, name: str, shown: str) -> None:
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (program,) = (each for each in programs if each.partition("\n")[0].endswith(f"# {name}"))
    (tmp_path / name).write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--workers", "2", name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout + done.stderr), done.stdout
