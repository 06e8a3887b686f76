"""Files with weights, of any origin: our checkpoints, safetensors, and what `torch.save` wrote.

A format is an entry of `FORMATS`. What a file is, is read from its first bytes and not from its
name. Nothing in a file is ever executed: `torch.load` runs with `weights_only=True` and without a
fallback. torch is loaded with the first file that needs it.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.checkpoint.directory import find_entry, find_folder
from paceline.checkpoint.files import open_file, size_of, write_fully
from paceline.comm import safetensors
from paceline.comm.safetensors import LENGTH_BYTES, as_plain, is_storable, memory_of, plan_file
from paceline.errors import CheckpointError, UsageError
from paceline.observe.run_folder import new_file

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file."""

    name: str
    suffixes: tuple[str, ...]
    """How the names of such files end where we write them; none for what is only read."""
    begins: Callable[[bytes], bool]
    """Whether a file begins like one of these, given its first nine bytes."""
    read: Callable[[Path], Any]
    write: Callable[[Path, Any], None]


def read_state(path: Path, step: int | None = None) -> Any:
    """Everything a file or a checkpoint holds, on the CPU."""
    return _read_checkpoint(path, step) if path.is_dir() else format_of(path).read(path)


def format_of(path: Path) -> Format:
    """Which format a file has; one that we cannot read is refused."""
    with open_file(path) as file:
        start = file.read(LENGTH_BYTES + 1)
    for each in FORMATS:
        if each.begins(start):
            return each
    raise CheckpointError(
        f"{path} is neither a safetensors file nor one that torch.save wrote.",
        advice="A checkpoint of paceline is a folder: give the folder.",
    )


def write_state(path: Path, state: Any) -> None:
    """Write a state in the format that the name says, as a whole or not at all."""
    try:
        format_to_write(path).write(path, state)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error


def format_to_write(path: Path) -> Format:
    for each in FORMATS:
        if path.suffix in each.suffixes:
            return each
    raise UsageError(
        f"{str(path)!r} does not say which kind of file to write.",
        advice="End it in .safetensors, .pt or .pth.",
    )


def is_state_dict(value: Any) -> bool:
    """Whether this is what a module's state_dict() looks like."""
    from torch import Tensor

    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    items = [item for key, item in value.items() if not key.endswith("_extra_state")]
    return bool(items) and all(isinstance(item, Tensor) for item in items)


def flatten(state: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor and value of a nested state, by its path."""
    match state:
        case Mapping():
            for key, value in state.items():
                yield from flatten(value, (*keys, str(key)))
        case list() | tuple():
            for index, value in enumerate(state):
                yield from flatten(value, (*keys, str(index)))
        case _:
            yield ".".join(keys), state


def _read_checkpoint(path: Path, step: int | None) -> Any:
    """The state of one checkpoint, or of the newest good one in a folder."""
    from paceline.checkpoint.saver import Checkpoints, read_entry

    entry = find_entry(path, step)
    is_choice = step is not None or entry.path == path.resolve()
    saved = read_entry(entry) if is_choice else Checkpoints(find_folder(path)).load()
    return None if saved is None else saved.state


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    with open_file(path) as file:
        return safetensors.read_tensors(file, size_of(file), path, CheckpointError)


def write_tensors(path: Path, state: Mapping[str, Any]) -> None:
    """Write the tensors of a state dict as a safetensors file, as a whole or not at all."""
    from torch import Tensor

    tensors = {name: each for name, each in state.items() if isinstance(each, Tensor)}
    for name, tensor in tensors.items():
        if not is_storable(tensor):
            raise UsageError(
                f"{name!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which "
                "cannot be written.",
                advice="Use a dense tensor with memory.",
            )
    plan = plan_file(tensors, {"format": "pt"})
    with new_file(path, is_synced=True) as file:
        write_fully(file, plan.prefix)
        for tensor in plan.tensors:
            plain = as_plain(tensor)
            write_fully(file, memory_of(plain))


def _read_zip(path: Path) -> Any:
    _check_zip(path)
    # Mapped, not read: a training's file is often three times as large as its weights, and mapped
    # memory does not grow for a tensor that claims to be larger than its bytes.
    return _load(path, mmap=True)


def _read_old_file(path: Path) -> Any:
    """The format before torch 1.6: four short streams of instructions before the raw bytes."""
    with path.open("rb") as file:
        for _ in range(4):
            if file.peek(1):
                _check_instructions(file, path)
    return _load(path, mmap=False)


def _load(path: Path, mmap: bool) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        wanted = re.search(r"(?:GLOBAL |global: )([a-z_][\w.]*)", str(error))
        if wanted:
            raise _needs_running(path, wanted[1]) from None
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error


def _save(path: Path, state: Any) -> None:
    import torch

    with new_file(path, is_synced=True) as file, open(file, "wb", closefd=False) as stream:
        torch.save(state, stream)


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


SAFETENSORS = Format(
    "safetensors",
    (".safetensors",),
    lambda start: start[LENGTH_BYTES:] == b"{",
    read_tensors,
    write_tensors,
)
FORMATS = [
    Format(
        "torch.save",
        (".pt", ".pth", ".bin", ".ckpt"),
        lambda start: start[:4] == b"PK\x03\x04",
        _read_zip,
        _save,
    ),
    SAFETENSORS,
    Format("torch.save before 1.6", (), lambda start: start[:1] == b"\x80", _read_old_file, _save),
]
