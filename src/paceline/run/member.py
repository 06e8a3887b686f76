"""A worker's side of survival: out of a broken group, into the next generation, in step again.

    training --(the launcher announces, or a sum fails)--> lost
       ^                                                    │  every wait in the old group ends
       │                                                    v
       └--(joined)-- healed <-- group formed <-- met <-- announced, the newest one counts

A thread hears the launcher. When a generation is urgent it shuts the sockets of the current group,
so that a rank which waits there gets an error within milliseconds, whoever it waits for.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.errors import PacelineError, PeerError
from paceline.group import Generation, Link, Membership, ask_nobody
from paceline.run.groups import Groups

ANNOUNCE_TIMEOUT_S = 600.0
"""How long to wait for the next generation; a launcher that lives answers in milliseconds."""
EXPLAIN_S = 1.0
"""How long the launcher may take to hear of a death that a collective has failed of."""
LOOK_S = 0.002
COLLECT_EVERY = 8
"""Generations between two collections: errors hold groups that were left, with their threads."""


class Overtaken(Exception):
    """A newer generation was announced while this one was being formed."""


class Member:
    """Keeps a membership on the newest generation that the launcher has announced."""

    def __init__(
        self,
        link: Link,
        membership: Membership,
        groups: Groups,
        heal: Callable[[dict[str, Any]], bool],
    ) -> None:
        """`heal` makes the state of all members equal; called by all of them, in a new group.

        It is given the ledgers of workers that died, by name, on one member only, and returns
        whether steps are lost.
        """
        self.number = -1 if link.is_replacement else 0
        """The generation that this worker is in."""
        self.ledger = link.ledger
        """What this worker leaves for the others, should it die."""
        self.is_new = link.is_replacement
        """Whether it is yet to be let in, and has no state of its own."""
        self._welcomed = -1
        self.taken: set[str] = set()
        """The dead whose ledgers this worker has added to its own."""
        self._link, self._membership, self._groups, self._heal = link, membership, groups, heal
        ask_nobody()
        self._newest: Generation | None = None
        """What was last announced, once what it breaks is interrupted."""
        self._broken_before = -1
        """The newest generation whose forerunners are broken."""
        self._heard = threading.Condition()
        self._listener = threading.Thread(target=self._listen, name="paceline-link", daemon=True)
        self._listener.start()

    @property
    def is_due(self) -> bool:
        """Whether a generation waits to be joined between two steps."""
        newest = self._newest
        return newest is not None and newest.number > self.number

    @property
    def is_over(self) -> bool:
        """Whether the generation of this worker is broken."""
        return self._broken_before > self.number

    @property
    def ended(self) -> str:
        """Why the launcher ends the run, once it does."""
        return "" if self._newest is None else self._newest.ends

    @property
    def is_leaving(self) -> bool:
        """Whether this worker goes with the generation that waits to be joined."""
        return self.is_due and self._newest is not None and self._newest.leaves

    def ask_to_leave(self) -> bool:
        """Somebody wants this worker to go, and not the others; False if there are no others."""
        newest = self._newest
        if (self._membership.size if newest is None else newest.size) == 1:
            return False
        self._link.tell("leaving")
        return True

    def explains(self, error: BaseException) -> bool:
        """Whether an error only says that another worker is gone."""
        if isinstance(error, PacelineError) and error.ends_run:
            return False
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        ):
            # A collective of the script's own has failed, perhaps before the launcher knows why.
            with self._heard:
                self._heard.wait_for(lambda: self.is_over, EXPLAIN_S)
        return isinstance(error, PeerError) or (isinstance(error, Exception) and self.is_over)

    def begin(self, facts: dict[str, Any], step: int) -> None:
        """Take part for the first time, after `step`; a replacement asks to be let in."""
        if self.number < 0:
            self._link.tell("ready")
            self.regroup(is_lost=False)
        else:
            known = {"backend": self._groups.backend, "began": [step, time.time()]}
            self._link.tell("joined", generation=self.number, facts={**facts, **known})

    def regroup(self, *, is_lost: bool) -> None:
        """Leave the current group, and return as a member of the newest generation.

        `is_lost` if the group is broken, as far as this worker can tell; otherwise all leave it.
        """
        if is_lost:
            self.report_lost()
        while True:
            self._membership.leave()
            self._groups.leave()
            generation = self._wait_for_newer()
            self.number = generation.number
            try:
                self._membership.move_on(self._form(generation))
                inherited = generation.inherited.items()
                loses = self._heal({k: v for k, v in inherited if k not in self.taken})
            except Overtaken:
                continue
            except PeerError:
                self.report_lost()
                continue
            self._link.tell("joined", generation=self.number, taken=list(self.taken), loses=loses)
            if self.number % COLLECT_EVERY == 0:
                gc.collect()
            if not self.is_new or self._is_welcome():
                self.is_new = False
                return

    def step_aside(self) -> None:
        """Take part in nothing any more; from now on somebody else writes."""
        self._membership.leave()
        self._groups.leave()

    def tell_left(self, step: int) -> None:
        """Everything is handed over: the others continue without this worker."""
        self._link.tell("left", step=step)

    def finish(self, *, is_left: bool, is_saved: bool) -> None:
        """Everything is done, or the script has left its loop: this worker may end now.

        `is_saved` if a process that begins anew would find the training complete.
        """
        self._link.tell("finished", is_left=is_left, is_saved=is_saved)

    def report_lost(self) -> None:
        """Tell the launcher that the group is broken, in case that nobody died."""
        self._link.tell("lost", generation=self.number)

    def _form(self, generation: Generation) -> Any:
        """The group of a generation, once all its members are there."""
        meeting = self._groups.meet(generation)
        while not meeting.is_complete():
            if self._newest_number() > generation.number:
                raise Overtaken
            time.sleep(LOOK_S)
        group = self._groups.make(meeting)
        if self.is_over:  # it was interrupted in vain, if it was not there yet
            raise Overtaken
        return group

    def _is_welcome(self) -> bool:
        """Wait for the launcher's word: that this newcomer is in, or of a generation without it.

        Another one may be due already when it is in: that one waits until after a step.
        """
        with self._heard:
            self._heard.wait_for(
                lambda: self.is_due or self._welcomed == self.number, ANNOUNCE_TIMEOUT_S
            )
        return self._welcomed == self.number

    def _newest_number(self) -> int:
        newest = self._newest
        return -1 if newest is None else newest.number

    def _wait_for_newer(self) -> Generation:
        with self._heard:
            if not self._heard.wait_for(lambda: self.is_due, ANNOUNCE_TIMEOUT_S):
                raise PeerError(
                    f"The launcher announced no new generation for {ANNOUNCE_TIMEOUT_S:.0f} s.",
                    advice="See what it printed.",
                )
            assert self._newest is not None
        if self._newest.ends:
            raise PeerError(f"The run has ended: {self._newest.ends}.")
        return self._newest

    def _listen(self) -> None:
        for generation in self._link.announcements():
            if generation.is_urgent:
                self._broken_before = generation.number
                self._groups.interrupt()
            with self._heard:
                self._newest = generation  # not before, or its group might be the interrupted one
                if generation.is_welcome:
                    self._welcomed = generation.number
                self._heard.notify_all()
