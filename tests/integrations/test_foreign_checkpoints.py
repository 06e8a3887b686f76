"""Checkpoints that others wrote over several ranks, and that their own libraries read from us."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint import folders, load_weights
from paceline.checkpoint.folders import read_state
from paceline.group import World
from paceline.testing import run_processes, seeded

needs_hub = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None, reason="not installed: huggingface_hub"
)


def build() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 2)))


def save_sharded(world: World, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


@pytest.mark.parametrize("size", [1, 3])
def test_what_fsdp_saved_in_uneven_shards_is_put_together(size: int, tmp_path: Path) -> None:
    run_processes(size, save_sharded, str(tmp_path / "dcp"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == size
    wanted = build().state_dict()
    other = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    load_weights(other, tmp_path / "dcp")
    assert all(torch.equal(each, wanted[name]) for name, each in other.state_dict().items())


@needs_hub
def test_hugging_faces_own_library_reads_ours_and_we_read_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import load_torch_model, save_torch_state_dict

    wanted = build().state_dict()
    monkeypatch.setattr(folders, "SHARD_BYTES", 100)
    folders.write_folder("hf", tmp_path / "ours", wanted)
    other = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    load_torch_model(other, tmp_path / "ours", strict=True)
    assert all(torch.equal(each, wanted[name]) for name, each in other.state_dict().items())
    (tmp_path / "theirs").mkdir()
    save_torch_state_dict(wanted, tmp_path / "theirs", max_shard_size=100)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    read = read_state(tmp_path / "theirs")
    assert read.keys() == wanted.keys()
    assert all(torch.equal(each, wanted[name]) for name, each in read.items())
