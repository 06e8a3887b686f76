"""What docs/checkpoints.md shows works as it stands there."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint.command import VERBS
from paceline.checkpoint.directory import list_entries
from paceline.cli import Parser

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def test_the_first_code_saves_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = PAGE.split("```python\n")[1].split("```")[0]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        names = {"model": model, "optimizer": optimizer, "step": step, "loss": 0.5}
        exec(code, names)
    assert names["saved"].step == 1  # type: ignore[attr-defined]
    assert [entry.step for entry in list_entries(Path("runs/digits/checkpoints"))] == [2, 1]


def test_every_command_on_the_page_exists_and_every_verb_is_on_the_page() -> None:
    lines = re.findall(r"^paceline ckpt (\w+) ([^#\n]*)", PAGE, re.MULTILINE)
    for verb, arguments in lines:
        parser = Parser(prog=verb)
        getattr(import_module(VERBS[verb].module), f"{verb}_arguments")(parser)
        parser.parse_args(shlex.split(arguments))
    assert {verb for verb, _ in lines} == set(VERBS)
