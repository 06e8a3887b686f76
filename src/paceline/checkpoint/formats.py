"""Files with weights from any source: safetensors, and files of `torch.save`.

A format is an entry of `FORMATS`, recognised by a file's first bytes and not by its name. Nothing
in a file is ever executed: `torch.load` runs with `weights_only=True` and without a fallback. torch
is imported for the first file that needs it.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.files import open_file, size_of, write_fully
from paceline.errors import CheckpointError, UsageError
from paceline.files import (
    LENGTH_BYTES,
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    as_plain,
    is_storable,
    memory_of,
    new_file,
    plan_file,
)
from paceline.files import read_tensors as read_safetensors

if TYPE_CHECKING:
    from torch import Tensor

_OLD_STREAMS = 5
MAX_INSTRUCTION_BYTES = 64 * 2**20
# The 64-bit end record, its locator, and the end record.
_ZIP_ENDS_BYTES = 56 + 20 + 22
_BYTES_CODECS = ("base64", "bz2", "hex", "quopri", "quotedprintable", "uu", "zip", "zlib")
"""Encodings from bytes to bytes, which can be repeated, by their names in Python."""
_MAX_VALUES = 2**21
_COPIES = 8
"""How many times a file's tensors may reuse its bytes, tied ones counting once."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One kind of file."""

    begins: Callable[[bytes], bool]
    """Whether a file has this format, by its first nine bytes."""
    read: Callable[[Path], Any]
    suffixes: tuple[str, ...]
    """The suffixes under which such files are written; none for a format that is only read."""
    write: Callable[[Path, Any], None]


def format_of(path: Path) -> FileFormat:
    """A file's format; raises for one that cannot be read."""
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
    """Write a state in the format that the path's suffix names, atomically."""
    try:
        format_to_write(path).write(path, state)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error


def format_to_write(path: Path) -> FileFormat:
    for each in FORMATS:
        if path.suffix in each.suffixes:
            return each
    raise UsageError(
        f"{str(path)!r} does not say which kind of file to write.",
        advice="End it in .safetensors, .pt or .pth, or pass --as dcp or --as hf for a folder.",
    )


def is_state_dict(value: Any) -> bool:
    """Whether this is what a module's state_dict() looks like."""
    from torch import Tensor

    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    items = [item for key, item in value.items() if not key.endswith("_extra_state")]
    return bool(items) and all(isinstance(item, Tensor) for item in items)


