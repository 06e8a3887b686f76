"""Medians, quartiles and ratios of repeated measurements.

Contestants are measured alternately, so measurements i of two contestants were taken shortly after
each other. Ratios are therefore taken pair by pair: a slow moment of the machine affects both.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some numbers, and their quartiles."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise ValueError("there are no values to summarise")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, median, high)


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ratio of `mine` to the other, pair by pair."""
    return spread([a / b for a, b in zip(mine, theirs, strict=True)])


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The time of each step: a step ends when the last rank ends it."""
    return [max(times) for times in zip(*ranks, strict=True)]


def best_of(seconds: Mapping[str, Sequence[float]], prefix: str) -> str:
    """The fastest contestant with this name prefix, or None."""
    names = [name for name in seconds if name.startswith(prefix)]
    return min(names, key=lambda name: statistics.median(seconds[name]), default="")


def rotated(names: Sequence[T], number: int) -> list[T]:
    """The order of a round: each contestant is first once, and none always follows the same one."""
    cut = number % max(1, len(names))
    return [*names[cut:], *names[:cut]]


def rows_of(
    seconds: Mapping[str, Sequence[float]],
    *,
    floors: Sequence[str],
    rival: str,
    unit: float = 1e3,
) -> list[dict[str, Any]]:
    """One row per contestant, against those floors that were measured and the best `rival`..."""
    best = best_of(seconds, rival)
    rows = []
    for name, values in seconds.items():
        time = spread(values)
        row: dict[str, Any] = {
            "contestant": name + (f" (best {rival})" if name == best else ""),
            "ms": round(time.median * unit, 3),
            "quartiles": f"{time.low * unit:.2f} to {time.high * unit:.2f}",
        }
        if best:
            to_best = ratio(values, seconds[best])
            row[f"/ best {rival}"] = round(to_best.median, 3)
            row["its quartiles"] = f"{to_best.low:.2f} to {to_best.high:.2f}"
        for floor in floors:
            if floor in seconds:
                row[f"/ {floor}"] = round(ratio(values, seconds[floor]).median, 3)
        rows.append(row)
    return rows
