"""`paceline speedup`: speed-up and efficiency from two times of the same job."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from paceline.errors import UsageError, check_whole
from paceline.telemetry import count_text, share_text


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """The times of the same work on one worker, and on several."""

    before: float
    after: float
    workers: int

    @property
    def ratio(self) -> float:
        """How many times as fast the work is."""
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

        The inverse of Amdahl's law. None where it does not apply: one worker, or no loss.
        """
        if self.workers == 1 or self.efficiency >= 1:
            return None
        share = (1 / self.ratio - 1 / self.workers) / (1 - 1 / self.workers)
        return share if share <= 1 else None

    def __str__(self) -> str:
        text = f"{self.ratio:.2f}x with {count_text(self.workers, 'worker')}: "
        text += f"{share_text(self.efficiency)} efficiency, "
        if self.efficiency > 1:
            return text + "more than the ideal. Check that both times are of the same work."
        text += f"{share_text(self.lost)} of the ideal {self.workers}x is lost"
        if self.serial_share is None:
            return text + "."
        share = share_text(self.serial_share, 1)
        return text + f", as if {share} of the work could not be shared (Amdahl)."


def speedup(*, before: float, after: float, workers: int) -> SpeedUp:
    """Compare two times of the same work: on one worker, and on `workers`.

    >>> print(speedup(before=100, after=30, workers=4))
    3.33x with 4 workers: 83 % efficiency, 17 % of the ideal 4x is lost, as if 6.7 % of the work
    could not be shared (Amdahl).
    """
    check_whole("speedup(): workers", workers)
    for name, value in (("before", before), ("after", after)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1e-100 < value < 1e100:  # their ratio is a number too
            raise UsageError(
                f"{name}={value!r} was passed to speedup(), which is not a time.",
                advice="Pass seconds, or any other unit, the same for both; more than 0.",
            )
    return SpeedUp(before=float(before), after=float(after), workers=workers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the time of a job on one worker with its time on several: how many times as fast, "
        "and what share of the ideal that is. `paceline scale` finds where the rest is lost."
    )
    parser.add_argument("before", type=float, help="the time on one worker, in any unit")
    parser.add_argument("after", type=float, help="the time on several, in the same unit")
    parser.add_argument("--workers", metavar="N", type=int, required=True, help="how many")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the comparison."""
    found = speedup(before=args.before, after=args.after, workers=args.workers)
    if args.json:
        numbers = {name: getattr(found, name) for name in ("ratio", "efficiency", "lost")}
        print(json.dumps({**numbers, "workers": found.workers, "serial_share": found.serial_share}))
    else:
        print(found)
    return 0