def flatten(state: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor and value of a nested state, by its dotted path."""
    match state:
        case Mapping():
            for key, value in state.items():
                yield from flatten(value, (*keys, str(key)))
        case list() | tuple():
            for index, value in enumerate(state):
                yield from flatten(value, (*keys, str(index)))
        case _:
            yield ".".join(keys), state


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    with open_file(path) as file:
        return read_safetensors(file, size_of(file), path, CheckpointError)


def write_tensors(path: Path, state: Mapping[str, Any]) -> None:
    """Write the tensors of a state dict as a safetensors file, atomically."""
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
    with open_file(path) as file:
        _check_zip(file, size_of(file), path)
    # Mapped, not read: a training's file is often three times as large as its weights, and a tensor
    # that claims to be larger than its bytes allocates nothing.
    return _load(path, path.stat().st_size, path, mmap=True)


def read_saved(data: bytes, origin: Path) -> Any:
    """Read the bytes of a file of `torch.save`; `origin` is its name in messages."""
    file = io.BytesIO(data)
    _check_zip(file, len(data), origin)
    file.seek(0)
    return _load(file, len(data), origin, mmap=False)


def _read_old_file(path: Path) -> Any:
    """The format before torch 1.6: five streams of instructions before the raw bytes."""
    with open_file(path) as file:
        start = io.BytesIO(file.read(MAX_INSTRUCTION_BYTES))
    for _ in range(_OLD_STREAMS):
        if start.tell() < start.getbuffer().nbytes:
            _check_instructions(start, path)
    return _load(path, path.stat().st_size, path, mmap=False)


def _load(source: Path | io.BytesIO, size: int, path: Path, mmap: bool) -> Any:
    import torch

    try:
        state = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        _check_state(state, size, path)
        return state
    except CheckpointError:
        raise
    except Exception as error:
        # torch says only in words which class it has refused.
        wanted = re.search(r"(?:GLOBAL |global: )([a-z_][\w.]*)", str(error))
        if wanted:
            raise _needs_running(path, wanted[1]) from None
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be read: {reason}.") from error


def _check_state(state: Any, size: int, path: Path) -> None:
    """Refuse a state that torch reads, but that no program could traverse or copy.

    A file can contain a dictionary that contains itself, one list a million times, and a view of a
    terabyte on four bytes.
    """
    from torch import Tensor, strided

    what = ""
    values = 0
    bytes_by_view: dict[Any, int] = {}  # a tied weight counts once
    waiting = [(state, 0)]
    while waiting and not what:
        value, depth = waiting.pop()
        values += 1
        if depth > MAX_DEPTH or values > _MAX_VALUES:
            what = "contains itself, or more than a training saves"
        elif isinstance(value, Mapping):
            waiting += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += [(each, depth + 1) for each in value]
        elif isinstance(value, Tensor) and value.layout == strided and not value.is_meta:
            view = value.data_ptr(), value.dtype, value.shape, value.stride()
            bytes_by_view[view] = value.nbytes
            if value.nbytes > value.untyped_storage().nbytes():
                what = "has a tensor that is larger than its memory: it overlaps itself"
    if not what and sum(bytes_by_view.values()) > _COPIES * max(size, 2**20):
        what = "has tensors that share their bytes many times over"
    if what:
        raise CheckpointError(
            f"{path} {what}.",
            advice="Nothing of it was used. Save a state_dict() whose tensors are contiguous().",
        )


def _save(path: Path, state: Any) -> None:
    import torch

    with new_file(path, is_synced=True) as file, open(file, "wb", closefd=False) as stream:
        torch.save(state, stream)


def _needs_running(path: Path, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read without running what is in it: it asks for {wanted}.",
        "Nothing was run.",
        "If you trust its author, load it with torch where you trained it, and save "
        "model.state_dict() alone.",
    )


def _check_zip(file: io.BufferedIOBase, size: int, path: Path) -> None:
    """Refuse an archive that torch.save would not write: compressed, ambiguous, or oversized."""
    try:
        _check_zip_end(file, size)
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            names = Counter(entry.filename.lower() for entry in entries)
            if max(names.values(), default=0) > 1:  # torch's reader ignores case
                raise ValueError("a name occurs twice")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError("it is compressed")
            if sum(entry.file_size for entry in entries) > size:
                raise ValueError("it claims more bytes than it has")
            for entry in entries:
                if entry.filename.lower().endswith(".pkl"):
                    with archive.open(entry) as instructions:
                        start = io.BytesIO(instructions.read(MAX_INSTRUCTION_BYTES))
                    _check_storages(_check_instructions(start, path), entries)
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, EOFError) as error:
        raise CheckpointError(
            f"{path} is damaged, or torch.save did not write it: {error}.",
            advice="Nothing of it was used.",
        ) from error


def _check_zip_end(file: io.BufferedIOBase, size: int) -> None:
    """Refuse an archive whose directory would take more memory than its tensors.

    torch.save leaves no comment: the last bytes are the end record, before it the 64-bit one.
    """
    file.seek(max(0, size - _ZIP_ENDS_BYTES))
    ends = file.read()
    if ends[-22:-18] != b"PK\5\6":
        raise ValueError("it does not end as an archive does")
    # The size of the directory; all ones where the 64-bit record has it instead.
    stated = int.from_bytes(ends[-10:-6], "little")
    if stated == 2**32 - 1 and ends[:4] == b"PK\6\6":
        stated = int.from_bytes(ends[40:48], "little")
    if stated > MAX_HEADER_BYTES:
        raise ValueError(f"its directory takes {stated:,} bytes")


def _check_storages(storages: list[list[Any]], entries: list[zipfile.ZipInfo]) -> None:
    """Refuse a storage that is not as long as its entry: torch would map the bytes after it."""
    import torch

    bytes_by_key = {e.filename.partition("/data/")[2]: e.file_size for e in entries}
    for storage in storages:
        match storage:
            case ["storage", str(kind), str(key), str(), int(count)]:
                kept = getattr(torch, kind.rpartition(" ")[2], None)
                is_typed = isinstance(kept, type) and issubclass(kept, torch.TypedStorage)
                size = kept._dtype.itemsize if is_typed else 1  # type: ignore[union-attr]
                if not 0 <= bytes_by_key.get(key, -1) - count * size < size:
                    raise ValueError(f"tensor data {key[:20]!r} is not as long as it should be")
            case _:
                raise ValueError("it has a storage of a kind that torch does not write")


def _check_instructions(file: io.BytesIO, path: Path) -> list[list[Any]]:
    """Scan a pickle without running it, for instructions that allocate unlimited memory.

    torch's restricted reader allows `bytearray(n)`, whose n may be a terabyte, lengths beyond the
    end, and repeated encoding in hexadecimal. Returns the storages that the pickle refers to, each
    as "storage", type, key, device, number of elements.
    """
    calls, repeats = set(), False
    storages: list[list[Any]] = []
    recent: list[Any] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "MARK":
                recent = []
            elif opcode.name == "BINPERSID":
                storages.append(recent)
                recent = []
            elif opcode.name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = recent[-1] if recent else None
            elif opcode.name in ("BINGET", "LONG_BINGET"):
                recent.append(memo.get(argument))
            elif argument is not None:
                recent.append(argument)
            if opcode.name == "GLOBAL":
                calls.add(str(argument))
            elif isinstance(argument, str):
                # Normalised as Python's lookup of an encoding normalises its name.
                spelled = re.sub("[^a-z0-9]+", "", argument.lower()).removesuffix("codec")
                repeats = repeats or spelled in _BYTES_CODECS
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:100]}.") from error
    for call in calls:
        if call.endswith(" bytearray") or (call == "_codecs encode" and repeats):
            raise _needs_running(path, call.replace(" ", ".").removeprefix("builtins."))
    return storages


SAFETENSORS = FileFormat(
    lambda start: start[LENGTH_BYTES:] == b"{", read_tensors, (".safetensors",), write_tensors
)
FORMATS = [
    FileFormat(
        lambda start: start[:4] == b"PK\x03\x04", _read_zip, (".pt", ".pth", ".bin", ".ckpt"), _save
    ),
    SAFETENSORS,
    FileFormat(lambda start: start[:1] == b"\x80", _read_old_file, (), _save),
]
