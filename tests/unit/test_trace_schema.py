"""The file of a recorded step: its fields are frozen, and what is not such a file is refused."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from paceline.errors import WireError
from paceline.record import stages
from paceline.record.stages import Epoch, Trace, TrainedEpochs

DATA = Path(__file__).parents[1] / "data"
FILES = [DATA / "pipeline-dp.json", DATA / "pipeline-ddp.json"]

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILES[1].read_text())
    return loaded


def describe(kind: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field of a dataclass by its path, with its type."""
    words = {int: "integer", float: "number", str: "text", bool: "true or false"}
    for name, hint in get_type_hints(kind).items():
        inner, optional = hint, ""
        if get_origin(hint) is UnionType:
            inner, optional = get_args(hint)[0], " or null"
        is_list = get_origin(inner) is list
        inner = get_args(inner)[0] if is_list else inner
        if is_dataclass(inner):
            path = f"{prefix}{name}{'[]' if is_list else ''}"
            yield path, f"object{optional}"
            yield from describe(inner, f"{path}.")
        else:
            said = words.get(inner) or " | ".join(map(json.dumps, get_args(inner)))
            yield f"{prefix}{name}", f"{'list of ' if is_list else ''}{said}{optional}"


def test_the_fields_change_on_purpose_only() -> None:
    # Readers of users' files depend on it. A field may be added; a change needs a new version.
    frozen = (DATA / "pipeline-schema.txt").read_text().splitlines()
    assert [f"{path}: {kind}" for path, kind in describe(Trace)] == frozen


def test_the_page_explains_every_field() -> None:
    page = (DATA.parents[1] / "docs" / "trace.md").read_text()
    names = {path.rpartition(".")[2].removesuffix("[]") for path, _ in describe(Trace)}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


@each_file
def test_a_file_of_a_real_run_is_read_and_written_the_same(path: Path) -> None:
    trace = stages.read(path)
    assert stages.to_json(trace) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema=2), ["schema 2"]),
        (lambda d: d.pop("schema"), ["schema None"]),
        (lambda d: d.pop("engine"), ["step has no 'engine'"]),
        (lambda d: d.update(engine="Horovod"), ["step.engine", "Horovod"]),
        (lambda d: d.update(workers="2"), ["step.workers", "integer"]),
        (lambda d: d.update(workers=True), ["step.workers", "integer"]),
        (lambda d: d.update(seconds="fast"), ["step.seconds", "number"]),
        (lambda d: d.update(stages={}), ["step.stages", "list"]),
        (lambda d: d["stages"][2].update(parts=None), ["step.stages[2].parts"]),
        (lambda d: d["stages"].append(3), ["step.stages[11]", "not an object"]),
        (lambda d: d["check"].pop("text"), ["step.check has no 'text'"]),
        (lambda d: d["check"].update(how="by eye"), ["step.check.how"]),
        (lambda d: d["sample"]["stops"][0].update(row=1.5), ["stops[0].row"]),
    ],
)
def test_the_first_thing_that_is_wrong_is_named(change: Any, words: list[str]) -> None:
    changed = document()
    change(changed)
    with pytest.raises(WireError) as caught:
        stages.from_json(changed)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("nonsense", [None, [], 3, "schema", {}])
def test_what_is_no_object_of_ours_is_refused(nonsense: Any) -> None:
    with pytest.raises(WireError):
        stages.from_json(nonsense)


def test_keys_of_a_later_version_are_ignored() -> None:
    later = document()
    later["colour"] = "blue"
    later["stages"][0]["smell"] = []
    assert stages.from_json(later) == stages.from_json(document())


def test_numbers_that_json_has_no_word_for_survive() -> None:
    epochs = [Epoch(epoch=i, loss=x, seconds=1.0) for i, x in enumerate((math.inf, -math.inf))]
    epochs.append(Epoch(epoch=3, loss=math.nan, seconds=1.0))
    trace = replace(stages.from_json(document()), training=TrainedEpochs(epochs=epochs))
    text = json.dumps(stages.to_json(trace), allow_nan=False)
    again = stages.from_json(json.loads(text))
    assert again.training is not None
    losses = [epoch.loss for epoch in again.training.epochs]
    assert losses[:2] == [math.inf, -math.inf]
    assert math.isnan(losses[2])


def test_a_file_is_for_its_owner_alone_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run" / "pipeline" / "step3.json"
    stages.write(stages.read(FILES[0]), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["step3.json"]
    assert stages.read(path) == stages.read(FILES[0])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2", '{"schema": NaN}', '{"schema": 1}', "[" * 100_000],
    ids=["empty", "torn", "list", "nan", "incomplete", "deep"],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step1.json"
    path.write_text(text)
    with pytest.raises(WireError):
        stages.read(path)


def test_a_giant_file_and_a_folder_are_refused_before_they_are_read(tmp_path: Path) -> None:
    giant = tmp_path / "giant.json"
    with open(giant, "wb") as file:
        file.truncate(2**40)  # takes no space
    for path in (giant, tmp_path):
        with pytest.raises(WireError, match=r"larger than|not a plain file"):
            stages.read(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(FILES[0])
    with pytest.raises(OSError, match=r"link\.json"):
        stages.read(tmp_path / "link.json")


def test_reading_and_drawing_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from paceline.cli import main\n"
        f"code = main(['trace', {str(FILES[0])!r}, '--ascii'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "DataParallel" in done.stdout
