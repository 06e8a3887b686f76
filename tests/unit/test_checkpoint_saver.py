"""Saves and loads of a training: exact, in the background, falling back loudly."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import says

from paceline.checkpoint import Checkpoints, CheckpointWarning, Saved
from paceline.checkpoint.directory import list_entries
from paceline.errors import CheckpointError, UsageError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    with Checkpoints(tmp_path / "checkpoints") as made:
        yield made


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((5,), float(step))}, "lr": {0: 0.5, "name": "x"}}


def fill(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, state_of(step), facts={"seed": 7})
    checkpoints.wait()


def load(checkpoints: Checkpoints, step: int | None = None) -> Saved:
    found = checkpoints.load(step)
    assert found is not None
    assert found.state["model"]["w"].tolist() == [float(found.step)] * 5
    return found


def spoil(folder: Path, step: int, name: str = "state.safetensors") -> Path:
    (entry,) = [each for each in list_entries(folder) if each.step == step]
    path = entry.path / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_nothing_saved_is_none_and_makes_no_folder(checkpoints: Checkpoints) -> None:
    assert checkpoints.load() is None
    assert not checkpoints.folder.exists()
    checkpoints.folder.mkdir()
    assert checkpoints.load() is None


def test_where_no_thread_can_be_started_a_checkpoint_is_written_all_the_same(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    priority = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    fill(checkpoints, 1, 2)
    assert checkpoints.problem is None
    assert [each.step for each in checkpoints.take_finished()] == [1, 2]
    assert load(checkpoints).step == 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority


def test_the_newest_is_loaded_with_its_facts_and_metric(checkpoints: Checkpoints) -> None:
    checkpoints.save(3, state_of(3), facts={"seed": 7, "loss": float("nan")}, metric=0.25)
    found = load(checkpoints)
    assert found.facts == {"seed": 7, "loss": "nan"}
    assert (found.step, found.metric, found.path.parent) == (3, 0.25, checkpoints.folder)
    assert found.state["lr"] == {0: 0.5, "name": "x"}


def test_a_relative_folder_stays_where_it_is_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Checkpoints("checkpoints") as checkpoints:
        monkeypatch.chdir(tmp_path / "elsewhere")
        fill(checkpoints, 3)
    assert [each.step for each in list_entries(tmp_path / "checkpoints")] == [3]


def test_the_snapshot_is_taken_when_save_returns(checkpoints: Checkpoints) -> None:
    state = state_of(1)
    checkpoints.save(1, state, facts={})
    state["model"]["w"].fill_(99)
    state["lr"]["name"] = "changed"
    assert load(checkpoints).state["lr"]["name"] == "x"


def test_other_readers_of_safetensors_find_the_tensors_by_their_paths(
    checkpoints: Checkpoints,
) -> None:
    package = pytest.importorskip("safetensors.torch")
    fill(checkpoints, 4)
    found = package.load_file(str(load(checkpoints).path / "state.safetensors"))
    assert list(found) == ["model/w"]
    assert found["model/w"].tolist() == [4.0] * 5


def test_states_of_other_sizes_use_the_same_memory_without_mixing(checkpoints: Checkpoints) -> None:
    for step, size in enumerate([10, 1000, 3, 1000]):
        state = {"a": torch.full((size,), step), "b": torch.tensor(step), "c": bytes([step]) * size}
        checkpoints.save(step, state, facts={})
        found = checkpoints.load()
        assert found is not None
        assert found.state["a"].tolist() == [step] * size
        assert found.state["c"] == bytes([step]) * size
    checkpoints.save(9, {}, facts={})
    assert (found := checkpoints.load()) is not None
    assert found.state == {}


def test_the_memory_is_allocated_once(checkpoints: Checkpoints) -> None:
    fill(checkpoints, 1)
    buffer = checkpoints._staging._buffer.data_ptr()
    fill(checkpoints, 2, 3)
    assert checkpoints._staging._buffer.data_ptr() == buffer
    load(checkpoints)


def test_old_ones_go_and_the_best_stays(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2, keep_best=1, better="higher") as checkpoints:
        for step, accuracy in enumerate([0.1, 0.9, 0.3, 0.2, 0.4]):
            checkpoints.save(step, state_of(step), facts={}, metric=accuracy)
        checkpoints.wait()
        assert [entry.step for entry in list_entries(tmp_path)] == [4, 3, 1]
        load(checkpoints, 1)


def test_what_has_reached_the_disk_is_told_once(checkpoints: Checkpoints) -> None:
    fill(checkpoints, 1, 2)
    written = checkpoints.take_finished()
    assert [each.step for each in written] == [1, 2]
    assert written[0].name == "step-00000001.0001"
    folder = checkpoints.folder / written[0].name
    files = [path for path in folder.iterdir() if path.name != "manifest.json"]
    assert written[0].bytes == sum(path.stat().st_size for path in files)
    assert written[0].seconds > 0
    assert checkpoints.take_finished() == []


@pytest.mark.parametrize("name", ["state.safetensors", "state.json", "manifest.json"])
def test_a_damaged_one_is_named_and_the_one_before_it_loaded(
    name: str, checkpoints: Checkpoints
) -> None:
    fill(checkpoints, 1, 2, 3)
    spoilt = spoil(checkpoints.folder, 3, name)
    spoil(checkpoints.folder, 2).unlink()
    with pytest.warns(CheckpointWarning) as caught:
        assert load(checkpoints).step == 1
    said = [str(each.message) for each in caught]
    assert len(said) == 2
    assert "step-00000003" in said[0]
    assert str(spoilt) in said[0]
    assert "No such file" in said[1]


def test_all_of_them_damaged_is_an_error_and_not_a_fresh_start(checkpoints: Checkpoints) -> None:
    fill(checkpoints, 1, 2)
    for step in (1, 2):
        spoil(checkpoints.folder, step)
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match=r"None of.* 2"):
        checkpoints.load()


def test_a_damaged_one_does_not_push_a_sound_one_out(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        fill(checkpoints, 1, 2)
        spoil(tmp_path, 2)
        with pytest.warns(CheckpointWarning):
            load(checkpoints)
        fill(checkpoints, 3)
        assert [entry.step for entry in list_entries(tmp_path)] == [3, 2, 1]
        fill(checkpoints, 4)
        assert [entry.step for entry in list_entries(tmp_path)] == [4, 3]


def test_a_step_that_is_asked_for_has_no_substitute(checkpoints: Checkpoints) -> None:
    fill(checkpoints, 1, 2)
    assert load(checkpoints, 1).step == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7[^$]*There are: 1, 2\."):
        checkpoints.load(7)
    spoil(checkpoints.folder, 2)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.load(2)


def test_a_state_that_cannot_be_saved_is_an_error_at_once_and_leaves_nothing(
    checkpoints: Checkpoints,
) -> None:
    with pytest.raises(UsageError, match=r"state\['f'\]"):
        checkpoints.save(1, {"f": print}, facts={})
    with pytest.raises(UsageError, match="facts"):
        checkpoints.save(1, {}, facts={"f": print})
    for step in (-1, 10**15):
        with pytest.raises(UsageError, match=f"step.* {step}"):
            checkpoints.save(step, {}, facts={})
    assert not checkpoints.folder.exists()


@pytest.mark.parametrize(
    "options", [{"keep": 1}, {"keep": 0}, {"keep_best": -1}, {"better": "more"}], ids=str
)
def test_impossible_options_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        Checkpoints(tmp_path, **options)


def test_a_folder_that_cannot_be_made_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with Checkpoints(tmp_path / "file" / "checkpoints") as checkpoints:
        with pytest.warns(CheckpointWarning, match="Not a directory") as caught:
            fill(checkpoints, 2, 3)
        assert len(caught) == 1
        assert says(str(caught[0].message), "2 steps")
        assert checkpoints.problem is not None
        assert "step 3" in checkpoints.problem
        assert checkpoints.take_finished() == []
        (tmp_path / "file").unlink()
        fill(checkpoints, 4)
        assert checkpoints.problem is None
        assert load(checkpoints).step == checkpoints.saved_step == 4
    other = Checkpoints(checkpoints.folder)
    other.take_over()
    assert other.saved_step == 4


def test_a_state_too_large_for_memory_is_a_problem_and_no_error(checkpoints: Checkpoints) -> None:
    with pytest.warns(CheckpointWarning, match="memory for a copy"):
        checkpoints.save(1, {"w": torch.zeros(1).expand(2**45)}, facts={})
    fill(checkpoints, 2)
    assert checkpoints.problem is None
    assert load(checkpoints).step == 2


def test_a_failure_after_a_success_is_said_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for _ in range(2):
            folder.touch()
            with pytest.warns(CheckpointWarning, match="File exists|Not a directory"):
                fill(checkpoints, 1)
            folder.unlink()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                fill(checkpoints, 2)
            for entry in list_entries(folder):
                for path in entry.path.iterdir():
                    path.unlink()
                entry.path.rmdir()
            folder.rmdir()


def test_two_savers_in_one_folder_lose_nothing(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=20) as first, Checkpoints(tmp_path, keep=20) as second:
        for step in range(6):
            first.save(step, state_of(step), facts={"by": 1})
            second.save(step, state_of(step), facts={"by": 2})
        first.wait()
        second.wait()
        assert first.problem is None
        assert second.problem is None
        entries = list_entries(tmp_path)
        assert sorted(entry.step for entry in entries) == sorted([*range(6)] * 2)
        assert load(first).step == 5


def test_two_savers_that_both_remove_old_ones_get_along(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2) as first, Checkpoints(tmp_path, keep=2) as second:
        for step in range(10):
            for saver in (first, second):
                saver.save(step, state_of(step), facts={})
        for saver in (first, second):
            saver.wait()
            assert saver.problem is None
        assert load(first).step == 9
        assert sorted(tmp_path.iterdir()) == sorted(each.path for each in list_entries(tmp_path))


def test_loading_beside_a_saver_that_removes_old_ones_never_fails(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=2, keep_best=0) as saver, Checkpoints(tmp_path) as reader:
        fill(saver, 0)
        newest = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(1, 25):
                saver.save(step, state_of(step), facts={})
                found = load(reader)
                assert found.step >= newest
                newest = found.step


@pytest.mark.parametrize("key", ["step", "created", "metric", "facts"])
@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000, "1e400", "[" * 99 + "]" * 99])
def test_a_manifest_with_an_absurd_value_falls_back_to_the_one_before(
    key: str, value: str, checkpoints: Checkpoints
) -> None:
    fill(checkpoints, 1, 2)
    path = list_entries(checkpoints.folder)[0].path / "manifest.json"
    said = json.loads(path.read_text())["manifest"]
    said[key] = {"x": 7777} if key == "facts" else 7777
    text = json.dumps(said, sort_keys=True, separators=(",", ":")).replace("7777", value)
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(f'{{"manifest": {text}, "sha256": "{digest}"}}')
    with pytest.warns(CheckpointWarning, match="one before it"):
        assert load(checkpoints).step == 1


@pytest.mark.parametrize("fact", [10**400, "x" * 2**21, {"n" * 2000: 1}])
def test_a_fact_that_could_not_be_read_again_is_refused(
    fact: Any, checkpoints: Checkpoints
) -> None:
    with pytest.raises(UsageError, match="fact"):
        checkpoints.save(1, state_of(1), facts={"fact": fact})
