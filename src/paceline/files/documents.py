"""JSON from untrusted files: bounded, checked, and converted to the types of a dataclass.

    with open_plain(path) as file:
        document = read_json(file, 2**20, path)            # WireError: too large, or malformed
    info = read_value(RunInfo, document, "run.json")       # WireError: names what is wrong

`parse_json` takes a line of a file, or bytes in memory. Every reader of a file that a run, a
checkpoint or a stranger wrote uses these functions: what they return has integers of limited size,
finite floats, text that can be printed and written, names of limited length, and nesting that
recursion can handle. Anything beyond raises WireError, or the `error` asked for, before memory is
allocated; the caller continues with an older file, or shows "?". A writer of larger documents
passes `JsonLimits` of its own. Starts without torch.
"""

from __future__ import annotations

import json
import math
import reprlib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from io import BufferedIOBase
from typing import IO, Any, Literal, Union, get_args, get_origin, get_type_hints

from paceline.errors import PacelineError, WireError

FLOAT_BY_NAME = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""Floats that JSON cannot represent, by their `str`."""
LARGEST = 2**64
PLAIN_BYTES = 1000
SHALLOW = 8
"""The most levels of lists and objects in a line that `parse_lines` reads."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}\n"))
_AS_ZEROS = bytes.maketrans(b"123456789E", b"000000000e")
_LONG_NUMBERS = (b"0" * 21, b"e000", b"e+000")
"""With all digits replaced by zeros: too long an integer, or a float that may be infinite."""

_hints = cache(get_type_hints)
_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", list: "list"}
_WORDS[Mapping] = _WORDS[dict] = "object"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLimits:
    """The limits of a document."""

    values: int = 2**20
    """In all lists and objects together. Commas in strings count too."""
    depth: int = 64
    text: int = 2**20
    """Characters of a string that is a value."""
    name: int = 1000
    """Characters of a name in an object."""
    digits: int = len(str(LARGEST))
    """Of an integer."""
    surrogates: bool = False
    """Whether a string may have a lone surrogate, which cannot be encoded as UTF-8."""


LIMITS = JsonLimits()


def read_json(
    file: IO[bytes] | BufferedIOBase,
    limit_bytes: int,
    origin: object,
    error: type[PacelineError] = WireError,
) -> Any:
    """Parse the rest of an open file, which may have at most `limit_bytes`."""
    data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise error(
            f"{origin} is larger than {limit_bytes / 2**20:g} MiB, the most that is read.",
            advice="It is damaged, or it was not written by paceline.",
        )
    return parse_json(data, origin, error)


def parse_json(
    data: bytes, origin: object, error: type[PacelineError] = WireError, limits: JsonLimits = LIMITS
) -> Any:
    """Parse the JSON of `origin`, within limits; infinities and NaN are refused."""
    try:
        # Most documents are short lines of events: one cheap test of bytes replaces all checks of
        # values.
        if _is_plain(data, limits):
            return _PLAIN_DECODER.decode(data.decode("ascii"))
        # Before parsing, which would allocate an object for each value.
        if count_values(data) > limits.values:
            raise ValueError(f"it has more than {limits.values:,} values")
        text = data.decode("utf-8", "surrogatepass" if limits.surrogates else "strict")
        value = _decoder(limits.digits).decode(text)
        _check(value, limits, 0)
    except (ValueError, RecursionError) as problem:
        raise error(f"{origin} is not valid JSON: {str(problem)[:200]}.") from None
    return value


def parse_lines(data: bytes) -> list[Any] | None:
    """Parse many short lines in one call; None where the lines must be parsed one by one.

    Removing brackets pair by pair, until only newlines are left, proves that every line is complete
    and not deep. Of a repeated name the last value counts: checking for that costs most of the
    time.
    """
    lines, shape = data.count(b"\n"), data.translate(None, _NO_BRACKETS)
    for _ in range(SHALLOW):
        shape = shape.replace(b"[]", b"").replace(b"{}", b"")
    is_short = max(map(len, data.split(b"\n"))) <= PLAIN_BYTES
    if len(shape) != lines or not is_short or not _has_plain_values(data):
        return None
    try:
        text = data.decode("ascii").rstrip("\n").replace("\n", ",")
        found: list[Any] = _LINES_DECODER.decode(f"[{text}]")
    except ValueError:
        return None
    return found if len(found) == lines else None


