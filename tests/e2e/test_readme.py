"""The program of the README runs as it is printed, and keeps its promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paceline
from tests.docs_code import ROOT, blocks, run_script


@pytest.mark.usefixtures("_half_of_torch")
def test_the_program_of_the_readme_ends_the_same_on_one_worker_and_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = ROOT / "README.md"
    assert readme.read_text().splitlines().index("```python") < 24
    (program,) = (block.code for block in blocks(readme) if block.script == "train.py")
    losses = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        (folder / "train.py").write_text(program)
        monkeypatch.chdir(folder)
        paceline.launch(run_script, "train.py", workers=workers)
        losses.append(re.findall(r"^ +(\d) +(0\.\d{4})", capsys.readouterr().out, re.M))
    assert losses[0] == losses[1]
    assert float(losses[0][4][1]) < 0.5
