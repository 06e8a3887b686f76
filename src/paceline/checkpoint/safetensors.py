"""The safetensors format, read and written with torch alone.

    header length (8 bytes, little endian) | header, JSON | raw bytes of the tensors, without gaps

Sizes and places are compared with the bytes that are really there before anything is believed, so
a crafted header costs an error and not the memory it claims. Types that the format lacks are
stored as a view of another, named in the metadata. Headers are read without torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.files import open_file, read_up_to, replace_file, write_fully
from paceline.comm.codec import (
    as_plain,
    dtype_name,
    from_memory,
    is_shape,
    is_storable,
    memory_of,
)
from paceline.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from hashlib import _Hash

    from torch import Tensor

MAX_HEADER_BYTES = 16 * 2**20
LENGTH_BYTES = 8
METADATA = "__metadata__"
VIEWS = "paceline.views"
"""The metadata entry that says which tensors are views: JSON, torch's type by tensor name."""

# A tensor's entry has three brackets in fifty bytes or more, and metadata is mostly text. More
# brackets are not a header but an attempt to make the parser build millions of tiny lists.
_BYTES_PER_BRACKET = 8
_CHUNK_BYTES = 4 * 2**20

_TYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}
"""torch's name and the bytes per element of every type that the format and torch share."""
_NAME_BY_DTYPE = {dtype: name for name, (dtype, _) in _TYPES.items()}
# Not in the format: stored as their parts, in one more dimension at the end, or as plain bytes.
_VIEW_BY_DTYPE = {"complex32": "float16", "complex128": "float64", "float4_e2m1fn_x2": "uint8"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies: bytes [begin, end) behind the header, and how to read them."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds: places by name in the order of their bytes, and free text."""

    places: dict[str, Place]
    metadata: dict[str, str]

    @property
    def data_bytes(self) -> int:
        return max((place.end for place in self.places.values()), default=0)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file before it is written: its first bytes, and what follows, in this order."""

    prefix: bytes
    header: Header
    tensors: list[Tensor]
    """In types that the format has, sharing memory with the tensors given where possible."""

    @property
    def total_bytes(self) -> int:
        return len(self.prefix) + self.header.data_bytes


def plan_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FilePlan:
    """Lay tensors out without gaps, each at a multiple of its element size."""
    views = {name: dtype_name(t) for name, t in tensors.items() if dtype_name(t) in _VIEW_BY_DTYPE}
    text = {**(metadata or {}), **({VIEWS: json.dumps(views)} if views else {})}
    plain = {name: _as_view(tensor.detach()) for name, tensor in tensors.items()}
    types = {name: _NAME_BY_DTYPE[dtype_name(tensor)] for name, tensor in plain.items()}
    places: dict[str, Place] = {}
    begin = 0
    for name in sorted(plain, key=lambda name: (-_TYPES[types[name]][1], name)):
        shape = tuple(plain[name].shape)
        end = begin + math.prod(shape) * _TYPES[types[name]][1]
        places[name] = Place(types[name], shape, begin, end)
        begin = end
    header = Header(places, text)
    return FilePlan(_write_header(header), header, [plain[name] for name in places])


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file as a whole or not at all."""
    for name, tensor in tensors.items():
        if not is_storable(tensor):
            raise UsageError(
                f"{name!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which "
                "cannot be written.",
                advice="Use a dense tensor with memory.",
            )
    plan = plan_file(tensors, metadata)
    with replace_file(Path(path)) as file:
        write_fully(file, plan.prefix)
        for tensor in plan.tensors:
            on_cpu = as_plain(tensor)
            write_fully(file, memory_of(on_cpu))


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a safetensors file, each in memory of its own."""
    with open_file(Path(path)) as file:
        return read_open_file(file, Path(path))


def read_open_file(file: int, path: Path, digest: _Hash | None = None) -> dict[str, Tensor]:
    """All tensors of an open file, every byte of it passing through `digest` on the way.

    The caller compares the digest before it uses a tensor: what is checked is what is used.
    """
    header, start = read_header(file, path)
    if digest is not None:
        digest.update(memoryview(start))
    try:
        views = dict(json.loads(header.metadata.get(VIEWS, "{}")))
        is_ours = all(dtype in _VIEW_BY_DTYPE for dtype in views.values())
    except (ValueError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise CheckpointError(f"{path} has metadata {VIEWS!r} that we did not write.")
    tensors = {}
    for name, place in header.places.items():
        try:
            tensor = _read_one(file, place, digest)
            tensors[name] = _restored(tensor, views[name]) if name in views else tensor
        except ValueError as error:
            raise CheckpointError(f"{path}: {name!r:.100} {error}.") from None
    return tensors


def read_header(file: int, path: Path) -> tuple[Header, bytes]:
    """The checked header of an open file, and the bytes it stands in."""
    size = os.fstat(file).st_size
    prefix = read_up_to(file, LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{path} has {size:,} bytes and is not a safetensors file.")
    length = int.from_bytes(prefix, "little")
    if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES) or length < 2:
        raise CheckpointError(
            f"{path} claims a header of {length:,} bytes; the file has {size:,}, and at most "
            f"{MAX_HEADER_BYTES:,} are allowed.",
            advice="It is not a safetensors file, or it is damaged.",
        )
    text = read_up_to(file, length)
    try:
        places, metadata = _parse(text)
        _check_places(places, size - LENGTH_BYTES - length)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has an impossible header: {str(error)[:200]}.",
            advice="The file is damaged or was made to do harm; nothing of it was used.",
        ) from None
    return Header(places, metadata), prefix + text


def _write_header(header: Header) -> bytes:
    """The bytes before the tensors, filled up so that these begin at a multiple of eight."""
    entries: dict[str, Any] = {METADATA: header.metadata} if header.metadata else {}
    for name, place in header.places.items():
        entries[name] = {
            "dtype": place.dtype,
            "shape": list(place.shape),
            "data_offsets": [place.begin, place.end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"The header of {len(header.places):,} tensors takes {len(text):,} bytes, more than "
            f"the {MAX_HEADER_BYTES:,} allowed.",
            advice="Shorten the names, or save fewer and larger tensors.",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _parse(text: bytes) -> tuple[dict[str, Place], dict[str, str]]:
    """Places in the order of their bytes, and metadata."""
    if (text.count(b"{") + text.count(b"[")) * _BYTES_PER_BRACKET > len(text) + 100:
        raise ValueError("it is made of brackets")
    entries = json.loads(text, object_pairs_hook=_without_repeats)
    if not isinstance(entries, dict):
        raise ValueError("it is not an object")
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not text by name")
    places = {name: _place(name, entry) for name, entry in entries.items()}
    return dict(sorted(places.items(), key=lambda item: (item[1].begin, item[1].end))), metadata


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _place(name: str, entry: Any) -> Place:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError(f"{name[:80]!r} has no dtype, shape and data_offsets")
    if dtype not in _TYPES:
        raise ValueError(f"{name[:80]!r} is of the type {dtype[:20]!r}, which torch does not have")
    if not is_shape(shape):
        raise ValueError(f"{name[:80]!r} has the impossible shape {str(shape)[:80]}")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < 2**63:
        raise ValueError(f"{name[:80]!r} has impossible offsets: {str([begin, end])[:80]}")
    if math.prod(shape) * _TYPES[dtype][1] != end - begin:
        raise ValueError(
            f"{name[:80]!r} is {dtype} of shape {str(shape)[:80]}, which does not take the "
            f"{end - begin:,} bytes given to it"
        )
    return Place(dtype, tuple(shape), begin, end)


def _check_places(places: Mapping[str, Place], data_bytes: int) -> None:
    """Every byte belongs to exactly one tensor: no overlap, no gap, nothing behind."""
    reached = 0
    for name, place in places.items():
        if place.begin != reached:
            raise ValueError(
                f"{name[:80]!r} begins at byte {place.begin:,}, where {reached:,} comes next"
            )
        reached = place.end
    if reached != data_bytes:
        raise ValueError(f"its tensors take {reached:,} bytes, and {data_bytes:,} are there")


def _read_one(file: int, place: Place, digest: _Hash | None) -> Tensor:
    """Read the next bytes of a file into a new tensor."""
    import torch

    flat = torch.empty(place.end - place.begin, dtype=torch.uint8)
    view = memory_of(flat)
    done = 0
    while done < len(view):
        got = os.readv(file, [view[done : done + _CHUNK_BYTES]])
        if got == 0:
            raise ValueError("is cut off by the end of the file")
        if digest is not None:
            digest.update(view[done : done + got])
        done += got
    return from_memory(flat, _TYPES[place.dtype][0], place.shape)


def _as_view(tensor: Tensor) -> Tensor:
    import torch

    dtype = _VIEW_BY_DTYPE.get(dtype_name(tensor))
    if dtype is None:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(getattr(torch, dtype))


def _restored(tensor: Tensor, dtype: str) -> Tensor:
    """What `_as_view` was given; ValueError where it cannot have been."""
    import torch

    if dtype_name(tensor) != _VIEW_BY_DTYPE[dtype]:
        raise ValueError(f"is {tensor.dtype}, which is not a view of {dtype}")
    if not dtype.startswith("complex"):
        return tensor.view(getattr(torch, dtype))
    if tensor.shape[-1:] != (2,):
        raise ValueError(f"has shape {tuple(tensor.shape)}, not (..., 2)")
    return torch.view_as_complex(tensor)
