"""Folders of torch.distributed.checkpoint and of Hugging Face: to and fro, and bad ones."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from paceline.checkpoint import Checkpoints, folders, load_weights
from paceline.checkpoint.folders import read_state
from paceline.cli import main
from paceline.errors import CheckpointError

KINDS = ["dcp", "hf"]


def ckpt(*arguments: object) -> int:
    return main(["ckpt", *map(str, arguments)])


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2).bfloat16())


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return folder


def assert_same(first: Any, second: Any) -> None:
    assert list(first) == list(second) or set(first) == set(second)
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_weights_go_out_and_come_back_to_the_last_bit(
    kind: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHARD_BYTES", 64)  # several files, with an index
    model = build()
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"model": model.state_dict(), "step": 1}, facts={})
    more = ["--prefix", prefix] if prefix else []
    assert ckpt("export", tmp_path / "run", tmp_path / "out", "--as", kind, *more) == 0
    assert all(name.startswith(prefix) for name in read_state(tmp_path / "out"))
    assert ckpt("export", tmp_path / "out", tmp_path / "back.pt") == 0
    assert_same(torch.load(tmp_path / "back.pt", weights_only=True), model.state_dict())
    assert ckpt("diff", tmp_path / "out", tmp_path / "run") == 0
    other = build()
    nn.init.zeros_(other[0].weight)
    load_weights(other, tmp_path / "out")
    assert_same(other.state_dict(), model.state_dict())


def test_what_we_write_torch_and_safetensors_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = build().state_dict()
    torch.save(wanted, tmp_path / "a.pt")
    for kind in KINDS:
        monkeypatch.setattr(folders, "SHARD_BYTES", 64)
        assert ckpt("export", tmp_path / "a.pt", tmp_path / kind, "--as", kind) == 0
    state: dict[str, Any] = {name: torch.zeros_like(each) for name, each in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert_same(state, wanted)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        assert name.startswith("model-0000")
        found |= safetensors.torch.load_file(tmp_path / "hf" / name)
    assert_same(found, wanted)
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in wanted.values())


def test_a_whole_training_is_read_as_it_was_nested(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "l": [1, "x", None]}
    read = read_state(save_dcp(tmp_path / "a", state))
    assert_same(read["model"], state["model"])
    groups = read["optimizer"]["param_groups"]
    assert (groups, read["l"]) == (state["optimizer"]["param_groups"], state["l"])
    moments = read["optimizer"]["state"]["0"]["exp_avg"]  # DCP makes a string of the number
    assert torch.equal(moments, state["optimizer"]["state"][0]["exp_avg"])
    assert ckpt("export", tmp_path / "a", tmp_path / "b.pt", "--all") == 0
    assert ckpt("diff", tmp_path / "a", tmp_path / "b.pt", "--all") == 0
    assert ckpt("export", tmp_path / "b.pt", tmp_path / "b", "--all", "--as", "dcp") == 0
    assert ckpt("diff", tmp_path / "a", tmp_path / "b", "--all") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_show_lists_the_tensors_of_all_files(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(folders, "SHARD_BYTES", 64)
    wanted = build().state_dict()
    folders.write_folder(kind, tmp_path / "out", wanted)
    assert ckpt("show", tmp_path / "out", "--json") == 0
    said = json.loads(capsys.readouterr().out)["tensors"]
    assert {name: each["bytes"] for name, each in said.items()} == {
        name: each.nbytes for name, each in wanted.items()
    }
    assert ckpt("verify", tmp_path / "out") == 2
    assert "no hash to compare" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_there_stays_as_it_is(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(build().state_dict(), tmp_path / "a.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert ckpt("export", tmp_path / "a.pt", tmp_path / "out", "--as", kind, "--force") == 2
    assert "exists already" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["config.json"]
    assert ckpt("export", tmp_path / "a.pt", tmp_path / "a.pt" / "x", "--as", kind) == 1
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "out"]


def test_files_of_a_download_may_be_links_and_of_torch_save(tmp_path: Path) -> None:
    wanted = build().state_dict()
    (tmp_path / "blobs").mkdir()
    torch.save(wanted, tmp_path / "blobs" / "f00d")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "pytorch_model.bin").symlink_to("../blobs/f00d")
    assert_same(read_state(tmp_path / "snapshot"), wanted)


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_dcp(tmp_path / "a", dict(build().state_dict()))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for what in (Canary(tmp_path / "canary"), [Canary(tmp_path / "canary")]):
        (folder / ".metadata").write_bytes(pickle.dumps(what))
        assert ckpt("show", folder) == 1
    metadata.state_dict_metadata["0.weight"] = Canary(tmp_path / "canary")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert ckpt("export", folder, tmp_path / "x.pt") == 1
    save_dcp(tmp_path / "b", {"model": build().state_dict(), "x": Canary(tmp_path / "canary")})
    assert ckpt("export", tmp_path / "b", tmp_path / "x.pt") == 1
    assert "Nothing was run" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_every_byte_of_the_metadata_may_be_wrong(tmp_path: Path) -> None:
    """Cut off anywhere, or with one byte changed anywhere: read as it was, or one typed error."""
    wanted = nn.Linear(2, 2).state_dict()
    folder = save_dcp(tmp_path / "a", dict(wanted))
    path = folder / ".metadata"
    good = path.read_bytes()
    for at in range(0, len(good), 13):
        changed = bytearray(good)
        changed[at] ^= 1 << (at % 8)
        for data in (good[:at], bytes(changed)):
            path.write_bytes(data)
            try:
                read = read_state(folder)
            except CheckpointError:
                continue
            assert all(isinstance(each, Tensor) for each in read.values())


def bad_metadata(folder: Path) -> dict[str, Any]:
    """Metadata that claim what is not there, by what is wrong."""
    made = {}
    for name in ("huge", "outside", "beyond", "overlap", "other type"):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        entry = metadata.state_dict_metadata["weight"]
        (place,) = (v for k, v in metadata.storage_data.items() if k.fqn == "weight")
        if name == "huge":
            entry.size = torch.Size([2**40, 2**20])
            entry.chunks[0].sizes = entry.size
        elif name == "outside":
            place.relative_path = "../secret"
        elif name == "beyond":
            place.length = 2**50
        elif name == "overlap":
            entry.size = torch.Size([4, 2])
            for offset in (1, 2):
                chunk = type(entry.chunks[0])(torch.Size([offset, 0]), torch.Size([2, 2]))
                index = dcp.metadata.MetadataIndex("weight", [offset, 0])
                metadata.storage_data[index] = place
                entry.chunks[offset - 1 :] = [chunk]
        else:
            entry.properties.dtype = torch.float16
        made[name] = metadata
    return made


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("huge", "another type or shape"),
        ("outside", "not.* name of a file"),
        ("beyond", "fewer than .metadata states"),
        ("overlap", "overlap"),
        ("other type", "another type or shape"),
    ],
)
def test_metadata_that_lie_are_one_clear_error(what: str, words: str, tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "a", dict(nn.Linear(2, 2).state_dict()))
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(bad_metadata(folder)[what]))
    with pytest.raises(CheckpointError, match=words):
        read_state(folder)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "JSON"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "not a file beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "No such file"),
        ('{"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}', "names 'b'"),
        ('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}', "as another file has"),
        ('{"weight_map": {"a": 3}}', "No such file"),
    ],
)
def test_an_index_that_lies_is_one_clear_error(index: str, words: str, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    shutil.copy(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=words):
        read_state(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.pt", "out", "--as", "hf", "--all"], "more than weights"),
        (["a.pt", "out.safetensors", "--all"], "more than weights"),
        (["a.pt", "out.pt", "--all", "--prefix", "module."], "more than weights"),
        (["hf", "out.pt", "--step", "3"], "which has one step"),
        (["a.pt", "out", "--as", "onnx"], "'onnx'"),
    ],
)
def test_a_mistake_is_explained(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(build().state_dict(), "a.pt")
    folders.write_folder("hf", Path("hf"), build().state_dict())
    assert ckpt("export", *arguments) == 2
    assert words in capsys.readouterr().err
