"""Who takes part now: a generation and its process group.

Whoever needs the group asks `Membership` each time and keeps nothing, so that a training can
continue on another group, of the same ranks or of fewer, between two steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class NoGroup:
    """Stands for a group where there is none: alone, and writing for nobody."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


class Membership:
    """The only holder of a process group.

        generation 0, group --(move_on)--> generation 1, another group --(move_on)--> ...

    Invariant: between two calls of `move_on` everybody who asks gets the same group. It is called
    between two steps, on every rank of the new group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.generation = 0
        self.word_device: Any = None
        """Where small messages travel; set by whoever knows which devices the group can reach."""
        self._followers: list[weakref.WeakMethod[Callable[[], None]]] = []
        _by_group[id(group)] = self

    @classmethod
    def of(cls, group: Any) -> Membership:
        """The membership that holds this group: the same one for all who ask, while it lives."""
        if isinstance(group, Membership):
            return group
        found = _by_group.get(id(group))
        return found if found is not None and found.group is group else cls(group)

    @property
    def rank(self) -> int:
        """The position of this process in the group."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    @property
    def leads(self) -> bool:
        """Whether this process speaks, draws and writes for the group: rank 0, unless it is apart.

        A worker that waits to be let into a training is alone, and must not write its files.
        """
        return self.rank == 0 and not isinstance(self.group, NoGroup)

    def follow(self, on_generation: Callable[[], None]) -> None:
        """Call this bound method at every new generation, in the order of following.

        Its object is held weakly: who is gone is not called.
        """
        self._followers.append(weakref.WeakMethod(on_generation))

    def move_on(self, group: Any) -> None:
        """Continue with another group, between two steps."""
        _by_group.pop(id(self.group), None)
        self.group = group
        self.generation += 1
        _by_group[id(group)] = self
        self._followers = [each for each in self._followers if each() is not None]
        for follower in self._followers:
            on_generation = follower()
            if on_generation is not None:
                on_generation()


_by_group: weakref.WeakValueDictionary[int, Membership] = weakref.WeakValueDictionary()
