"""What the workers of a run tell each other between two steps, each of them once.

A worker may die in the middle, and those who are left may have come unequally far. So results are
kept until the next step: whoever missed one gets it from those who have it, and nothing is done
twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.group import Membership, exchange
from paceline.run.metrics import ExactSums, add_sums
from paceline.run.recovery import NoRecovery, Recovery


class Exchanges:
    """The results since the last step, in their order, and how many this worker has asked for."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.recovery: Recovery = NoRecovery()
        self.results: list[list[Any]] = []
        """What all workers have said, the same on each of them."""
        self.asked = 0

    def begin_step(self) -> None:
        """A step is over: what was said before it is of no use any more."""
        self.results, self.asked = [], 0

    def exchange(self, compute: Callable[[], Any], what: str) -> list[Any]:
        """The values of all workers, each of which calls this between two steps.

        `compute` gives this one's. Where a worker dies meanwhile it is called again, unless one of
        the others has all of them.
        """
        if self.recovery.is_apart:
            return [compute()]
        return self.recovery.attempt(partial(self._next, compute, what))

    def add_up(self, compute: Callable[[], ExactSums], what: str) -> ExactSums:
        """The sums of all workers, exactly: equal to the last bit however many there are."""
        everyone = self.exchange(compute, what)
        if len(everyone) == 1:
            return dict(everyone[0])
        total: ExactSums = {}
        for sums in everyone:
            add_sums(total, sums)
        return total

    def _next(self, compute: Callable[[], Any], what: str) -> list[Any]:
        members = self._membership
        if self.asked == len(self.results):
            everyone = [compute()]
            if members.size > 1:
                everyone = exchange(members.group, everyone[0], members.word_device, what)
            self.results.append(everyone)
        self.asked += 1
        return self.results[self.asked - 1]
