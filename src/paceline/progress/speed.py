"""How fast a run is going now, and how long it will take.

Both come from the recent past, so that a slow first step or an evaluation an hour ago does not
count for ever. Only what is drawn is remembered: a step costs nothing here.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 20.0
_MOST_MARKS = 256


class Speed:
    """Marks of (time, steps, samples), the oldest about `WINDOW_S` ago."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=_MOST_MARKS)

    def mark(self, now_s: float, steps: int, samples: int) -> None:
        """Remember how far the run is; forget what lies outside the window."""
        self._marks.append((now_s, steps, samples))
        while len(self._marks) > 2 and now_s - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()

    @property
    def samples_per_s(self) -> float | None:
        """None until there is something to divide by."""
        return self._rate(2)

    @property
    def steps_per_s(self) -> float | None:
        return self._rate(1)

    def time_left_s(self, steps_left: int | None) -> float | None:
        """None while unknown: no total, or no speed yet."""
        rate = self.steps_per_s
        return None if steps_left is None or not rate else max(steps_left, 0) / rate

    def _rate(self, index: int) -> float | None:
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        elapsed_s = last[0] - first[0]
        return (last[index] - first[index]) / elapsed_s if elapsed_s > 0 else None
