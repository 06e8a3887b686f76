"""The file format of a recorded step: the fields of `stages`, written as strict JSON.

The dataclasses are the schema. `from_json` compares a document with them and names the first thing
that is wrong; keys it does not know are ignored, so that later versions may add some. Numbers that
JSON has no word for are the strings "nan", "inf" and "-inf". Starts without torch.
"""

from __future__ import annotations

import json
import reprlib
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.comm.codec import FLOAT_BY_NAME, parse_json, plain_json
from paceline.errors import WireError
from paceline.observe.run_folder import make_private, open_plain, replace_file
from paceline.record.stages import Trace

SCHEMA = 1
FILE_LIMIT_BYTES = 16 * 2**20
LARGEST = 2**63

_hints = cache(get_type_hints)
_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", list: "list"}
_WORDS[Mapping] = "object"


def to_json(trace: Trace) -> dict[str, Any]:
    """The document that `from_json` reads."""
    document: dict[str, Any] = plain_json(asdict(trace))
    return document


def from_json(document: Any) -> Trace:
    """The trace that a document holds; a WireError names what is wrong with it."""
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise WireError(
            f"The recorded step has schema {found!r}; this version of paceline reads {SCHEMA}.",
            advice="Read it with the version that wrote it.",
        )
    trace: Trace = read_value(Trace, document, "step")
    return trace


def write(trace: Trace, path: Path) -> None:
    """Write the file as a whole: a reader sees the old one or the new one, nobody else any."""
    make_private(path.parent)
    replace_file(path, [json.dumps(to_json(trace), allow_nan=False, indent=1), "\n"])


def read(path: Path) -> Trace:
    """The step that a file holds."""
    return from_json(read_document(path))


def read_document(path: Path) -> Any:
    """The JSON of a whole file, none of which is read if it is too large."""
    with open_plain(path) as file:
        data = file.read(FILE_LIMIT_BYTES + 1)
    if len(data) > FILE_LIMIT_BYTES:
        raise WireError(f"{path} is larger than {FILE_LIMIT_BYTES // 2**20} MiB.")
    return parse_json(data, path, WireError)


def read_value(hint: Any, value: Any, where: str) -> Any:
    """A value as a type hint has it, dataclasses and all; a WireError says where it is not."""
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        inner = next(each for each in get_args(hint) if each is not types.NoneType)
        return None if value is None else read_value(inner, value, where)
    if is_dataclass(hint):
        return _read_fields(hint, value, where)
    if kind is Literal and value in get_args(hint):
        return value
    if kind is list and isinstance(value, list):
        inner = get_args(hint)[0]
        return [read_value(inner, each, f"{where}[{i}]") for i, each in enumerate(value)]
    if kind is Mapping and isinstance(value, dict):
        inner = get_args(hint)[1]
        return {key: read_value(inner, each, f"{where}.{key}") for key, each in value.items()}
    if type(value) is int and abs(value) > LARGEST:
        raise WireError(f"{where} is a number that no counter reaches.")
    if kind is float and isinstance(value, str) and value in FLOAT_BY_NAME:
        return FLOAT_BY_NAME[value]
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is kind and kind is not list:
        return value
    expected = _WORDS.get(kind) or " | ".join(map(json.dumps, get_args(hint)))
    raise WireError(f"{where} is {reprlib.repr(value)}, but should be: {expected}.")


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise WireError(f"{where} is not an object but {reprlib.repr(value)}.")
    for field in fields(kind):
        is_required = field.default is MISSING is field.default_factory
        if is_required and field.name not in value:
            raise WireError(f"{where} has no {field.name!r}.")
    hints = _hints(kind)
    known = hints.keys() & value.keys()
    return kind(**{name: read_value(hints[name], value[name], f"{where}.{name}") for name in known})
