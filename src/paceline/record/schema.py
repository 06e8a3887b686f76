"""The file format of a recorded step: the fields of `stages`, written as strict JSON.

The dataclasses are the schema. `validate` compares a document with them and names the first thing
that is wrong; keys it does not know are ignored, so that later versions may add some. Numbers that
JSON has no word for are the strings "nan", "inf" and "-inf". Starts without torch.
"""

from __future__ import annotations

import json
import math
import os
import stat
import types
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from paceline.errors import WireError
from paceline.record.stages import Trace

SCHEMA = 1
FILE_LIMIT_BYTES = 16 * 2**20

T = TypeVar("T")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_json(trace: Trace) -> dict[str, Any]:
    """The document that `from_json` reads."""
    document: dict[str, Any] = _plain(asdict(trace))
    return document


def from_json(document: Any) -> Trace:
    """The trace that a document holds; a WireError names what is wrong with it."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else None
        raise WireError(
            f"The recorded step has schema {found!r}; this version of paceline reads {SCHEMA}.",
            advice="Read it with the version that wrote it.",
        )
    trace: Trace = _read(Trace, document, "step")
    return trace


def read_as(kind: type[T], value: Any) -> T:
    """An object of one of the dataclasses from what `asdict` made of it."""
    made: T = _read(kind, value, kind.__name__)
    return made


def validate(document: Any) -> None:
    """Raise a WireError unless the document is a recorded step of this schema."""
    from_json(document)


def write(trace: Trace, path: Path) -> None:
    """Write the file as a whole: a reader sees the old one or the new one, nobody else any."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    text = json.dumps(to_json(trace), allow_nan=False, indent=1)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(temporary, path)


def read(path: Path) -> Trace:
    """The step that a file holds."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        facts = os.fstat(file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > FILE_LIMIT_BYTES:
            raise WireError(f"{path} is no file of a recorded step: too large, or not a file.")
        data = os.pread(file, FILE_LIMIT_BYTES, 0)
    finally:
        os.close(file)
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{path} is not JSON: {error}.") from error
    return from_json(document)


def describe() -> Iterator[tuple[str, str]]:
    """Every field by its path, with its type: what must not change by accident."""
    yield from _describe(Trace, "")


def _describe(kind: type, prefix: str) -> Iterator[tuple[str, str]]:
    for name, hint in _hints(kind).items():
        inner, is_list = _inside(hint)
        if isinstance(inner, type) and is_dataclass(inner):
            path = f"{prefix}{name}{'[]' if is_list else ''}"
            optional = " or null" if _is_optional(hint) else ""
            yield path, f"object{optional}"
            yield from _describe(inner, f"{path}.")
        else:
            yield f"{prefix}{name}", _say(hint)


def _inside(hint: Any) -> tuple[Any, bool]:
    """What an optional or a list is of, and whether it is a list."""
    if _is_optional(hint):
        hint = next(each for each in get_args(hint) if each is not types.NoneType)
    return (get_args(hint)[0], True) if get_origin(hint) is list else (hint, False)


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _say(hint: Any) -> str:
    if _is_optional(hint):
        return f"{_say(next(a for a in get_args(hint) if a is not types.NoneType))} or null"
    if get_origin(hint) is list:
        return f"list of {_say(get_args(hint)[0])}"
    if get_origin(hint) is Literal:
        return " | ".join(map(json.dumps, get_args(hint)))
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[hint]


def _read(hint: Any, value: Any, where: str) -> Any:
    if _is_optional(hint):
        inner = next(each for each in get_args(hint) if each is not types.NoneType)
        return None if value is None else _read(inner, value, where)
    if get_origin(hint) is list:
        if not isinstance(value, list):
            raise _mistake(where, hint, value)
        inner = get_args(hint)[0]
        return [_read(inner, each, f"{where}[{i}]") for i, each in enumerate(value)]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise _mistake(where, hint, value)
        return value
    if is_dataclass(hint):
        return _read_fields(hint, value, where)
    if hint is float:
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if type(value) in (int, float):
            return float(value)
        raise _mistake(where, hint, value)
    if type(value) is not hint:
        raise _mistake(where, hint, value)
    return value


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise WireError(f"{where} is not an object but {_short(value)}.")
    hints = _hints(kind)
    required = [f.name for f in fields(kind) if f.default is MISSING is f.default_factory]
    for name in required:
        if name not in value:
            raise WireError(f"{where} has no {name!r}.")
    known = {
        name: _read(hints[name], value[name], f"{where}.{name}") for name in hints & value.keys()
    }
    return kind(**known)


def _mistake(where: str, hint: Any, value: Any) -> WireError:
    expected = "list" if get_origin(hint) is list else _say(hint)
    return WireError(f"{where} is {_short(value)}, but should be: {expected}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value
