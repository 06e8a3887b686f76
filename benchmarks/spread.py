"""Medians, quartiles and ratios: what repeated measurements come to.

Contestants are measured in turns, so number i of one and number i of another were taken within
moments of each other. Ratios are therefore taken pair by pair: what slowed the machine down for a
while slowed down both.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some numbers, and between which two numbers the middle half of them is."""

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
    """How many times as much mine is, pair by pair."""
    return spread([a / b for a, b in zip(mine, theirs, strict=True)])


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The time of each step: a step has ended when the last rank has ended it."""
    return [max(times) for times in zip(*ranks, strict=True)]


def best_of(seconds: Mapping[str, Sequence[float]], prefix: str) -> str:
    """The fastest contestant whose name begins so, or nothing."""
    names = [name for name in seconds if name.startswith(prefix)]
    return min(names, key=lambda name: statistics.median(seconds[name]), default="")


def rotated(names: Sequence[T], number: int) -> list[T]:
    """The order of a round: each contestant comes first once, and none always follows another."""
    cut = number % max(1, len(names))
    return [*names[cut:], *names[:cut]]


def rows_of(
    seconds: Mapping[str, Sequence[float]],
    *,
    floors: Sequence[str],
    rival: str,
    unit: float = 1e3,
) -> list[dict[str, Any]]:
    """One row a contestant, against those floors that were measured and the best `rival`..."""
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