def count_values(data: bytes) -> int:
    """An upper bound of the number of values in a document, found without parsing it."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


@cache
def _decoder(digits: int) -> json.JSONDecoder:
    def parse_integer(text: str) -> int:
        if len(text.lstrip("-")) > digits:
            raise ValueError(f"the integer {text[:20]}… has more than {digits} digits")
        return int(text)

    return json.JSONDecoder(
        parse_int=parse_integer,
        parse_float=_finite,
        parse_constant=_finite,
        object_pairs_hook=_without_repeats,
    )


def _is_plain(data: bytes, limits: JsonLimits) -> bool:
    """Whether a short document is within the limits for certain, without checking each value.

    This fast path is for the lines of event files, of which there are millions.
    """
    return (
        len(data) <= PLAIN_BYTES <= min(limits.name, limits.text, limits.values)
        and data.count(b"[") + data.count(b"{") <= limits.depth
        and _has_plain_values(data)
    )


def _has_plain_values(data: bytes) -> bool:
    """Whether all strings are plain ASCII, and no number is too long."""
    if not data.isascii() or b"\\" in data:
        return False
    zeros = data.translate(_AS_ZEROS)
    return not any(long in zeros for long in _LONG_NUMBERS)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a number in JSON")
    return number


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _check(value: Any, limits: JsonLimits, depth: int) -> None:
    """Check every string and container; ValueError about the first one beyond the limits."""
    if isinstance(value, str):
        _check_text(value, limits.text, limits)
    if not isinstance(value, list | dict):
        return
    if depth >= limits.depth:
        raise ValueError(f"it is nested deeper than {limits.depth} levels")
    if isinstance(value, dict):
        for name in value:
            if len(name) > limits.name or not name.isascii():
                _check_text(name, limits.name, limits)
        value = value.values()
    for each in value:
        kind = type(each)
        if kind is list or kind is dict:
            _check(each, limits, depth + 1)
        elif kind is str and (len(each) > limits.text or not each.isascii()):
            _check_text(each, limits.text, limits)


def _check_text(text: str, most: int, limits: JsonLimits) -> None:
    if len(text) > most:
        raise ValueError(f"{text[:40]!r}… has {len(text):,} characters of at most {most:,}")
    if not limits.surrogates:
        text.encode()  # a ValueError where it has a lone surrogate


_PLAIN_DECODER = json.JSONDecoder(parse_constant=_finite, object_pairs_hook=_without_repeats)
_LINES_DECODER = json.JSONDecoder(parse_constant=_finite)


def read_value(hint: Any, value: Any, where: str) -> Any:
    """Convert a value to a type hint, including dataclasses; a WireError names what does not fit.

    Names that a dataclass lacks are ignored, so that later versions may add some.
    """
    if hint is Any:
        return value
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
    if kind in (Mapping, dict) and isinstance(value, dict):
        inner = get_args(hint)[1]
        return {key: read_value(inner, each, f"{where}.{key}") for key, each in value.items()}
    if type(value) is int and abs(value) >= LARGEST:
        raise WireError(f"{where} is a number beyond 2**64.")
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


def check_schema(document: Any, schema: int, origin: object) -> None:
    """Refuse a document that is not of this version of its format."""
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise WireError(
            f"{origin} has schema {found!r}; this version of paceline reads {schema}.",
            advice="Read it with the version that wrote it.",
        )


def plain_json(value: Any) -> Any:
    """The value with strings in place of nan and inf, which strict JSON lacks.

    A lone surrogate, of which UTF-8 has none, is escaped: Python has one in file names that are not
    UTF-8, and so in the messages of errors about them.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, str):
        is_plain = value.isascii()
        return value if is_plain else value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {plain_json(str(key)): plain_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value]
    return value
