"""What was measured in every step, in a table that never grows beyond its size.

Ranks report a sum and a count, so a cell's value is exact however many ranks add to it and in
whatever order. A run longer than the table makes two neighbouring cells one, as often as needed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

CELLS = 2**15
LARGEST = 1e300
"""Beyond this, sums and ranges of numbers are infinite."""


@dataclass(frozen=True, slots=True)
class Point:
    """Some neighbouring steps of a curve: their mean, lowest and highest value."""

    step: float
    mean: float
    low: float
    high: float


class Column:
    """Sums and counts by step, for one quantity."""

    def __init__(self, cells: int = CELLS) -> None:
        self.stride = 1
        self.last = 0
        """The largest step that was added."""
        self.first_bad: int | None = None
        """The first step whose value is not a finite number, or next to infinite."""
        self._cells = cells
        self._sums = array("d", bytes(8 * cells))
        self._counts = array("d", bytes(8 * cells))

    def add(self, step: int, total: float, weight: float) -> None:
        """Add what one rank measured in `step`; values that are no numbers are only remembered."""
        if step < 0 or step > 2**60:
            return
        self.last = max(self.last, step)
        value = total / weight if weight else total
        if not (max(abs(total), abs(value)) < LARGEST and math.isfinite(weight)):
            if self.first_bad is None or step < self.first_bad:
                self.first_bad = step
            return
        while step >= self._cells * self.stride:
            self._fold()
        cell = step // self.stride
        self._sums[cell] += total
        self._counts[cell] += weight

    def _fold(self) -> None:
        half = self._cells // 2
        for values in (self._sums, self._counts):
            folded = array("d", map(sum, zip(values[::2], values[1::2], strict=True)))
            values[:half] = folded
            values[half:] = array("d", bytes(8 * half))
        self.stride *= 2

    def __bool__(self) -> bool:
        return any(self._counts)

    def values(self) -> Iterable[tuple[float, float, float]]:
        """Step, sum and count of every cell that has any."""
        middle = (self.stride - 1) / 2
        for cell, weight in enumerate(self._counts):
            if weight > 0:
                yield cell * self.stride + middle, self._sums[cell], weight

    def points(self, limit: int) -> list[Point]:
        """The curve as at most `limit` points; no low or high is lost on the way."""
        found = list(self.values())
        per_point = max(1, math.ceil(len(found) / limit))
        points = []
        for begin in range(0, len(found), per_point):
            group = found[begin : begin + per_point]
            each = [total / weight for _, total, weight in group]
            mean = sum(total for _, total, _ in group) / sum(weight for *_, weight in group)
            step = group[0][0] if begin == 0 else group[-1][0]
            points.append(Point(step, mean, min(each), max(each)))
        return points
