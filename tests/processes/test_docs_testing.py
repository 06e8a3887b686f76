"""The examples of docs/testing.md are tests, and they pass."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_page_passes(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"example_of_docs_testing_{number}"
    (tmp_path / f"{name}.py").write_text(EXAMPLES[number])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    tests = [value for key, value in vars(module).items() if key.startswith("test_")]
    assert tests
    try:
        for test in tests:
            test()
    finally:
        del sys.modules[name]


def test_the_page_lists_every_public_name() -> None:
    testing = importlib.import_module("paceline.testing")
    missing = [name for name in testing.__all__ if name not in PAGE.read_text()]
    assert missing == []
