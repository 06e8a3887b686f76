"""`paceline ckpt`: what it prints, what it writes, what it refuses; docs/checkpoints.md is true."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import says
from torch import nn

from paceline.checkpoint import Checkpoints, load_weights
from paceline.checkpoint.command import VERBS, declare
from paceline.checkpoint.directory import list_entries
from paceline.checkpoint.formats import read_tensors, write_tensors
from paceline.cli import Parser, main

# Change this on purpose only: scripts of users depend on it.
SURFACE = {
    "ls": {"folder", "--json"},
    "show": {"path", "--step", "--all", "--json"},
    "verify": {"path", "--json"},
    "diff": {"path", "other", "--all", "--json"},
    "export": {"path", "out", "--as", "--prefix", "--keep", "--part", "--all", "--step", "--force"},
    "clean": {"path", "out", "--in-place", "--force", "--keep"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 1 to 3."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        for step in (1, 2, 3):
            with torch.no_grad():
                model[0].weight.fill_(step)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(step, state, facts={"seed": 7}, metric=1 / step)
    return tmp_path / "run"


def spoil(run: Path, step: int) -> Path:
    (entry,) = [each for each in list_entries(run / "checkpoints") if each.step == step]
    path = entry.path / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def ckpt(*arguments: object) -> int:
    return main(["ckpt", *map(str, arguments)])


@pytest.mark.parametrize("verb", VERBS)
def test_the_surface_changes_on_purpose_only(verb: str) -> None:
    parser = argparse.ArgumentParser()
    declare(verb, parser)
    actions = [action for action in parser._actions if action.dest != "help"]
    assert {"".join(action.option_strings) or action.dest for action in actions} == SURFACE[verb]
    assert all(action.help for action in actions)


def test_looking_does_not_import_torch(run: Path) -> None:
    code = (
        "import sys, paceline.cli\n"
        "codes = [paceline.cli.main(['ckpt', verb, sys.argv[1]]) for verb in sys.argv[2:]]\n"
        "sys.exit(10 if 'torch' in sys.modules else max(codes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), "ls", "show", "verify"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_ls_lists_them_oldest_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / ".tmp-left").mkdir()
    assert ckpt("ls", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "3 checkpoints" in lines[0]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert "0.333333" in lines[4]
    assert "1 unfinished" in lines[5]
    assert ckpt("ls", run, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in listed["checkpoints"]] == [1, 2, 3]


def test_ls_names_what_has_no_usable_manifest(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (list_entries(run / "checkpoints")[0].path / "manifest.json").write_text("{")
    assert ckpt("ls", run) == 0
    shown = capsys.readouterr().out
    assert "step-00000003.0003  DAMAGED" in shown
    assert says(shown, "manifest.json", "JSON")


def test_show_says_what_is_inside(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt("show", run, "--step", 2) == 0
    shown = capsys.readouterr().out
    words = ["step 2", "seed", "optimizer.param_groups.0.lr", "model/0.weight", "2 x 3", "24 B"]
    assert all(word in shown for word in words), shown
    assert ckpt("show", run, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["manifest"]["step"] == 3
    assert told["tensors"]["model/0.weight"]["shape"] == [2, 3]


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_show_reads_single_files_and_no_name_reaches_the_terminal_raw(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"evil\x1b[2Jname": torch.ones(2, 5)}
    write_tensors(tmp_path / "a.safetensors", tensors)
    torch.save(tensors, tmp_path / "a.pt")
    assert ckpt("show", tmp_path / name) == 0
    shown = capsys.readouterr().out
    assert r"evil\x1b[2Jname" in shown
    assert "2 x 5" in shown
    assert "\x1b" not in shown


def test_of_very_many_checkpoints_the_newest_are_listed_and_the_others_counted(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.checkpoint.command.MOST_LISTED", 2)
    assert ckpt("ls", run, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert ([each["step"] for each in listed["checkpoints"]], listed["older"]) == ([2, 3], 1)
    assert ckpt("ls", run) == 0
    assert says(capsys.readouterr().out, "3 checkpoints", "1", "2", "3")


def test_verify_names_the_damaged_ones_and_fails(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ckpt("verify", run) == 0
    assert capsys.readouterr().out.count("good") == 3
    spoilt = spoil(run, 2)
    assert ckpt("verify", run) == 1
    shown = capsys.readouterr().out
    assert shown.count("good") == 2
    assert shown.count("DAMAGED") == 1
    assert str(spoilt) in shown
    assert ckpt("verify", run, "--json") == 1
    assert json.loads(capsys.readouterr().out)["damaged"] == 1
    assert ckpt("verify", spoilt.parent) == 1
    assert ckpt("verify", list_entries(run / "checkpoints")[0].path) == 0


def test_verify_finds_a_tensor_that_nothing_speaks_of(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.checkpoint.directory import publish

    write_tensors(run / "x.safetensors", {"x": torch.ones(2)})
    tensors = (run / "x.safetensors").read_bytes()
    for skeleton in (b'["dict"]', b"{}"):
        files = {"state.safetensors": tensors, "state.json": skeleton}
        entry, _ = publish(run / "checkpoints", 4, files, None, {})
        assert ckpt("verify", entry.path) == 1
    assert says(capsys.readouterr().out, "tensor 'x'")


def test_diff_says_what_differs_and_by_how_much(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, middle, oldest = (entry.path for entry in list_entries(run / "checkpoints"))
    assert ckpt("diff", newest, run) == 0
    assert re.search(r"\b7 names.*\b0 not", capsys.readouterr().out)
    assert ckpt("diff", oldest, newest) == 1
    assert re.search(r"\b6 of 6 differ.* 2 \(2 times ", capsys.readouterr().out)
    assert ckpt("diff", oldest, middle, "--all", "--json") == 1
    (only,) = json.loads(capsys.readouterr().out)["differing"]
    assert (only["name"], only["largest"]) == ("model.0.weight", 1.0)


def test_diff_compares_files_of_any_origin(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.DataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    load_weights(model, run)
    state = model.state_dict()
    torch.save({"state_dict": state}, tmp_path / "a.pth")
    assert ckpt("diff", tmp_path / "a.pth", run) == 0
    state["module.0.weight"] = torch.zeros(5)
    state["module.new"] = torch.tensor([float("nan")])
    del state["module.0.bias"]
    torch.save(state, tmp_path / "b.pth")
    capsys.readouterr()
    assert ckpt("diff", tmp_path / "b.pth", run) == 1
    shown = capsys.readouterr().out
    assert "shape (5,) and (2, 3)" in shown
    assert f"only in {tmp_path / 'b.pth'}:\n  new" in shown
    assert f"only in {run}:\n  0.bias" in shown
    assert ckpt("diff", tmp_path / "b.pth", tmp_path / "b.pth") == 0


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_export_writes_the_weights_alone(suffix: str, run: Path, tmp_path: Path) -> None:
    out = tmp_path / f"out{suffix}"
    assert ckpt("export", run, out, "--step", 2) == 0
    found = read_tensors(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    assert found.keys() == nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict().keys()
    assert found["0.weight"].eq(2).all()
    assert ckpt("export", run, out) == 2
    assert ckpt("export", run, out, "--force") == 0


def test_a_damaged_checkpoint_is_warned_of_without_a_line_of_this_package(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = spoil(run, 3)
    assert ckpt("export", run, tmp_path / "out.pt") == 0
    said = capsys.readouterr().err
    assert said.startswith("paceline ckpt: The checkpoint ")
    assert spoilt.parent.name in said
    assert "CheckpointWarning" not in said
    assert ".py" not in said


def wrapped_state() -> Any:
    model: Any = nn.Sequential(nn.Linear(3, 2), nn.DataParallel(nn.BatchNorm1d(2)))
    return nn.DataParallel(torch.compile(model)).state_dict()


BARE = ["0.weight", "0.bias", *(f"1.{name}" for name in nn.BatchNorm1d(2).state_dict())]


def test_clean_takes_wrappers_out_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.pth"
    torch.save(wrapped_state(), path)
    before = path.read_bytes()
    assert ckpt("clean", path) == 0
    assert path.read_bytes() == before
    shown = capsys.readouterr().out
    assert f"written to {tmp_path / 'old.clean.pth'}" in shown
    assert "7 names changed, such as module._orig_mod.0.weight -> 0.weight" in shown
    cleaned = torch.load(tmp_path / "old.clean.pth", weights_only=True)
    assert list(cleaned) == BARE
    assert cleaned._metadata["1"] == {"version": 2}
    nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).load_state_dict(cleaned)


def test_clean_works_inside_a_training_dict_and_leaves_the_rest(tmp_path: Path) -> None:
    state = wrapped_state()
    training = {
        "epoch": 3,
        "model": state,
        "more": {"state_dict": dict(state)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]},
    }
    torch.save(training, tmp_path / "old.pt")
    assert ckpt("clean", tmp_path / "old.pt", tmp_path / "new.pt") == 0
    cleaned = torch.load(tmp_path / "new.pt", weights_only=True)
    assert list(cleaned["model"]) == list(cleaned["more"]["state_dict"]) == BARE
    assert cleaned["epoch"] == 3
    assert cleaned["optimizer"] == training["optimizer"]
    assert ckpt("clean", tmp_path / "old.pt", tmp_path / "new.safetensors") == 0
    assert sorted(read_tensors(tmp_path / "new.safetensors")) == sorted(BARE)


def test_clean_replaces_a_file_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.safetensors"
    write_tensors(path, {f"module.{name}": torch.ones(1) for name in ("a", "b.module.c")})
    assert ckpt("clean", path, path) == 2
    assert re.search(rf"{re.escape(str(path))}.* already.*\n.*--force", capsys.readouterr().err)
    assert ckpt("clean", path, "--in-place", "--keep", "module.b.module") == 0
    assert sorted(read_tensors(path)) == ["a", "b.module.c"]
    assert ckpt("clean", path) == 0
    assert "b.module.c -> b.c" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["old.clean.safetensors", "old.safetensors"]


ODD = {
    "sparse": {"w": torch.eye(3).to_sparse(), "b": torch.ones(2)},
    "without memory": {"w": torch.empty(3, device="meta"), "b": torch.ones(2)},
    "half a character": {"\ud800": torch.ones(2), "": torch.ones(1)},
    "keys of other types": {("a", 1): torch.ones(2), None: {"w": torch.ones(2)}},
    "a long number": {"m": {"w": torch.ones(2)}, "n": 10**400},
    "no weights": [torch.ones(2)],
}


@pytest.mark.parametrize("verb", ["show", "verify", "diff", "export", "clean"])
@pytest.mark.parametrize("kind", ODD)
def test_a_file_with_something_odd_in_it_is_read_or_refused_in_words(
    kind: str, verb: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.pt"
    torch.save(ODD[kind], path)
    more = {"export": [tmp_path / "out.safetensors"], "diff": [path]}.get(verb, [])
    assert ckpt(verb, path, *more) in (0, 1, 2)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("verb", ["clean", "show", "export", "diff"])
def test_a_hostile_file_runs_nothing_under_any_verb(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.pth"
    torch.save({"model": Canary(tmp_path / "canary")}, path)
    more = {"export": [tmp_path / "out.pt"], "diff": [path]}.get(verb, [])
    assert ckpt(verb, path, *more) == 1
    assert "Nothing was run" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["old.pth"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["lst"], 2, r"no verb 'lst'.*'ls'\?"),
        ([], 2, "verb.* missing"),
        (["ls", "--jsn"], 2, r"'--json'\?"),
        (["ls", "no/such/folder"], 2, "no folder 'no/such/folder'"),
        (["show", "no/such/file"], 1, "No such file"),
        (["verify", "."], 1, r"no checkpoint in \.\."),
        (["clean", "."], 2, "bare names already"),
        (["export", ".", "weights"], 2, r"\.safetensors"),
        (["export", ".", "weights.pt"], 1, r"no checkpoint in \.\."),
        (["clean", "x.pt", "y.pt", "--in-place"], 2, "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_explained(
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ckpt(*arguments) == code
    said = capsys.readouterr().err
    assert re.search(words, said)
    assert len(said.rstrip().splitlines()) <= 3


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
        declare(verb, parser)
        parser.parse_args(shlex.split(arguments))
    assert {verb for verb, _ in lines} == set(VERBS)
