"""Whatever stands in a file, reading it gives a value or a typed error, and never anything else."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import load_weights
from paceline.checkpoint import Checkpoints
from paceline.checkpoint.command import _read_descriptions
from paceline.checkpoint.directory import _hash, list_entries, verify
from paceline.checkpoint.saver import read_entry
from paceline.errors import CheckpointError

ROUNDS = 150


def mutate(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        place, other = rng.randrange(len(changed)), rng.randrange(len(changed))
        match rng.randrange(5):
            case 0:
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                del changed[place : place + rng.randrange(1, 10)]
            case 2:
                changed[place:place] = rng.choices(b'[]{}",:0123456789eE-.', k=3)
            case 3:
                changed[place : place + 8] = changed[other : other + 8]
            case 4:
                changed[place] = rng.choice(b'[]{}",0123456789-')
    return bytes(changed)


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_checkpoint_made_by_somebody_who_knows_the_hashes(name: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    values = (1, 2.5, None, float("nan"), torch.float32, torch.Size([1]), 2j, torch.device("cpu"))
    state = {"m": model.state_dict(), "o": optimizer.state_dict(), "v": values, "b": b"xyz"}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state | {"c": torch.ones(2, dtype=torch.complex128)}, facts={})
    (entry,) = list_entries(tmp_path)
    original = (entry.path / name).read_bytes()
    said = json.loads((entry.path / "manifest.json").read_bytes())["manifest"]
    rng, refused = random.Random(0), 0
    for _ in range(ROUNDS):
        data = mutate(original, rng)
        (entry.path / name).write_bytes(data)
        said["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest = json.dumps({"manifest": said, "sha256": _hash(said)})
        (entry.path / "manifest.json").write_text(manifest)
        with suppress(CheckpointError):
            verify(entry)
            _read_descriptions(entry)
        try:
            read_entry(entry)
        except CheckpointError:
            refused += 1
    assert refused > ROUNDS // 2


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_file_of_torch_save_with_other_instructions(tmp_path: Path) -> None:
    original, path = io.BytesIO(), tmp_path / "a.pt"
    torch.save({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, original)
    with zipfile.ZipFile(original) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    rng, refused = random.Random(0), 0
    for _ in range(ROUNDS):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in parts.items():
                archive.writestr(name, mutate(data, rng) if name.endswith("/data.pkl") else data)
        try:
            load_weights(nn.Linear(2, 2), path)
        except CheckpointError:
            refused += 1
    assert refused > ROUNDS // 2
