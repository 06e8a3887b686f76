"""Numbers in words: counts, sizes, times, shapes."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, thing: str) -> str:
    """`1 row`, `1,000 rows`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def count_bytes(number: int) -> str:
    """`400 B`, `4.0 kB`, `97.7 MB`: powers of ten."""
    size = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95 or unit == "GB":
            return f"{size:.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    raise AssertionError("the last unit returns")


def count_time(seconds: float) -> str:
    """`12 us`, `0.31 ms`, `1.2 s`."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:,.1f} s"


def shape_words(shape: Sequence[int]) -> str:
    """`1,000 x 10`; a single number has no shape."""
    return " x ".join(f"{extent:,}" for extent in shape) or "1 number"


def join_words(words: Sequence[str], last: str = "and") -> str:
    """`50, 30 and 20`."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
