"""Tensors as safetensors files and back, with torch alone.

A file is planned first, as an image: which bytes go where. The same image can be written from
tensors one by one, or be filled in memory by a snapshot. Reading streams every tensor into its own
memory. Types that the format lacks are stored as a view of another, named in the metadata.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.files import open_plain, read_up_to, replace_file, write_fully
from paceline.checkpoint.header import (
    LENGTH_BYTES,
    Header,
    Place,
    header_bytes,
    plan_places,
    read_header,
    write_header,
)
from paceline.errors import CheckpointError, UsageError

VIEWS = "paceline.views"
"""The metadata entry that says which tensors are views: JSON, torch's type by tensor name."""

_CHUNK_BYTES = 4 * 2**20

_NAME_BY_DTYPE = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_DTYPE_BY_NAME = {name: dtype for dtype, name in _NAME_BY_DTYPE.items()}
# Not in the format: stored as their parts, in one more dimension at the end, or as plain bytes.
_VIEW_BY_DTYPE = {torch.complex32: torch.float16, torch.complex128: torch.float64}
if hasattr(torch, "float4_e2m1fn_x2"):
    _VIEW_BY_DTYPE[torch.float4_e2m1fn_x2] = torch.uint8
_VIEWED_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in _VIEW_BY_DTYPE}


class Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...


def is_storable(tensor: Tensor) -> bool:
    """Whether a tensor is dense, has memory, and has a type that we write."""
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_dense and tensor.dtype in {**_NAME_BY_DTYPE, **_VIEW_BY_DTYPE}


@dataclass(frozen=True, slots=True)
class Image:
    """A planned file: the bytes before the tensors, and where each tensor goes behind them."""

    prefix: bytes
    places: dict[str, Place]

    @property
    def total_bytes(self) -> int:
        return len(self.prefix) + max((place.end for place in self.places.values()), default=0)


def plan_image(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Image:
    """Where each of the tensors, as `storable` gives them, goes in a file."""
    places = plan_places(
        (name, _NAME_BY_DTYPE[tensor.dtype], tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    return Image(write_header(places, metadata or {}), places)


def storable(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in types the format has, sharing memory where possible, and the metadata."""
    plain, views = {}, {}
    for name, tensor in tensors.items():
        if tensor.dtype in _VIEW_BY_DTYPE:
            views[name] = str(tensor.dtype).removeprefix("torch.")
        plain[name] = _as_view(tensor.detach())
    return plain, {VIEWS: json.dumps(views)} if views else {}


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
    plain, views = storable(tensors)
    image = plan_image(plain, {**(metadata or {}), **views})

    def pieces() -> Iterator[bytes | memoryview]:
        yield image.prefix
        for name in image.places:
            on_cpu = plain[name].cpu().resolve_conj().resolve_neg().contiguous()
            yield memory_of(on_cpu)

    with replace_file(Path(path)) as file:
        for piece in pieces():
            write_fully(file, piece)


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All tensors of a safetensors file, each in memory of its own."""
    with TensorFile(path) as file:
        return file.read_all()


class TensorFile:
    """An open safetensors file: its header is checked, its tensors are read when asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open_plain(self.path)
        try:
            self.header, _ = read_start(self._file, self.path)
            self._views = view_types(self.header, self.path)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> Tensor:
        place = self.header.places[name]
        os.lseek(self._file, self.header.data_begin + place.begin, os.SEEK_SET)
        return _restored(name, read_one(self._file, name, place, self.path), self._views, self.path)

    def read_all(self) -> dict[str, Tensor]:
        return {name: self.read(name) for name in self.header.places}

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_verifying(file: int, path: Path, digest: Digest) -> dict[str, Tensor]:
    """All tensors of an open file, every byte of it passing through `digest` on the way.

    The caller compares the digest before it uses a tensor: what is checked is what is used.
    """
    header, start = read_start(file, path)
    views = view_types(header, path)
    digest.update(memoryview(start))
    tensors = {
        name: read_one(file, name, place, path, digest) for name, place in header.places.items()
    }
    return {name: _restored(name, tensor, views, path) for name, tensor in tensors.items()}


def read_start(file: int, path: Path) -> tuple[Header, bytes]:
    """The checked header of an open file, and the bytes it stands in."""
    size = os.fstat(file).st_size
    prefix = read_up_to(file, LENGTH_BYTES)
    text = read_up_to(file, header_bytes(prefix, size, path))
    return read_header(text, size, path), prefix + text


def view_types(header: Header, path: Path) -> dict[str, torch.dtype]:
    """Which tensors are views of another type, from the metadata; nonsense is refused."""
    try:
        names = json.loads(header.metadata.get(VIEWS, "{}"))
        return {name: _VIEWED_BY_NAME[dtype] for name, dtype in names.items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CheckpointError(f"{path} has metadata {VIEWS!r} that we did not write.") from None


def read_one(
    file: int, name: str, place: Place, path: Path, digest: Digest | None = None
) -> Tensor:
    """Read the next bytes of a file into a new tensor."""
    flat = torch.empty(place.end - place.begin, dtype=torch.uint8)
    view = memory_of(flat)
    done = 0
    while done < len(view):
        got = os.readv(file, [view[done : done + _CHUNK_BYTES]])
        if got == 0:
            raise CheckpointError(f"{path} ends in the middle of {name!r}.")
        if digest is not None:
            digest.update(view[done : done + got])
        done += got
    if place.dtype == "BOOL" and flat.gt(1).any():
        raise CheckpointError(f"{path}: {name!r} has a bool that is neither 0 nor 1.")
    return flat.view(dtype_of(place)).reshape(place.shape)


def dtype_of(place: Place) -> torch.dtype:
    """torch's name for a place's type."""
    return _DTYPE_BY_NAME[place.dtype]


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid as long as the tensor lives.

    Not `.numpy()`: torch alone must be enough, and NumPy knows no bfloat16.
    """
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _as_view(tensor: Tensor) -> Tensor:
    dtype = _VIEW_BY_DTYPE.get(tensor.dtype)
    if dtype is None:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(dtype)


def _restored(name: str, tensor: Tensor, views: Mapping[str, torch.dtype], path: Path) -> Tensor:
    dtype = views.get(name)
    if dtype is None:
        return tensor
    if tensor.dtype != _VIEW_BY_DTYPE[dtype]:
        raise CheckpointError(f"{path}: {name!r} is {tensor.dtype}, which is no view of {dtype}.")
    if not dtype.is_complex:
        return tensor.view(dtype)
    if tensor.shape[-1:] != (2,):
        raise CheckpointError(f"{path}: {name!r} has shape {tuple(tensor.shape)}, not (..., 2).")
    return torch.view_as_complex(tensor)
