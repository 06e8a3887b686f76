"""The examples of docs/run.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.files.run_folder import RunFolder, read_events, read_info
from paceline.run import RunOptions

PAGE = Path(__file__).parents[2] / "docs" / "run.md"


def test_the_loop_and_the_evaluation_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_PROGRESS", "quiet")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    loop = next(block for block in blocks if "for step in run" in block)
    scoring = next(block for block in blocks if "def score" in block)
    net = nn.Linear(4, 3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 4, generator=generator), torch.randint(3, (300,), generator=generator)
    names: dict[str, Any] = {
        "F": F,
        "net": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "dataset": TensorDataset(x, y),
        "test_set": TensorDataset(x[:50], y[:50]),
    }
    exec(scoring.partition("\nrun.evaluate")[0], names)
    exec(loop, names)
    folder = RunFolder("runs/digits")
    info = read_info(folder)
    assert info is not None
    assert (info.status, info.step) == ("finished", 15)
    kinds = [event["kind"] for event in read_events(folder)]
    assert kinds.count("evaluation") == kinds.count("epoch") == 5


def test_every_option_is_named_on_the_page() -> None:
    text = PAGE.read_text()
    for name in RunOptions.__dataclass_fields__:
        assert f"`{name}`" in text or f"`{name}=" in text, name
