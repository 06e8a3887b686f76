"""A quantity by step, in bounded memory.

Ranks report a sum and a count, so a curve's value is exact for any number and order of ranks. In a
run longer than the table, neighbouring cells are merged in pairs, as often as needed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

CELLS = 2**13
POINTS_LIMIT = 400
"""The most points of a curve."""
LARGEST = 1e300
"""Beyond this, sums and ranges of numbers may overflow."""


class CurvePoint(NamedTuple):
    """Some consecutive steps of a curve: their mean, lowest and highest value."""

    x: float
    mean: float
    low: float
    high: float


class Curve:
    """Sums and counts by step, for one quantity."""

    def __init__(self, cells: int = CELLS) -> None:
        self.last = 0
        """The largest step that was added."""
        self.first_bad: int | None = None
        """The first step whose value is not finite, or too large."""
        self._limit = cells
        self._stride = 1
        self._cells: dict[int, tuple[float, float]] = {}

    def add(self, step: int, total: float, weight: float) -> None:
        """Add what one rank measured in `step`; a value that is not finite is only noted."""
        if step > self.last:
            self.last = step
        limit = LARGEST if weight >= 1.0 else LARGEST * (weight or 1.0)
        if not -limit < total < limit or not weight < LARGEST:
            self.first_bad = step if self.first_bad is None else min(step, self.first_bad)
            return
        cells, cell = self._cells, step // self._stride
        before = cells.get(cell)
        if before is not None:
            cells[cell] = before[0] + total, before[1] + weight
            return
        cells[cell] = total, weight
        # Merge pairs of cells, which halves the resolution: sums and counts stay exact.
        while len(self._cells) > self._limit:
            old, self._cells = self._cells, {}
            self._stride *= 2
            for cell, sums in old.items():
                before = self._cells.get(cell // 2, (0.0, 0.0))
                self._cells[cell // 2] = before[0] + sums[0], before[1] + sums[1]

    def mean_at(self, step: int) -> float:
        """The mean of a step that was added, or of those merged with it."""
        total, weight = self._cells[step // self._stride]
        return total / weight

    def totals(self) -> tuple[float, float]:
        """The sum of all that was added, and of its weights."""
        sums = self._cells.values()
        return sum(total for total, _ in sums), sum(weight for _, weight in sums)

    def points(self, limit: int = POINTS_LIMIT) -> list[CurvePoint]:
        """The curve as at most `limit` points, which keep all lows and highs."""
        middle = (self._stride - 1) / 2
        found = [
            (cell * self._stride + middle, total, weight)
            for cell, (total, weight) in sorted(self._cells.items())
            if weight > 0 and math.isfinite(total / weight)
        ]
        per_point = max(1, math.ceil(len(found) / limit))
        points = []
        for begin in range(0, len(found), per_point):
            group = found[begin : begin + per_point]
            each = [total / weight for _, total, weight in group]
            mean = sum(total for _, total, _ in group) / sum(weight for *_, weight in group)
            step = group[0][0] if begin == 0 else group[-1][0]
            points.append(CurvePoint(step, mean, min(each), max(each)))
        return points
