"""`paceline.speedup`: how much faster, how close to the ideal, and how much is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """The same work, before on one worker and after on several."""

    before: float
    after: float
    workers: int

    @property
    def ratio(self) -> float:
        """How many times as fast."""
        return self.before / self.after

    @property
    def efficiency(self) -> float:
        """The share of the ideal that was reached; the ideal is n times as fast with n workers."""
        return self.ratio / self.workers

    @property
    def lost(self) -> float:
        """The share of the ideal that was not reached; 0 if it was exceeded."""
        return max(0.0, 1.0 - self.efficiency)

    @property
    def serial_share(self) -> float | None:
        """The share of the work that, if it could not be shared, would explain the loss.

        Amdahl's law turned round. None where it explains nothing: one worker, or no loss.
        """
        if self.workers == 1 or self.efficiency >= 1:
            return None
        share = (1 / self.ratio - 1 / self.workers) / (1 - 1 / self.workers)
        return share if share <= 1 else None

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        text = f"{self.ratio:.2f}x with {workers}: {self.efficiency:.0%} efficiency, ".replace(
            "%", " %"
        )
        if self.efficiency > 1:
            return text + "more than the ideal. Check that both times are of the same work."
        if self.efficiency == 1:
            return text + "the ideal."
        text += f"{self.lost:.0%} of the ideal {self.workers}x is lost".replace("%", " %")
        if self.ratio < 1:
            return text + ". It is slower than before."
        if self.serial_share is None:
            return text + "."
        share = f"{self.serial_share:.1%}".replace("%", " %")
        return text + f", as if {share} of the work could not be shared (Amdahl)."


def speedup(*, before: float, after: float, workers: int) -> SpeedUp:
    """Compare two times of the same work: on one worker, and on `workers`.

    >>> print(speedup(before=100, after=30, workers=4))
    3.33x with 4 workers: 83 % efficiency, 17 % of the ideal 4x is lost, as if 6.7 % of the work
    could not be shared (Amdahl).
    """
    for name, value in (("before", before), ("after", after)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise UsageError(
                f"{name}={value!r} was passed to speedup(), which is no time.",
                advice="Pass seconds, or any other unit, the same for both; more than 0.",
            )
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise UsageError(
            f"workers={workers!r} was passed to speedup().",
            advice="Pass the number of workers that took `after`, a whole number from 1 up.",
        )
    result = SpeedUp(before=float(before), after=float(after), workers=workers)
    if not 0 < result.ratio < math.inf:
        raise UsageError(
            f"before={before!r} and after={after!r} cannot be compared: they are too far apart.",
            advice="Pass both times in the same unit.",
        )
    return result
