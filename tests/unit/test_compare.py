"""`paceline compare`, and `replay`: hashes of run folders, also of damaged ones and of none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.files.run_folder import EventWriter, RunFolder


def run_with(path: Path, **hashes_by_step: Any) -> str:
    with EventWriter(RunFolder(path), 0) as events:
        for step, hashes in hashes_by_step.items():
            events.write("hashes", step=int(step.removeprefix("step")), hashes=hashes)
    return str(path)


def test_the_first_step_and_the_tensors_that_differ_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = run_with(tmp_path / "a", step1={"all": "0", "w": "0"}, step2={"all": "1", "w": "1"})
    two = run_with(tmp_path / "b", step1={"all": "0", "w": "0"}, step2={"all": "2", "w": "2"})
    assert main(["compare", one, two, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal_until"], found["step"], found["tensors"]) == (1, 2, ["w"])
    assert main(["compare", one, one]) == 0


def test_only_a_hash_of_the_whole_state_may_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (run_with(tmp_path / name, step1={"all": name}) for name in "ab")
    assert main(["compare", one, two]) == 1
    assert "'all'" in capsys.readouterr().out


def test_damaged_events_are_left_out_and_a_folder_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = run_with(tmp_path / "a", step1={"all": "0"})
    two = run_with(tmp_path / "b", step1={"all": "0"}, step2=[1])
    with EventWriter(RunFolder(tmp_path / "b"), 0) as events:
        events.write("hashes", step="three", hashes={"all": "0"})
        events.write("hashes")
    assert main(["compare", one, two]) == 0
    assert main(["compare", one, str(tmp_path / "c")]) == 2
    assert repr(str(tmp_path / "c")) in capsys.readouterr().err


@pytest.mark.parametrize("script", [None, "", "train.py 'x", "no/such/script.py x"])
def test_a_replay_without_a_script_that_can_be_started_is_refused(
    script: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path / "a", step1={"all": "0"})
    flags = [] if script is None else ["--script", script]
    assert main(["replay", run, "--step", "1", *flags]) == 2
    words = "no script 'no/such/script.py'" if script and "/" in script else "--script"
    assert words in capsys.readouterr().err
