"""The benchmark command as a reader of the page would call it, on the smallest model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import step
from benchmarks.__main__ import main
from benchmarks.contestants import FLOORS


def test_the_smallest_measurement_gives_a_table_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "present", lambda _floors: ([*FLOORS, "paceline"], []))
    path = tmp_path / "step.json"
    main(["step", "--model", "small-600", "--quick", "--json", str(path)])
    record = json.loads(path.read_text())
    assert record["command"].startswith("python -m benchmarks step --model small-600 --quick")
    entry = record["results"]["small-600"]
    assert (entry["ranks"], entry["threads"], entry["rounds"]) == (2, 1, 2)
    names = [row["contestant"] for row in entry["rows"]]
    assert names[0] == "no communication"
    assert "paceline" in names
    assert sum("best torch" in name for name in names) == 1
    assert all(row["ms"] > 0 and row["/ no communication"] > 0 for row in entry["rows"])
