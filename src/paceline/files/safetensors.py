"""The safetensors format, in files and in messages, with torch alone.

    header length (8 bytes, little endian) | header, JSON | raw bytes of the tensors, without gaps

Sizes and offsets are compared with the bytes of the file before memory is allocated, so a crafted
header causes an error and not the allocation it claims. Types that the format lacks are stored as a
view of another type, named in the metadata. Headers are read without torch.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, UsageError, WireError
from paceline.files.documents import JsonLimits, parse_json

if TYPE_CHECKING:
    from hashlib import _Hash

    from torch import Tensor

MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS = 64
LENGTH_BYTES = 8
METADATA = "__metadata__"
VIEWS = "paceline.views"
"""The metadata entry that says which tensors are views: JSON, torch's type by tensor name."""

_HEADER_LIMITS = JsonLimits(values=2**22, depth=3, text=MAX_HEADER_BYTES, name=2**16)
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
class TensorPlace:
    """The location of one tensor: bytes [begin, end) after the header, their type and shape."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a file: places by name in the order of their bytes, and free text."""

    places: dict[str, TensorPlace]
    metadata: dict[str, str]

    @property
    def data_bytes(self) -> int:
        return max((place.end for place in self.places.values()), default=0)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file before it is written: its first bytes, and the tensors that follow, in order."""

    prefix: bytes
    header: Header
    tensors: list[Tensor]
    """In types that the format has; they share memory with the given tensors where possible."""

    @property
    def total_bytes(self) -> int:
        return len(self.prefix) + self.header.data_bytes


def plan_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FilePlan:
    """Lay out tensors without gaps, each at a multiple of its element size."""
    views = {name: dtype_name(t) for name, t in tensors.items() if dtype_name(t) in _VIEW_BY_DTYPE}
    text = {**(metadata or {}), **({VIEWS: json.dumps(views)} if views else {})}
    plain = {name: _as_view(tensor.detach()) for name, tensor in tensors.items()}
    types = {name: _NAME_BY_DTYPE[dtype_name(tensor)] for name, tensor in plain.items()}
    places: dict[str, TensorPlace] = {}
    begin = 0
    # Largest elements first: then each tensor begins at a multiple of its element size.
    for name in sorted(plain, key=lambda name: (-_TYPES[types[name]][1], name)):
        shape = tuple(plain[name].shape)
        end = begin + math.prod(shape) * _TYPES[types[name]][1]
        places[name] = TensorPlace(types[name], shape, begin, end)
        begin = end
    header = Header(places, text)
    return FilePlan(_write_header(header), header, [plain[name] for name in places])


def is_storable(tensor: Tensor) -> bool:
    """Whether a tensor is dense, has memory, and has a type that can be written."""
    import torch

    is_dense = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    is_known = dtype_name(tensor) in _NAME_BY_DTYPE or dtype_name(tensor) in _VIEW_BY_DTYPE
    return is_dense and is_known and tensor.dim() <= MAX_DIMENSIONS


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def as_plain(tensor: Tensor) -> Tensor:
    """A tensor's values in contiguous CPU memory; copied only where needed."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; valid while the tensor exists.

    Not `.numpy()`: NumPy is not required, and has no bfloat16.
    """
    size = tensor.numel() * tensor.itemsize
    if size == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def read_tensors(
    file: BufferedIOBase,
    size: int,
    path: object,
    error: type[PacelineError] = WireError,
    digest: _Hash | None = None,
) -> dict[str, Tensor]:
    """Read all tensors of a file of `size` bytes, each into its own memory.

    `path` is the file's name in messages, and `error` the class that is raised. Every byte is
    hashed by `digest` as it is read, and the caller compares it before using a tensor: the bytes
    that were checked are the bytes that are used, even if the file changes meanwhile.
    """
    header, start = read_header(file, size, path, error)
    if digest is not None:
        digest.update(start)
    try:
        views = parse_json(header.metadata.get(VIEWS, "{}").encode(), VIEWS)
        is_ours = all(dtype in _VIEW_BY_DTYPE for dtype in views.values())
    except (ValueError, TypeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise error(f"{path} has invalid metadata {VIEWS!r}.")
    tensors = {}
    for name, place in header.places.items():
        try:
            tensor = _read_one(file, place, digest)
            tensors[name] = _restored(tensor, views[name]) if name in views else tensor
        except ValueError as problem:
            raise error(f"{path}: {name!r:.100} {problem}.") from None
    return tensors


def read_header(
    file: BufferedIOBase, size: int, path: object, error: type[PacelineError] = WireError
) -> tuple[Header, bytes]:
    """The checked header of a file of `size` bytes, and its bytes."""
    prefix = file.read(LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        raise error(f"{path} has {size:,} bytes and is not a safetensors file.")
    length = int.from_bytes(prefix, "little")
    if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES) or length < 2:
        raise error(
            f"{path} claims a header of {length:,} bytes; there are {size:,}, and at most "
            f"{MAX_HEADER_BYTES:,} are allowed.",
            advice="It is not a safetensors file, or it is damaged.",
        )
    text = file.read(length)
    try:
        return _parse(text, size - LENGTH_BYTES - length), prefix + text
    except ValueError as problem:
        raise error(
            f"{path} has an invalid header: {str(problem)[:200].rstrip('.')}.",
            advice="The file is damaged or was made to do harm; nothing of it was used.",
        ) from None


def _write_header(header: Header) -> bytes:
    """The bytes before the tensors, padded so that these begin at a multiple of eight."""
    entries: dict[str, Any] = {METADATA: header.metadata} if header.metadata else {}
    for name, place in header.places.items():
        entries[name] = {
            "dtype": place.dtype,
            "shape": list(place.shape),
            "data_offsets": [place.begin, place.end],
        }
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        part = error.object[error.start - 20 : error.end]
        raise UsageError(
            f"The name of a tensor has a lone surrogate: {part!r}.", advice="Rename it."
        ) from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(
            f"The header of {len(header.places):,} tensors takes {len(text):,} bytes, more than "
            f"the {MAX_HEADER_BYTES:,} allowed.",
            advice="Shorten the names, or save fewer and larger tensors.",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _parse(text: bytes, data_bytes: int) -> Header:
    """Parse a header; ValueError unless its tensors cover every byte of the data exactly once."""
    entries = parse_json(text, "it", WireError, _HEADER_LIMITS)
    if not isinstance(entries, dict):
        raise ValueError("it is not an object")
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not text by name")
    found = [(name, _place(name, entry)) for name, entry in entries.items()]
    # Also by the end: an empty tensor goes before the one that begins at the same byte.
    places = dict(sorted(found, key=lambda item: (item[1].begin, item[1].end)))
    reached = 0
    for name, place in places.items():
        if place.begin != reached:
            raise ValueError(f"{name[:80]!r} begins at {place.begin:,}, not at {reached:,}")
        reached = place.end
    if reached != data_bytes:
        raise ValueError(f"its tensors take {reached:,} bytes, and {data_bytes:,} are there")
    return Header(places, metadata)


def _place(name: str, entry: Any) -> TensorPlace:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            raise ValueError(f"{name[:80]!r} has no dtype, shape and data_offsets")
    if dtype not in _TYPES:
        raise ValueError(f"{name[:80]!r} is of the type {dtype[:20]!r}, which torch does not have")
    if not _is_shape(shape):
        raise ValueError(f"{name[:80]!r} has the impossible shape {str(shape)[:80]}")
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < 2**63:
        raise ValueError(f"{name[:80]!r} has impossible offsets: {str([begin, end])[:80]}")
    if math.prod(shape) * _TYPES[dtype][1] != end - begin:
        raise ValueError(
            f"{name[:80]!r} is {dtype} of shape {str(shape)[:80]}, which does not take the "
            f"{end - begin:,} bytes given to it"
        )
    return TensorPlace(dtype, tuple(shape), begin, end)


def _is_shape(extents: list[Any]) -> bool:
    """Whether torch could make a tensor of this shape, given enough memory."""
    return (
        len(extents) <= MAX_DIMENSIONS
        and all(type(extent) is int and 0 <= extent < 2**63 for extent in extents)
        # torch computes strides so, also of a tensor without elements.
        and math.prod([extent or 1 for extent in extents]) < 2**63
    )


def _read_one(file: BufferedIOBase, place: TensorPlace, digest: _Hash | None) -> Tensor:
    """Read the next bytes of a file into a new tensor."""
    import torch

    flat = torch.empty(place.end - place.begin, dtype=torch.uint8)
    view = memory_of(flat)
    for begin in range(0, len(view), _CHUNK_BYTES):
        chunk = view[begin : begin + _CHUNK_BYTES]
        if file.readinto(chunk) != len(chunk):
            raise ValueError("is truncated: the file ends before it")
        if digest is not None:
            digest.update(chunk)
    if place.dtype == "BOOL" and flat.gt(1).any():
        raise ValueError("has a bool that is neither 0 nor 1")
    return flat.view(getattr(torch, _TYPES[place.dtype][0])).reshape(place.shape)


def _as_view(tensor: Tensor) -> Tensor:
    import torch

    dtype = _VIEW_BY_DTYPE.get(dtype_name(tensor))
    if dtype is None:
        return tensor
    if tensor.is_complex():
        # torch has no view of a tensor that is conjugated lazily.
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(getattr(torch, dtype))


def _restored(tensor: Tensor, dtype: str) -> Tensor:
    """Undo `_as_view`; ValueError where the tensor cannot be such a view."""
    import torch

    if dtype_name(tensor) != _VIEW_BY_DTYPE[dtype]:
        raise ValueError(f"is {tensor.dtype}, which is not a view of {dtype}")
    if not dtype.startswith("complex"):
        return tensor.view(getattr(torch, dtype))
    if tensor.shape[-1:] != (2,):
        raise ValueError(f"has shape {tuple(tensor.shape)}, not (..., 2)")
    return torch.view_as_complex(tensor)
