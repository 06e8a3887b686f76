"""Which checkpoints stay, and what a hostile or damaged folder cannot do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.directory import (
    CheckpointEntry,
    Manifest,
    _hash,
    find_entry,
    list_entries,
    open_checkpoint,
    plain_facts,
    plan_removals,
    publish,
    sweep,
    verify,
)
from paceline.errors import CheckpointError, UsageError

NAN, INF = float("nan"), float("inf")


def fill(folder: Path, step: int, metric: float | None = None) -> CheckpointEntry:
    files = {"state.safetensors": b"tensors more", "state.json": b"{}"}
    entry, _ = publish(folder, step, files, metric, {"seed": 1})
    return entry


def kept(
    metrics: list[float | None], *, keep: int = 2, best: int = 1, better: Any = "lower"
) -> list[int]:
    """Which of the saves with these metrics stay; "damaged" ones are given as -1."""
    found = [
        (CheckpointEntry(Path(f"{i}"), i, i), Manifest(i, 0.0, metric, {}, {}))
        for i, metric in enumerate(metrics)
    ]
    damaged = [entry.name for entry, manifest in found if manifest.metric == -1]
    gone = plan_removals(found[::-1], damaged, keep=keep, keep_best=best, better=better)
    return [entry.step for entry, _ in found if entry not in gone]


@pytest.mark.parametrize(
    ("metrics", "options", "left"),
    [
        ([], {}, []),
        ([None], {}, [0]),
        ([None] * 5, {}, [3, 4]),
        ([None] * 5, {"keep": 4}, [1, 2, 3, 4]),
        ([3, 1, 2, 4, 5], {}, [1, 3, 4]),
        ([3, 1, 2, 4, 5], {"best": 0}, [3, 4]),
        ([3, 1, 2, 4, 5], {"best": 2}, [1, 2, 3, 4]),
        ([3, 9, 2, 4, 5], {"better": "higher"}, [1, 3, 4]),
        ([3, 1, 1, 4, 5], {}, [2, 3, 4]),  # of two equally good ones, the newer
        ([3, 4, 5, 1], {}, [2, 3]),  # the best is among the newest
        ([3, NAN, NAN, None, None], {}, [0, 3, 4]),
        ([INF, NAN, NAN, None, None], {}, [0, 3, 4]),
        ([None, None, None, -1, -1], {}, [1, 2, 3, 4]),  # damaged ones push nothing out
        ([None, -1, None, None], {}, [2, 3]),  # and go once enough sound ones follow
        ([-1, -1, -1], {}, [0, 1, 2]),
    ],
)
def test_the_newest_and_the_best_stay(
    metrics: list[float | None], options: dict[str, Any], left: list[int]
) -> None:
    assert kept(metrics, **options) == left


def test_the_newest_is_the_last_saved_even_after_going_back_to_an_earlier_step(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 15, 15):
        fill(tmp_path, step)
    assert [entry.step for entry in list_entries(tmp_path)] == [15, 15, 20, 10]
    assert len({entry.path for entry in list_entries(tmp_path)}) == 4


def test_files_and_folders_are_for_their_owner_alone(tmp_path: Path) -> None:
    entry = fill(tmp_path / "run" / "checkpoints", 1)
    assert (tmp_path / "run" / "checkpoints").stat().st_mode & 0o777 == 0o700
    assert entry.path.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in entry.path.iterdir()}
    assert modes == dict.fromkeys(["state.safetensors", "state.json", "manifest.json"], 0o600)


def test_a_folder_is_empty_missing_or_a_file_and_then_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "nothing", tmp_path / "file"):
        assert list_entries(folder) == []


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-00000001.0001.bak").mkdir()
    (tmp_path / "notes.txt").touch()
    fill(tmp_path, 5)
    sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    assert [entry.step for entry in list_entries(tmp_path)] == [5]


def test_what_a_dead_writer_left_is_swept_and_what_a_living_one_writes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".tmp-dead").mkdir()
    (tmp_path / ".tmp-dead" / "state.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-link").symlink_to(tmp_path / ".tmp-dead")

    fsync = os.fsync

    def sweep_and_sync(file: int) -> None:
        sweep(tmp_path)  # another saver cleans while this one writes
        fsync(file)

    monkeypatch.setattr(os, "fsync", sweep_and_sync)
    entry = fill(tmp_path, 1)
    verify(entry)
    assert sorted(os.listdir(tmp_path)) == [".tmp-link", entry.name]


@pytest.mark.parametrize("place", [0, 3, 11])
@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
def test_every_flipped_bit_is_found(name: str, place: int, tmp_path: Path) -> None:
    entry = fill(tmp_path, 1)
    data = bytearray((entry.path / name).read_bytes())
    data[place % len(data)] ^= 4
    (entry.path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        verify(entry)


def test_every_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    entry = fill(tmp_path, 1, metric=0.5)
    path = entry.path / "manifest.json"
    data = path.read_bytes()
    unnoticed = set()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            verify(entry)
        except CheckpointError:
            continue
        unnoticed.add(data[place : place + 1])
    assert unnoticed == set()


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
def test_a_missing_truncated_or_linked_file_is_found(name: str, tmp_path: Path) -> None:
    entry = fill(tmp_path / "a", 1)
    path = entry.path / name
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    with pytest.raises(CheckpointError, match=name):
        verify(entry)
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        verify(entry)
    (tmp_path / "elsewhere").write_bytes(data)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"it.* link"):
        verify(entry)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a plain file"):
        verify(entry)


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path: Path) -> None:
    entry = fill(tmp_path / "a", 1)
    (tmp_path / "b").mkdir()
    link = tmp_path / "b" / entry.name
    link.symlink_to(entry.path)
    with pytest.raises(CheckpointError, match=r"it.* link"):
        verify(list_entries(tmp_path / "b")[0])


def rewrite(entry: CheckpointEntry, **changes: Any) -> None:
    """Change a manifest as somebody would who knows how we hash it."""
    path = entry.path / "manifest.json"
    said = json.loads(path.read_bytes())["manifest"] | changes
    path.write_text(json.dumps({"manifest": said, "sha256": _hash(said)}))


OUTSIDE = ["../secret", "/etc/passwd", "..", ".hidden", "a/b", "", "a\0b", "x" * 65]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_a_manifest_cannot_name_a_file_outside_its_folder(name: str, tmp_path: Path) -> None:
    entry = fill(tmp_path, 1)
    files = json.loads((entry.path / "manifest.json").read_bytes())["manifest"]["files"]
    rewrite(entry, files={**files, name: {"bytes": 1, "sha256": ""}})
    with pytest.raises(CheckpointError, match="does not describe exactly"):
        verify(entry)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"format": "another"},
        {"step": 2},
        {"step": "1"},
        {"metric": "high"},
        {"metric": True},
        {"facts": []},
        {"files": {}},
        {"files": {"state.json": {"bytes": -1, "sha256": ""}}},
        {"files": {"state.json": 1, "state.safetensors": 2}},
        {"created": None},
        {"created": 10**400},
        {"metric": 10**400},
    ],
    ids=str,
)
def test_a_manifest_that_makes_no_sense_is_a_typed_error(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    entry = fill(tmp_path, 1)
    rewrite(entry, **changes)
    with pytest.raises(CheckpointError), open_checkpoint(entry):
        pass


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{" * 10**6, b" " * (5 * 2**20)])
def test_a_manifest_of_nonsense_is_a_typed_error(data: bytes, tmp_path: Path) -> None:
    entry = fill(tmp_path, 1)
    (entry.path / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        verify(entry)


def test_a_path_means_itself_or_the_newest_in_a_folder_or_run(tmp_path: Path) -> None:
    entries = [fill(tmp_path / "checkpoints", step) for step in (1, 2)]
    assert find_entry(tmp_path) == find_entry(tmp_path / "checkpoints") == entries[1]
    assert find_entry(tmp_path, 1) == find_entry(entries[0].path) == entries[0]
    entries[0].path.rename(tmp_path / "the-good-one")
    assert find_entry(tmp_path / "the-good-one").step == 1
    verify(find_entry(tmp_path / "the-good-one"))
    (tmp_path / "link").symlink_to(tmp_path / "the-good-one")
    verify(find_entry(tmp_path / "link"))
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        find_entry(tmp_path, 7)


def test_facts_are_json_with_words_for_what_json_lacks() -> None:
    facts = {"a": NAN, "b": [INF, -INF, (1, 2)], "c": {1: None}}
    assert plain_facts(facts) == {"a": "nan", "b": ["inf", "-inf", [1, 2]], "c": {"1": None}}
    for bad in ({"a": object()}, {"a": "x" * 3_000_000}):
        with pytest.raises(UsageError, match="facts of a checkpoint"):
            plain_facts(bad)
