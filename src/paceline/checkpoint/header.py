"""The header of a safetensors file: which tensor lies where, checked before anything is believed.

    header length (8 bytes, little endian) | header, JSON | raw bytes of the tensors, without gaps

Sizes and places are compared with the bytes that are really there, so a crafted header costs an
error and not the memory it claims. Starts without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import CheckpointError

MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS = 64
LENGTH_BYTES = 8
METADATA = "__metadata__"
# A tensor's entry has three brackets in fifty bytes or more, and metadata is mostly text. More
# brackets are no header but an attempt to make the parser build millions of tiny lists.
_BYTES_PER_BRACKET = 8

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("F8_E8M0",), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes per element of every type that torch shares with the format."""


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
    data_begin: int
    """Where the raw bytes begin in the file."""

    @property
    def data_bytes(self) -> int:
        return max((place.end for place in self.places.values()), default=0)


def plan_places(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Place]:
    """Lay tensors (name, type, shape) out without gaps, each at a multiple of its element size."""
    places, begin = {}, 0
    for name, dtype, shape in sorted(tensors, key=lambda each: (-ITEM_BYTES[each[1]], each[0])):
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        places[name] = Place(dtype, shape, begin, end)
        begin = end
    return places


def write_header(places: Mapping[str, Place], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the tensors, filled up so that these begin at a multiple of eight."""
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, place in places.items():
        entries[name] = {
            "dtype": place.dtype,
            "shape": list(place.shape),
            "data_offsets": [place.begin, place.end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"The header of {len(places):,} tensors takes {len(text):,} bytes, more than the "
            f"{MAX_HEADER_BYTES:,} allowed.",
            advice="Shorten the names, or save fewer and larger tensors.",
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_bytes(prefix: bytes, file_bytes: int, path: object) -> int:
    """How long the header behind the first eight bytes is; a length that cannot be is refused."""
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{path} has {file_bytes:,} bytes and is no safetensors file.")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES) or length < 2:
        raise CheckpointError(
            f"{path} claims a header of {length:,} bytes; the file has {file_bytes:,}, and at most "
            f"{MAX_HEADER_BYTES:,} are allowed.",
            advice="It is no safetensors file, or it is damaged.",
        )
    return length


def read_header(text: bytes, file_bytes: int, path: object) -> Header:
    """Check the JSON of a header against the size of the file it stands in."""
    try:
        places, metadata = _parse(text)
        _check_places(places, file_bytes - LENGTH_BYTES - len(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has an impossible header: {str(error)[:200]}.",
            advice="The file is damaged or was made to do harm; nothing of it was used.",
        ) from None
    ordered = dict(sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)))
    return Header(ordered, metadata, LENGTH_BYTES + len(text))


def _parse(text: bytes) -> tuple[dict[str, Place], dict[str, str]]:
    if (text.count(b"{") + text.count(b"[")) * _BYTES_PER_BRACKET > len(text) + 100:
        raise ValueError("it is made of brackets")
    entries = json.loads(text, object_pairs_hook=_without_repeats)
    if not isinstance(entries, dict):
        raise ValueError("it is no object")
    metadata = entries.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not text by name")
    return {name: _place(name, entry) for name, entry in entries.items()}, metadata


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
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name[:80]!r} is of the type {dtype[:20]!r}, which torch does not have")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name[:80]!r} has {len(shape)} dimensions")
    numbers = [begin, end, *shape]
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{name[:80]!r} has impossible numbers: {str(numbers)[:80]}")
    if math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise ValueError(
            f"{name[:80]!r} is {dtype} of shape {str(shape)[:80]}, which does not take the "
            f"{end - begin:,} bytes given to it"
        )
    if math.prod(max(1, extent) for extent in shape) >= 2**63:
        raise ValueError(f"{name[:80]!r} has the impossible shape {str(shape)[:80]}")
    return Place(dtype, tuple(shape), begin, end)


def _check_places(places: Mapping[str, Place], data_bytes: int) -> None:
    """Every byte belongs to exactly one tensor: no overlap, no gap, nothing behind."""
    reached = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].end)):
        if place.begin != reached:
            raise ValueError(
                f"{name[:80]!r} begins at byte {place.begin:,}, where {reached:,} comes next"
            )
        reached = place.end
    if reached != data_bytes:
        raise ValueError(f"its tensors take {reached:,} bytes, and {data_bytes:,} are there")
