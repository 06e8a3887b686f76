"""How `paceline ckpt` writes to the terminal: tables, sizes, strict JSON."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 40


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)"
    )


def print_json(value: Any) -> None:
    print(json.dumps(_strict(value), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value


def print_values(title: str, values: Mapping[str, Any], limit: int) -> None:
    if not values:
        return
    print(title)
    rows = [[name, json.dumps(value)[:80]] for name, value in list(values.items())[:limit]]
    print_table(rows)
    print_rest(len(values) - limit)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print(f"  {'  '.join(cells)}".rstrip())


def print_rest(count: int) -> None:
    if count > 0:
        print(f"  and {count:,} more")


def printable(text: str) -> str:
    """Names come from files that others may have made: no control characters for the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size_of(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def date_of(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return "at no known time"
