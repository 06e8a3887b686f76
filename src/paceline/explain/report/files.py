"""Reading what a run left behind, whatever state it is in.

Files are opened without following links, sizes are bounded before anything is read, and long files
are read in pieces. What cannot be read is a `WireError` with a sentence for the reader.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import WireError
from paceline.observe.run_folder import LINE_LIMIT_BYTES

DOCUMENT_LIMIT_BYTES = 8 * 2**20
"""The largest JSON document that is read as a whole."""
PIECE_BYTES = 2**18
VALUE_LIMIT = 2**20
"""The longest single value inside a streamed array."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A plain file for reading; never through a link, never a pipe that would wait."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise WireError(f"{path.name} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise WireError(f"{path.name} is not a plain file.")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_document(path: Path) -> dict[str, Any]:
    """One JSON object that is a whole file."""
    with opened(path) as file:
        data = file.read(DOCUMENT_LIMIT_BYTES + 1)
    if len(data) > DOCUMENT_LIMIT_BYTES:
        raise WireError(f"{path.name} is larger than {DOCUMENT_LIMIT_BYTES // 2**20} MiB.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{path.name} is damaged: it is not JSON.") from error
    if not isinstance(value, dict):
        raise WireError(f"{path.name} is damaged: it is not a JSON object.")
    return value


def lines_of(path: Path) -> Iterator[bytes]:
    """Complete lines, without those that are too long to be ours; half a last line is left out."""
    with opened(path) as file:
        skipping = False
        while line := file.readline(LINE_LIMIT_BYTES):
            if not line.endswith(b"\n"):
                skipping = True
            elif skipping:
                skipping = False
            else:
                yield line


def values_of(path: Path, key: str = "traceEvents") -> Iterator[Any]:
    """The values of a JSON array, one at a time: the file itself, or its member `key`.

    An array that is cut off, as that of a run that is still going on, ends where it ends.
    """
    decoder = json.JSONDecoder()
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    with opened(path) as file:
        text = decode(file.read(PIECE_BYTES))
        begin = _array_begin(text, key)
        if begin is None:
            return
        position = begin
        while True:
            while position < len(text) and text[position] in " \t\r\n,":
                position += 1
            if position < len(text) and text[position] == "]":
                return
            try:
                value, end = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                piece = file.read(PIECE_BYTES)
                if not piece or len(text) - position > VALUE_LIMIT:
                    return
                text = text[position:] + decode(piece)
                position = 0
                continue
            yield value
            position = end


def _array_begin(text: str, key: str) -> int | None:
    """Where the first value of the array is."""
    stripped = text.lstrip()
    if stripped.startswith("["):
        return len(text) - len(stripped) + 1
    at = text.find(f'"{key}"')
    bracket = text.find("[", at) if at >= 0 else -1
    return bracket + 1 if bracket >= 0 else None
