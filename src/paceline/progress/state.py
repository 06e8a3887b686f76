"""What is known of a run so far: plain data that every way of drawing reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_S = 20.0
"""Speed and time left come from so much of the recent past."""
_MOST_MARKS = 256


@dataclass(slots=True)
class EpochRow:
    """One line of the table of epochs."""

    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    samples: int | None = None


@dataclass(slots=True, kw_only=True)
class ProgressState:
    """A run as it stands. What is None is not known."""

    name: str = ""
    workers: int = 1
    epochs: int | None = None
    steps: int | None = None
    """In all, those before a resume included."""
    global_batch: int | None = None
    first_step: int = 0
    """How many steps were done before this process began."""
    lines: tuple[str, ...] = ()
    """What else to say at the start, such as the policy."""
    begin_s: float = 0.0
    now_s: float = 0.0
    step: int = 0
    epoch: int = 0
    samples: int = 0
    """Since this process began."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows: list[EpochRow] = field(default_factory=list)
    marks: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_MOST_MARKS))
    """Times with the steps and samples done by then, the oldest about `WINDOW_S` ago."""

    def mark(self, now_s: float) -> None:
        """Remember how far the run is now; forget what lies outside the window."""
        self.now_s = now_s
        self.marks.append((now_s, self.step, self.samples))
        while len(self.marks) > 2 and now_s - self.marks[1][0] >= WINDOW_S:
            self.marks.popleft()

    @property
    def elapsed_s(self) -> float:
        return self.now_s - self.begin_s

    @property
    def samples_per_s(self) -> float | None:
        """None until there is something to divide by."""
        return self._rate(2)

    @property
    def time_left_s(self) -> float | None:
        """None while unknown: no total, or no speed yet."""
        rate = self._rate(1)
        return None if self.steps is None or not rate else max(self.steps - self.step, 0) / rate

    def row(self, epoch: int) -> EpochRow:
        """The row of this epoch, made if it is new."""
        found = next((row for row in reversed(self.rows) if row.epoch == epoch), None)
        if found is None:
            found = EpochRow(epoch)
            self.rows.append(found)
        return found

    def _rate(self, index: int) -> float | None:
        if len(self.marks) < 2:
            return None
        first, last = self.marks[0], self.marks[-1]
        elapsed_s = last[0] - first[0]
        return (last[index] - first[index]) / elapsed_s if elapsed_s > 0 else None
