"""The file format of a recorded step: the fields of `stages`, written as strict JSON.

The dataclasses are the schema. `from_json` checks a document against them and names the first
mistake; unknown keys are ignored, so that later versions may add some. Floats that JSON cannot
represent are the strings "nan", "inf" and "-inf". Starts without torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import WireError
from paceline.files import make_private, open_plain, plain_json, read_json, read_value, replace_file
from paceline.record.stages import Trace

SCHEMA = 1
FILE_LIMIT_BYTES = 16 * 2**20


def to_json(trace: Trace) -> dict[str, Any]:
    """The document that `from_json` reads."""
    document: dict[str, Any] = plain_json(asdict(trace))
    return document


def from_json(document: Any) -> Trace:
    """Read a trace from a document; a WireError names what is wrong with it."""
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise WireError(
            f"The recorded step has schema {found!r}; this version of paceline reads {SCHEMA}.",
            advice="Read it with the version that wrote it.",
        )
    trace: Trace = read_value(Trace, document, "step")
    return trace


def write(trace: Trace, path: Path) -> None:
    """Replace the file atomically, readable by this user only."""
    make_private(path.parent)
    replace_file(path, [json.dumps(to_json(trace), allow_nan=False, indent=1), "\n"])


def read(path: Path) -> Trace:
    """Read a recorded step from a file."""
    return from_json(read_document(path))


def read_document(path: Path) -> Any:
    """The JSON of a file; one that is too large is refused."""
    with open_plain(path) as file:
        return read_json(file, FILE_LIMIT_BYTES, path)
