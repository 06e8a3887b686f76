"""Folders with weights: our checkpoints, and the folders of DCP and Hugging Face.

A library's kind of folder is an entry of `FOLDERS`, recognised by its files. One that we write
appears as a whole or not at all, and never replaces another. Starts without torch.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.dcp import METADATA, read_dcp, write_dcp
from paceline.checkpoint.directory import MANIFEST, TEMPORARY, find_entry, find_folder
from paceline.checkpoint.files import open_file
from paceline.checkpoint.formats import format_of, write_tensors
from paceline.errors import CheckpointError, UsageError
from paceline.files import JsonLimits, make_private, parse_json, replace_file, sync_folder

SHARD_BYTES = 5 * 10**9
"""The largest file of a Hugging Face folder, as their library has it by default."""

_HF_FILES = (
    *("model.safetensors", "diffusion_pytorch_model.safetensors", "adapter_model.safetensors"),
    *("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin"),
)
_INDEX = ".index.json"
_MAX_INDEX_BYTES = 64 * 2**20
_INDEX_LIMITS = JsonLimits(values=2**22, depth=4, text=_MAX_INDEX_BYTES, name=2**16)


@dataclass(frozen=True, slots=True)
class Folder:
    """One kind of folder that is not ours."""

    title: str
    is_one: Callable[[Path], bool]
    read: Callable[[Path], Any]
    write: Callable[[Path, Mapping[str, Any]], None]


def folder_of(path: Path) -> Folder | None:
    """The library that a folder belongs to; None for ours, and for anything but a folder."""
    if not path.is_dir() or (path / MANIFEST).exists():
        return None
    return next((kind for kind in FOLDERS.values() if kind.is_one(path)), None)


def read_state(path: Path, step: int | None = None) -> Any:
    """All contents of a file, a checkpoint or another library's folder, on the CPU."""
    if not path.is_dir():
        return format_of(path).read(path)
    kind = folder_of(path)
    if kind is None:
        return _read_checkpoint(path, step)
    if step is not None:
        raise UsageError(f"{path} is {kind.title}, which has one step.", advice="Omit --step.")
    return kind.read(path)


def write_folder(kind: str, path: Path, state: Mapping[str, Any]) -> None:
    """Write a state as a new folder of another library, atomically."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        make_private(temporary)
        FOLDERS[kind].write(temporary, state)
        sync_folder(temporary)
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_checkpoint(path: Path, step: int | None) -> Any:
    """The state of one checkpoint, or of the newest good one in a folder."""
    from paceline.checkpoint.saver import Checkpoints, read_entry

    entry = find_entry(path, step)
    # Where the user has chosen a checkpoint, no older one may be loaded instead.
    is_choice = step is not None or entry.path == Path(os.path.realpath(path))
    saved = read_entry(entry) if is_choice else Checkpoints(find_folder(path)).load()
    return None if saved is None else saved.state


def hf_files(folder: Path) -> tuple[list[Path], set[str]]:
    """The files with weights in a Hugging Face folder, and the names in its index.

    safetensors are preferred to files of torch.save; without an index there is one file, or none.
    """
    for name in _HF_FILES:
        if (index := folder / f"{name}{_INDEX}").is_file():
            file_by_name = _read_index(index)
            return [folder / each for each in dict.fromkeys(file_by_name.values())], {*file_by_name}
        if (folder / name).is_file():
            return [folder / name], set()
    return [], set()


def _read_index(path: Path) -> dict[str, str]:
    with open_file(path) as file:
        found = parse_json(file.read(_MAX_INDEX_BYTES), path, CheckpointError, _INDEX_LIMITS)
    match found:
        case {"weight_map": dict(file_by_name)} if file_by_name:
            pass
        case _:
            raise CheckpointError(f"{path} has no weight_map, or an empty one.")
    for file_name in set(map(str, file_by_name.values())):
        if Path(file_name).name != file_name or file_name in ("", ".."):
            raise CheckpointError(
                f"{path} names {file_name[:80]!r}, which is not a file beside it."
            )
    return {name: str(file_name) for name, file_name in file_by_name.items()}


def _read_hf(folder: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    paths, names = hf_files(folder)
    for path in paths:
        found = format_of(path).read(path)
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{path} has no tensors by name.")
        twice = tensors.keys() & found.keys()
        if twice:
            raise CheckpointError(f"{path} has {min(twice)[:80]!r}, as another file has.")
        tensors.update(found)
    if missing := names - tensors.keys():
        raise CheckpointError(
            f"The index in {folder} names {min(missing)[:80]!r}, which is in none of its files.",
            advice="A file is missing or of another version: fetch the folder again.",
        )
    return tensors


def _write_hf(folder: Path, state: Mapping[str, Any]) -> None:
    from torch import Tensor

    tensors = {name: each for name, each in state.items() if isinstance(each, Tensor)}
    shards: list[dict[str, Any]] = [{}]
    sizes = [0]
    for name, tensor in tensors.items():
        if sizes[-1] and sizes[-1] + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.nbytes
    if len(shards) == 1:
        write_tensors(folder / _HF_FILES[0], tensors)
        return
    file_by_name = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / file_name, shard)
        file_by_name.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": file_by_name}
    replace_file(folder / f"{_HF_FILES[0]}{_INDEX}", [json.dumps(index, indent=2)])


FOLDERS = {
    "dcp": Folder(
        "a folder of torch.distributed.checkpoint",
        lambda path: (path / METADATA).is_file(),
        read_dcp,
        write_dcp,
    ),
    "hf": Folder(
        "a Hugging Face folder", lambda path: bool(hf_files(path)[0]), _read_hf, _write_hf
    ),
}
