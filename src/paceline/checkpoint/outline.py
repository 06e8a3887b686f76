"""What is in a checkpoint or weights file, as plain data, without torch and without loading it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.directory import Entry, opened, opened_file, verify
from paceline.checkpoint.files import open_plain, read_bounded, read_up_to
from paceline.checkpoint.header import LENGTH_BYTES, Header, header_bytes, read_header
from paceline.checkpoint.manifest import MAX_DEPTH, MAX_SKELETON_BYTES, SKELETON, TENSORS, Manifest
from paceline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Outline:
    """A checkpoint's manifest, header and values, not compared with any hash."""

    manifest: Manifest
    header: Header
    values: dict[str, Any]
    """What is neither tensor nor container, by its path."""
    tensor_names: frozenset[str]
    """The tensors that the values' tree speaks of."""


def read_outline(entry: Entry) -> Outline:
    """Read a checkpoint's descriptions, a few kilobytes whatever its size."""
    with opened(entry) as (folder, manifest):
        with opened_file(folder, entry, TENSORS, manifest.files[TENSORS]) as (file, path):
            header = _header_of(file, path)
        with opened_file(folder, entry, SKELETON, manifest.files[SKELETON]) as (file, path):
            text = read_bounded(file, MAX_SKELETON_BYTES, path)
    try:
        leaves = list(_leaves(json.loads(text.decode("utf-8", "surrogatepass")), ()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not the JSON we write: {str(error)[:100]}.") from None
    return Outline(
        manifest,
        header,
        {path: value for path, kind, value in leaves if kind == "value"},
        frozenset(value for _, kind, value in leaves if kind == "tensor"),
    )


def verify_fully(entry: Entry) -> Manifest:
    """Compare every hash, and whether the files fit each other."""
    manifest = verify(entry)
    outline = read_outline(entry)
    differing = outline.tensor_names ^ outline.header.places.keys()
    if differing:
        raise CheckpointError(
            f"{entry.path}: {SKELETON} and {TENSORS} disagree about {min(differing)[:80]!r}."
        )
    return manifest


def is_written_by_torch(path: Path) -> bool:
    """Whether a file begins as those of torch.save do."""
    file = open_plain(path)
    try:
        return read_up_to(file, 2) in (b"PK", b"\x80\x02")
    finally:
        os.close(file)


def read_file_header(path: Path) -> Header:
    """The checked header of a safetensors file."""
    file = open_plain(path)
    try:
        return _header_of(file, path)
    finally:
        os.close(file)


def _header_of(file: int, path: Path) -> Header:
    size = os.fstat(file).st_size
    length = header_bytes(read_up_to(file, LENGTH_BYTES), size, path)
    return read_header(read_up_to(file, length), size, path)


def _leaves(tree: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Every leaf of a skeleton: its path, `value` or `tensor`, and the value or tensor's name."""
    if len(keys) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    match tree:
        case ["tensor" | "bytes", str(name)]:
            yield ".".join(keys), "tensor", name
        case ["list" | "tuple", *items]:
            for index, item in enumerate(items):
                yield from _leaves(item, (*keys, str(index)))
        case ["dict" | "ordered" | "counter", *pairs]:
            for pair in pairs:
                yield from _pair_leaves(pair, keys)
        case ["module", _, *pairs]:
            for pair in pairs:
                yield from _pair_leaves(pair, keys)
        case ["float", str(name)]:
            yield ".".join(keys), "value", name
        case [("complex" | "size" | "dtype" | "device") as kind, *parts]:
            yield ".".join(keys), "value", f"{kind} {', '.join(map(str, parts))}"
        case list() | dict():
            raise ValueError("a part of no kind we write")
        case _:
            yield ".".join(keys), "value", tree


def _pair_leaves(pair: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    match pair:
        case [key, tree]:
            yield from _leaves(tree, (*keys, str(key)))
        case _:
            raise ValueError("a part of no kind we write")
