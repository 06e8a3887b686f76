"""Untrusted values made safe for a page: printable, short, few, and with valid numbers.

A run folder is not trusted. All that is kept of it, and the document as a whole, passes through
`bounded`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Invisible characters that reorder or end text, with which a file could make a page misleading.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
    "\ufeff\ufffe\uffff]"
)
TEXT_LIMIT = 600
ITEMS_LIMIT = 2000
NAMES_LIMIT = 64
DEPTH_LIMIT = 12
LARGEST_INTEGER = 2**53
"""The largest integer that a browser represents exactly."""
LARGEST_AMOUNT = 1e15
"""Larger times, counts and sizes are invalid; sums of smaller ones stay finite."""


def text(value: object, limit: int = TEXT_LIMIT) -> str:
    """A value as printable text of limited length."""
    shown = _UNSEEN.sub("\ufffd", str(value)[: limit + 1])
    return shown if len(shown) <= limit else shown[:limit] + "…"


def bounded(value: Any, depth: int = DEPTH_LIMIT) -> Any:
    """The value within limits; what is too long is cut off at the end."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bool | float) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) <= LARGEST_INTEGER else None
    if isinstance(value, Mapping) and depth:
        items = list(value.items())[:NAMES_LIMIT]
        return {text(key, 80): bounded(each, depth - 1) for key, each in items}
    if isinstance(value, list | tuple) and depth:
        return [bounded(each, depth - 1) for each in value[:ITEMS_LIMIT]]
    return None


def number(value: Any) -> float | None:
    """A number from a file, perhaps infinite; None for anything else."""
    try:
        return float(value) if type(value) in (int, float) else None
    except OverflowError:
        return None


def amount(value: Any) -> float:
    """A count, a time or a size, at least 0; 0 for anything else."""
    if type(value) is float or type(value) is int:
        return float(value) if 0 <= value < LARGEST_AMOUNT else 0.0
    return 0.0


def whole(value: Any, least: int = 0) -> int | None:
    """An integer from `least` up; None for anything else."""
    return value if type(value) is int and least <= value <= LARGEST_INTEGER else None
