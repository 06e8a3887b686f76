"""Numbers formatted for people: counts, bytes, times, shares, lists, tables; always in ASCII."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=str)

SHARES = {"accuracy", "acc", "top1", "top5", "precision", "recall", "f1"}
"""Metrics that are between 0 and 1 and read best as percent."""


def count_text(number: int, thing: str) -> str:
    """`1 row`, `1,000 rows`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def name_steps(first: int, last: int) -> str:
    """`step 4 is`, `steps 4 to 7 are`."""
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def bytes_text(number: float) -> str:
    """`400 B`, `4.0 kB`, `97.7 MB`: powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 999.95:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def seconds_text(seconds: float) -> str:
    """`12 us`, `0.31 ms`, `1.25 s`, `17 s`, `3:05`, `2:00:09` or `4 d 03:12`; `?` if unknown."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if minutes == 0:
        return f"{s} s"
    if hours == 0:
        return f"{m}:{s:02}"
    return f"{hours}:{m:02}:{s:02}" if hours < 24 else f"{hours // 24} d {hours % 24:02}:{m:02}"


def share_text(share: float, digits: int = 0) -> str:
    """`83 %`."""
    return f"{share * 100:.{digits}f} %"


def percentages(parts: Mapping[Name, float]) -> dict[Name, int]:
    """Whole percents of the sum that add up to 100: the largest remainders are rounded up."""
    total = sum(parts.values())
    exact = {name: 100 * part / total if total > 0 else 0.0 for name, part in parts.items()}
    found = {name: int(share) for name, share in exact.items()}
    left = 100 - sum(found.values()) if total > 0 else 0
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[:left]:
        found[name] += 1
    return found


def shape_text(shape: Sequence[int]) -> str:
    """`1,000 x 10`; `1 number` for a scalar."""
    return " x ".join(f"{extent:,}" for extent in shape) or "1 number"


def list_text(words: Sequence[object], last: str = "and") -> str:
    """`50, 30 and 20`."""
    *most, end = [str(word) for word in words] or [""]
    return f"{', '.join(most)} {last} {end}" if most else end


def table_lines(rows: Sequence[Sequence[str]], align: str = "", gap: str = "  ") -> list[str]:
    """Cells in columns; `align` has `<` or `>` for each, the last one for all further columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = (align or "<").ljust(len(widths), (align or "<")[-1])
    return [
        gap.join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()
        for cells in (zip(row, sides, widths, strict=True) for row in rows)
    ]


def rate_text(per_second: float) -> str:
    """A rate with three significant digits: `7.42`, `74.2`, `742`, `7,420`."""
    if not math.isfinite(per_second) or per_second < 0:
        return "?"
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def metric_text(name: str, value: float) -> str:
    """A loss with four decimals, an accuracy in percent, extreme numbers as `1.23e-05`."""
    if not math.isfinite(value):
        return str(value)
    if 0 <= value <= 1 and name.lower().split(" ")[-1].removeprefix("ema_") in SHARES:
        return f"{value:.1%}"
    if value != 0 and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.1f}"


def printable(text: str, keep: str = "") -> str:
    """The text with escapes for what would move a cursor or change a colour."""
    return "".join(
        letter
        if letter.isprintable() or letter in keep
        else letter.encode("unicode_escape").decode()
        for letter in text
    )
