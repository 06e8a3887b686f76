"""Every block of code in the README and in docs/ runs, under names that pages take for granted."""

from __future__ import annotations

import doctest
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.docs_code import PAGES, ROOT, Block, blocks, run_script

NAMES = """
import os, torch, paceline
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from paceline import *
torch.set_num_threads(1)
torch.manual_seed(0)
world = paceline.init_process_group()
x = torch.randn(300, 4)
y = torch.randint(3, (300,))
dataset = TensorDataset(x, y)
test_set = TensorDataset(x[:50], y[:50])
net = nn.Linear(4, 3)
model = paceline.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(dataset, batch_size=50)
loss_fn = F.cross_entropy
loss = loss_fn(model(x), y)
loss.backward()
optimizer.zero_grad()
step, epoch, path = 1, 0, "saved.pt"
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_PROGRESS", "quiet")
    monkeypatch.setenv("WANDB_MODE", "offline")


def run_block(block: Block, names: dict[str, Any], where: str) -> None:
    exec(compile(block.given, where, "exec"), names)
    if not block.code.startswith(">>>"):
        exec(compile(block.code, where, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.code, names, where, None, 0)
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert result.failed == 0, f"{where}: it prints something else"


def run_page(page: str) -> int:
    """On a worker: the fragments of a page, one after the other, in the names that they share."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(NAMES, names)
    ran = 0
    for number, block in enumerate(blocks(Path(page)), 1):
        if block.language == "python" and not block.script and not block.not_run:
            run_block(block, names, f"{page}, block {number}")
            ran += 1
    return ran


WITH_FRAGMENTS = [
    page for page in PAGES if any(b.language == "python" and not b.script for b in blocks(page))
]


@pytest.mark.parametrize("page", WITH_FRAGMENTS, ids=lambda page: page.name)
def test_the_fragments_of_a_page_run(page: Path) -> None:
    (ran,) = paceline.launch(run_page, str(page), workers=1)
    assert ran or all(b.not_run for b in blocks(page) if b.language == "python")


SCRIPTS = [(page, block.script) for page in PAGES for block in blocks(page) if block.script]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("page", "name"), SCRIPTS, ids=lambda value: getattr(value, "name", value))
def test_a_script_of_a_page_runs(page: Path, name: str, workers: int) -> None:
    (block,) = (each for each in blocks(page) if each.script == name)
    if block.not_run:
        pytest.skip(block.not_run)
    Path(name).write_text(block.code)
    paceline.launch(run_script, name, workers=workers)


def programs(page: str) -> list[Block]:
    """The diffs that are whole programs."""
    return [b for b in blocks(ROOT / "docs" / page) if b.language == "diff" and "import" in b.code]


def losses(said: str) -> list[str]:
    return re.findall(r"loss (\d+\.\d+)", said)


def test_both_sides_of_coming_from_ddp_end_with_the_same_loss(
    capfd: pytest.CaptureFixture[str],
) -> None:
    (diff,) = programs("from-ddp.md")
    said = []
    for number, side in enumerate(diff.sides):
        Path(f"side{number}.py").write_text(side)
        paceline.launch(run_script, f"side{number}.py", workers=2)
        said.append(sorted(losses("".join(capfd.readouterr()))))
    assert said[0] == said[1]
    assert len(said[0]) == 2


@pytest.mark.parametrize("page", ["from-horovod.md", "from-data-parallel.md"])
def test_the_new_side_of_a_diff_trains(page: str, capfd: pytest.CaptureFixture[str]) -> None:
    (diff,) = programs(page)
    Path("new.py").write_text(diff.sides[1])
    paceline.launch(run_script, "new.py", workers=2)
    (*_, loss) = losses("".join(capfd.readouterr()))
    assert float(loss) < 0.6


def test_the_old_side_of_coming_from_data_parallel_runs() -> None:
    (diff,) = programs("from-data-parallel.md")
    Path("old.py").write_text(diff.sides[0])
    paceline.launch(run_script, "old.py", workers=1)


def test_the_notebook_runs_cell_by_cell(capfd: pytest.CaptureFixture[str]) -> None:
    """In a fresh process, as a kernel would; without Jupyter, which only shows what it prints."""
    notebook = json.loads((ROOT / "examples" / "two_workers.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] for c in notebook["cells"] if c["cell_type"] == "code")
    Path("cells.json").write_text(json.dumps(cells))
    code = """
        import json, pathlib, linecache
        names = {"__name__": "__main__"}
        for number, cell in enumerate(json.loads(pathlib.Path("cells.json").read_text())):
            exec(compile(cell, f"<cell {number}>", "exec"), names)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "two workers equal to the last bit" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="not installed: mkdocs")
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'id="paceline.run.Run.evaluate"' in (tmp_path / "reference-training.html").read_text()
    assert "Nothing of it was used." in (tmp_path / "troubleshooting.html").read_text()
    for page in tmp_path.glob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text()
        )
        assert not [url for url in fetched if "mkdocs-material" not in url], page
