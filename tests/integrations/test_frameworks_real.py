"""Scripts for other frameworks train on our engine as on torch's, to the last printed digit."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.docs_code import ROOT, blocks, run_script

LIBRARIES = ("accelerate", "transformers", "lightning")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

FOLDER = ROOT / "examples" / "frameworks"
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


def train_without_enable(name: str, *arguments: str) -> None:
    """On a worker: the example, as if the call to enable() were not there."""
    if "paceline" in arguments:
        importlib.import_module("paceline.lightning")
    sys.argv = [name, *arguments]
    paceline.enable = lambda: None  # type: ignore[assignment]
    run_script(FOLDER / name)


PROGRAMS = [
    pytest.param(*block.sides, id=f"{page}-{number}")
    for page in ("from-accelerate", "from-hf-trainer", "from-lightning")
    for number, block in enumerate(blocks(ROOT / "docs" / f"{page}.md"))
    if block.language == "diff" and "loss" in block.code
]


@pytest.mark.usefixtures("_imported")
@pytest.mark.parametrize(("old", "new"), PROGRAMS)
def test_both_sides_of_a_page_print_the_same_losses(
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    Path("old.py").write_text(old)
    Path("new.py").write_text(new)
    paceline.launch(run_script, "old.py", workers=2, label=False)
    # enable() is refused where a library has torch's classes already, as in forks of this process.
    for output in (capsys.readouterr().out, run(tmp_path, *LAUNCHER, "new.py")):
        said.append(re.findall(r"^epoch \d: loss \d\.\d{6}$", output, re.M))
    assert said[0] == said[1]
    assert len(said[0]) == 2


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
    paceline.launch(train_without_enable, name, workers=2, label=False)
    engine, expected = split(capsys.readouterr().out)
    assert (engine, len(expected)) == ("torch", EPOCHS[name])

    # Lightning's start their own workers, and know strategies by name.
    starts_workers = re.match("lightning|fabric", name)
    output = run(tmp_path, *(() if starts_workers else LAUNCHER), FOLDER / name)
    assert split(output) == ("paceline", expected)
    if starts_workers:
        paceline.launch(train_without_enable, name, "paceline", workers=2, label=False)
        assert split(capsys.readouterr().out) == ("paceline", expected)


def train_two_optimizers(how: str, folder: str) -> tuple[str, list[float]]:
    """On a worker: Lightning with a loop of its own; whose engine it was, and the weights."""
    if how == "enable":
        paceline.enable()
    import lightning as L

    if how == "paceline":
        importlib.import_module("paceline.lightning")

    class Module(L.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = nn.Linear(4, 3), nn.Linear(3, 1)
            self.engine = ""

        def training_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.engine = type(self.trainer.strategy.model).__module__.partition(".")[0]
            made = self.maker(batch[0])
            for number, inputs in enumerate((made, made.detach())):
                optimizer = self.optimizers()[number]
                self.toggle_optimizer(optimizer)
                self.manual_backward((self.judge(inputs) - number).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(p.parameters(), 0.1) for p in (self.maker, self.judge)]

    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="paceline" if how == "paceline" else "ddp_find_unused_parameters_true",
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
    assert trainer.strategy.model is module
    return module.engine, [p.sum().item() for p in module.parameters()]


@pytest.mark.usefixtures("_imported")
def test_a_lightning_module_that_steps_two_optimizers_itself_gets_the_weights_of_torch(
    tmp_path: Path,
) -> None:
    (engine, expected), _ = paceline.launch(train_two_optimizers, "torch", str(tmp_path), workers=2)
    assert engine == "torch"
    results = paceline.launch(train_two_optimizers, "paceline", str(tmp_path), workers=2)
    assert results == [("paceline", expected)] * 2
    program = (
        "import paceline, sys\n"
        "from tests.integrations.test_frameworks_real import train_two_optimizers as train\n"
        "print(paceline.launch(train, 'enable', sys.argv[1], workers=2))"
    )
    assert run(ROOT, "-c", program, tmp_path).splitlines()[-1] == str(results)
