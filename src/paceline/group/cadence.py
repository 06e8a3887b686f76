"""When the workers next do something together besides summing gradients.

Note the rule that lets features compose: whether and when a collective happens is a function of the
step's number and of what the current generation has agreed on, never of one worker's history, clock
or data. A worker that joins later has no history, and would otherwise wait in one collective while
the others wait in another.
"""

from __future__ import annotations

from paceline.group.membership import Membership


class Cadence:
    """The number of the step in which something is due, the same on every worker.

        generation begins --(its first step + `first`)--> due --(agree)--> due again --> ...

    Invariant: only the number of the generation's first step and numbers that all workers have
    exchanged go into it. A new generation begins it anew on everybody, newcomer or not.
    """

    def __init__(self, membership: Membership, first: int = 0) -> None:
        """Due in the generation's first step, or `first` steps later."""
        self._first = first
        self.next_step = 0
        """A plain number, because every step compares with it; 0 until the generation's first."""
        self._has_begun = False
        membership.follow(self.on_generation)

    def on_generation(self) -> None:
        """The first step that is asked about from now on begins the count."""
        self.next_step, self._has_begun = 0, False

    def is_due(self, step: int) -> bool:
        """Asked on every worker, in every step that is not before `next_step`."""
        if not self._has_begun:
            self.next_step, self._has_begun = step + self._first, True
        return step >= self.next_step

    def agree(self, step: int, period: int) -> None:
        """It was done in `step`; `period` is the same on every worker."""
        self.next_step = step + period
