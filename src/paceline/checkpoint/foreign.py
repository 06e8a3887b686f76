"""Weights in files of any origin: our checkpoints, safetensors, and what `torch.save` wrote.

One door for all of them. What a file is, is read from its first bytes and not from its name.
Nothing in a file is ever executed: `torch.load` runs with `weights_only=True` and without a
fallback.
"""

from __future__ import annotations

import os
import pickletools
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from paceline.checkpoint.directory import find_entry, find_folder
from paceline.checkpoint.files import open_plain, read_up_to
from paceline.checkpoint.header import LENGTH_BYTES
from paceline.checkpoint.names import match_names
from paceline.checkpoint.saver import Checkpoints, read_entry
from paceline.checkpoint.tensors import read_tensors
from paceline.errors import CheckpointError

# What people call the weights in the dictionary they save, likeliest first.
USUAL_KEYS = ("model", "state_dict", "model_state_dict", "module", "net", "network", "weights")
_DEEPEST = 3
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Weights:
    """A module's state dict, and where in the file it was."""

    tensors: Mapping[str, Any]
    keys: tuple[str, ...]
    """The keys that lead to it in the file; none where it is the whole file."""

    @property
    def where(self) -> str:
        return "".join(f"[{key!r}]" for key in self.keys)


def read_state(path: Path, step: int | None = None) -> Any:
    """Everything a file or a checkpoint holds, on the CPU."""
    if path.is_dir():
        return _read_checkpoint(path, step)
    kind = file_kind(path)
    if kind == "safetensors":
        return read_tensors(path)
    return _load_torch_file(path, is_zip=kind == "zip")


def _read_checkpoint(path: Path, step: int | None) -> Any:
    """The state of one checkpoint, or of the newest good one in a folder."""
    entry = find_entry(path, step)
    is_choice = step is not None or entry.path == path.resolve()
    saved = read_entry(entry) if is_choice else Checkpoints(find_folder(path)).load()
    return None if saved is None else saved.state


def file_kind(path: Path) -> str:
    """`safetensors`, `zip` (what torch.save writes) or `old torch`; anything else is refused."""
    file = open_plain(path)
    try:
        start = read_up_to(file, LENGTH_BYTES + 1)
    finally:
        os.close(file)
    if start[:4] == b"PK\x03\x04":
        return "zip"
    if start[LENGTH_BYTES:] == b"{":
        return "safetensors"
    if start[:1] == b"\x80":
        return "old torch"
    raise CheckpointError(
        f"{path} is neither a safetensors file nor one that torch.save wrote.",
        advice="A checkpoint of paceline is a folder: give the folder.",
    )


def find_weights(state: Any, path: Path, expected: Collection[str] = ()) -> Weights:
    """The state dict inside whatever was saved: the one that fits best, or is named as usual."""
    candidates = list(_candidates(state, ()))
    if not candidates:
        raise CheckpointError(
            f"{path} holds no weights: nowhere in it are tensors by name.",
            advice="Save model.state_dict().",
        )
    return max(candidates, key=lambda each: _likelihood(each, expected))


def _likelihood(weights: Weights, expected: Collection[str]) -> tuple[int, int, int]:
    fitting = len(match_names(weights.tensors.keys(), expected)) if expected else 0
    last = weights.keys[-1] if weights.keys else USUAL_KEYS[0]
    usual = -USUAL_KEYS.index(last) if last in USUAL_KEYS else -len(USUAL_KEYS)
    return fitting, usual, len(weights.tensors)


def _candidates(value: Any, keys: tuple[str, ...]) -> Iterator[Weights]:
    if not isinstance(value, Mapping) or len(keys) > _DEEPEST:
        return
    if is_state_dict(value):
        yield Weights(value, keys)
        return
    for key, inner in value.items():
        if isinstance(key, str):
            yield from _candidates(inner, (*keys, key))


def is_state_dict(value: Any) -> bool:
    """Whether this is what a module's state_dict() looks like."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    tensors = [
        isinstance(item, Tensor) for key, item in value.items() if not key.endswith(_EXTRA_STATE)
    ]
    return bool(tensors) and all(tensors)


def _load_torch_file(path: Path, is_zip: bool) -> Any:
    if is_zip:
        _check_zip(path)
    else:
        _check_old_file(path)
    try:
        # Mapped, not read: a training's file is often three times as large as its weights, and
        # mapped memory does not grow for a tensor that claims to be larger than its bytes.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:
        wanted = re.search(r"(?:GLOBAL |global: )([a-z_][\w.]*)", str(error))
        if wanted:
            raise _needs_running(path, wanted[1]) from None
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error


def _needs_running(path: Path, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read without running what is in it: it asks for {wanted}.",
        "Nothing was run.",
        "If you trust whoever made it, load it with torch where you trained it, and save "
        "model.state_dict() alone.",
    )


def _check_zip(path: Path) -> None:
    """torch packs without compressing; what claims to be larger than its file is refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            claimed = sum(entry.file_size for entry in entries)
            is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            if is_packed or claimed > path.stat().st_size:
                raise CheckpointError(
                    f"{path} claims {claimed:,} bytes in {path.stat().st_size:,}; torch.save does "
                    "not compress.",
                    advice="It was not written by torch.save; nothing of it was used.",
                )
            for entry in entries:
                if entry.filename.endswith("/data.pkl"):
                    with archive.open(entry) as file:
                        _check_instructions(file, path)
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, EOFError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def _check_old_file(path: Path) -> None:
    """The format before torch 1.6: four short streams of instructions before the raw bytes."""
    with path.open("rb") as file:
        for _ in range(4):
            if file.peek(1):
                _check_instructions(file, path)


def _check_instructions(file: IO[bytes], path: Path) -> None:
    """Read instructions without following them, for the one that takes any memory it likes.

    `bytearray(n)` is harmless to torch's restricted reader, and n may be a terabyte.
    """
    try:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "GLOBAL" and str(argument).endswith(" bytearray"):
                raise _needs_running(path, "bytearray")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:100]}.") from error
