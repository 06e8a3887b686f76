"""Who takes part now: a generation and its process group; and when its members do something.

Code that needs the group asks `Membership` each time and keeps nothing, so that a training can
continue on another group, of the same ranks or of fewer, between two steps.

Note the rule that lets features compose: whether and when a collective happens is a function of the
step's number and of what the current generation has agreed on, never of one worker's history, clock
or data. A worker that joins later has no history, and would otherwise wait in one collective while
the others wait in another. So what is done now and then has a `Cadence`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any


class NoGroup:
    """Stands for a group where there is none: alone, and without rank 0's duties."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Membership:
    """The only holder of a process group.

        generation 0, group --(leave)--> none --(move_on)--> generation 1, another group --> ...

    Invariant: between two calls of `move_on` all callers get the same group, or none after
    `leave`. Followers hear of a generation once, when its group is there.
    """

    def __init__(self, group: Any) -> None:
        self.generation = 0
        self.word_device: Any = None
        """Where small messages travel; set by the run, which knows the devices that the group can
        reach."""
        self._followers: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._hold(group)

    @classmethod
    def of(cls, group: Any) -> Membership:
        """The membership that holds this group: the same one for all who ask, while it lives.

        Also that of a group which it has left, so that a world from before a death, and an engine
        that is made of a replacement's world, do not stay alone in it.
        """
        if isinstance(group, Membership):
            return group
        holder, _ = _held.get(group, (None, ()))
        found = None if holder is None else holder()
        return cls(group) if found is None else found

    def ranks_as_in(self, group: Any, size: int) -> dict[int, int]:
        """The ranks of the group of now, in the order of the names that `group`, which it has held,
        has for their workers, and by them; `size` is that of the world with those names."""
        _, names = _held[group]
        if len(names) != size:  # a replacement is alone at first, in a world of all
            names = tuple(range(size))
        rank_by_worker = {worker: rank for rank, worker in enumerate(self.numbers)}
        known = [*names, *(worker for worker in self.numbers if worker not in names)]
        return {
            name: rank_by_worker[worker]
            for name, worker in enumerate(known)
            if worker in rank_by_worker
        }

    def follow(self, on_generation: Callable[[], None]) -> None:
        """Call this bound method at every new generation, in the order of following.

        Its object is held weakly: who is gone is not called.
        """
        self._followers.append(weakref.WeakMethod(on_generation))

    def leave(self) -> None:
        """Be alone until the next group is there; who follows hears of that one only."""
        self._hold(NoGroup())

    def move_on(self, group: Any, numbers: Sequence[int] = ()) -> None:
        """Continue with another group, between two steps; called on every rank of it.

        `numbers` are what its ranks are called, where that is not their place in it.
        """
        self._hold(group, numbers)
        self.generation += 1
        self._followers = [each for each in self._followers if each() is not None]
        for follower in self._followers:
            on_generation = follower()
            # One that was called before it may have let go of it.
            if on_generation is not None:
                on_generation()

    def _hold(self, group: Any, numbers: Sequence[int] = ()) -> None:
        self.group = group
        self.rank, self.size = int(group.rank()), int(group.size())
        """The position of this process in the group, and how many there are."""
        self.numbers = tuple(numbers) or tuple(range(self.size))
        """By rank, what messages and the launcher call its worker: one that is replaced keeps its
        number, and comes last in the group."""
        self.leads = self.rank == 0 and not isinstance(group, NoGroup)
        """Whether this process speaks, draws and writes for the group: rank 0, unless it is apart.

        A worker that waits to be let into a training is alone, and must not write its files."""
        _held[group] = weakref.ref(self), self.numbers


_held: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Membership], tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""By group, who has held it last, and what its ranks were called."""


class Cadence:
    """The number of the step in which something is due, the same on every worker.

        generation begins --(its first step + `first`)--> due --(agree)--> due again --> ...

    Invariant: only the number of the generation's first step and numbers that all workers have
    exchanged go into it. A new generation begins it anew on all workers, newcomers included.
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
