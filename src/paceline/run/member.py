"""A worker's side of survival: out of a broken group, into the next generation, in step again.

    training --(the launcher announces, or a sum fails)--> lost
       ^                                                    │  every wait in the old group ends
       │                                                    v
       └--(joined)-- healed <-- group formed <-- met <-- announced, the newest one counts

A thread hears the launcher. When a generation is urgent it shuts the sockets of the current group,
so that a rank which waits there gets an error within milliseconds, whichever rank it waits for.

The group is torch's own default group, so `torch.distributed` keeps working in the user's code.
Members first meet at the launcher's store, and build the group when all are there, which takes
milliseconds. Should one of them die just then, the others wait there for its address: the launcher
ends their waits, and they shut the connections they have. Gloo's waits end with an error when its
connections are shut, or in rare cases not at all. NCCL's end without one when it is aborted, and
leave anything in memory: see `group.refuse_aborted`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import init_process_group

from paceline import env
from paceline.env import Placement
from paceline.errors import AuditError, PacelineError, PeerError, message_of, summarize
from paceline.group import (
    CONNECTIONS,
    MEETINGS,
    Connections,
    Generation,
    Link,
    Membership,
    connect,
    have_ended,
    meeting_place,
    refuse_aborted,
)
from paceline.torch_private import (
    PrefixStore,
    Store,
    abort_default_group,
    abort_together,
    can_abort_nccl,
    find_nccl_backends,
    reset_group_count,
    set_group_timeout,
)

BUILD_TIMEOUT = timedelta(seconds=0.75)
"""All members are there when a group is built: one that does not answer in time has died."""
GROUP_TIMEOUT = timedelta(minutes=30)
MOST_DOUBLINGS = 5
"""Or the machines are so busy, or so many, that it takes longer."""
ANNOUNCE_TIMEOUT_S = 600.0
"""How long to wait for the next generation; a launcher that lives answers in milliseconds, or says
again and again that it waits for workers, too."""
EXPLAIN_S = 1.0
"""How long the launcher may take to hear of a death that a collective has failed of."""
LOOK_S, WAIT = 0.002, timedelta(seconds=5)
"""Between two looks whether a wait was ended in favour of a newer generation, and how long to wait
where no launcher ends waits."""
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
        self._word_s = 0.0
        """When the launcher last said that it waits for workers."""
        self.taken: set[str] = set()
        """The dead whose ledgers this worker has added to its own."""
        self._link, self._membership, self._groups, self._heal = link, membership, groups, heal
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
        """This worker alone is to go; False if there are no others."""
        newest = self._newest
        if (self._membership.size if newest is None else newest.size) == 1:
            return False
        self._link.tell("leaving")
        return True

    def explains(self, error: BaseException) -> bool:
        """Whether an error only says that another worker is gone."""
        if isinstance(error, AuditError) or (isinstance(error, PacelineError) and error.ends_run):
            return False
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in message_of(error)
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
            # Before it is formed: only one that is newer still breaks this attempt off.
            self.number = generation.number
            try:
                self._membership.move_on(self._form(generation), generation.workers)
                inherited = generation.inherited.items()
                loses = self._heal({k: v for k, v in inherited if k not in self.taken})
            except Overtaken:
                continue
            except PeerError as error:
                self.report_lost(error.__cause__ or error)
                continue
            self._link.tell("joined", generation=self.number, taken=list(self.taken), loses=loses)
            if self.number % COLLECT_EVERY == 0:
                gc.collect()
            if not self.is_new or self._is_welcome():
                self.is_new = False
                return

    def step_aside(self) -> None:
        """Take part in nothing any more; from now on another worker writes."""
        self._membership.leave()
        self._groups.leave()

    def report_lost(self, why: BaseException | None = None) -> None:
        """Tell the launcher that the group is broken, in case that no worker died; or that it could
        not be formed, and why."""
        text = "" if why is None else summarize(why)
        self._link.tell("lost", generation=self.number, why=text)

    def _form(self, generation: Generation) -> Any:
        """The group of a generation, once all its members are there."""
        store = self._groups.meet(generation, lambda: self.is_due)
        group = self._groups.make(generation, store)
        if self.is_over:  # it was interrupted in vain, if it was not there yet
            raise Overtaken
        return group

    def _is_welcome(self) -> bool:
        """Wait for the launcher's word: that this newcomer is in, or of a generation without it.

        Another one may be due already when it is in: that one waits until after a step.
        """
        self._wait(lambda: self.is_due or self._welcomed == self.number)
        return self._welcomed == self.number

    def _wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait for the launcher; False if it has said nothing for too long."""
        with self._heard:
            begin_s = time.monotonic()
            while not is_over():
                left_s = max(begin_s, self._word_s) + ANNOUNCE_TIMEOUT_S - time.monotonic()
                if left_s <= 0:
                    return False
                self._heard.wait(left_s)
        return True

    def _wait_for_newer(self) -> Generation:
        if not self._wait(lambda: self.is_due):
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
            if generation.is_awaited:
                with self._heard:
                    self._word_s = time.monotonic()
                    self._heard.notify_all()
                continue
            if generation.is_urgent:
                # Before the waits end: a thread that is released looks whether its group is broken.
                self._broken_before = generation.number
                self._groups.interrupt()
            with self._heard:
                self._newest = generation  # not before, or its group might be the interrupted one
                if generation.is_welcome:
                    self._welcomed = generation.number
                self._heard.notify_all()


@cache
def _spare_children() -> None:
    """Keep processes that are forked from now on from collecting what they inherit.

    A group that was left may wait to be collected when a loader is forked. Collected there, its
    threads would be missing, and the loader would crash.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def can_form_anew(backend: str) -> bool:
    """Whether groups of a backend can be left while a thread waits in them."""
    names = {part.rpartition(":")[2] for part in backend.split(",")}
    return names <= ({"gloo", "nccl"} if can_abort_nccl() else {"gloo"})


def follow_groups(place: Placement, backend: str) -> Groups:
    """What makes torch's default group anew for every generation, from the one of now on."""
    groups = Groups(connect(place, None), CONNECTIONS, backend, GROUP_TIMEOUT)
    refuse_aborted(groups.broken.is_set)
    return groups


class Groups:
    """Makes and leaves the default group of this process."""

    def __init__(
        self, store: Store, connections: Connections, backend: str, timeout: timedelta
    ) -> None:
        """`connections` are those of the group that is there now."""
        self.backend = backend
        self.broken = threading.Event()
        """Waits in the current group were ended: what NCCL leaves then is no result."""
        self._store, self._connections, self._timeout = store, connections, timeout
        self._tries = 0
        self._aborting = threading.Lock()

    def meet(self, generation: Generation, is_overtaken: Callable[[], bool]) -> Store:
        """Wait until all members of a generation are there; where they find each other."""
        store = PrefixStore(meeting_place(generation.number), self._store)
        store.set(f"here/{generation.rank}", "")
        while True:
            try:
                store.wait([f"here/{rank}" for rank in range(generation.size)], WAIT)
                return store
            except dist.DistStoreError as error:
                if is_overtaken():
                    raise Overtaken from error
                time.sleep(LOOK_S)  # the launcher has ended the wait, and will say why

    def make(self, generation: Generation, store: Store) -> Any:
        """The group of all who have met; every time that this fails it is tried for longer."""
        _spare_children()
        self._tries += 1
        # Before there is a group: an interruption from now on is meant for the new one.
        self.broken.clear()
        way = env.gloo_on_loopback() if generation.is_near else nullcontext()
        try:
            with way, self._connections.recorded():
                init_process_group(
                    self.backend,
                    store=store,
                    rank=generation.rank,
                    world_size=generation.size,
                    timeout=BUILD_TIMEOUT * 2 ** min(self._tries - 1, MOST_DOUBLINGS),
                )
        except (RuntimeError, ValueError) as error:
            # torch names groups by how many it has begun: those who fail with this one and those
            # who never tried would not find each other in the next.
            reset_group_count()
            raise PeerError(f"Generation {generation.number} could not form a group.") from error
        group = dist.group.WORLD
        assert group is not None
        self._tries = 0
        set_group_timeout(group, self._timeout)  # the short one was for building it
        if generation.rank == 0:
            self._forget_before(generation.number)
        return group

    def leave(self) -> None:
        """Let go of the default group, if there is one."""
        has_nccl = bool(find_nccl_backends())
        if has_nccl and not self.broken.is_set():
            torch.cuda.synchronize()  # what was begun before
        self.interrupt()
        if dist.is_initialized():
            if not have_ended():
                _keep_for_ever(dist.group.WORLD)
            with suppress(RuntimeError):
                if has_nccl:  # which would wait for all ranks before it is destroyed
                    abort_default_group()
                else:
                    dist.destroy_process_group()

    def interrupt(self) -> None:
        """End what this process waits for in its groups; may be called from another thread."""
        self.broken.set()
        self._connections.shut()
        with self._aborting:  # it takes a second, after which another thread finds it done
            abort_together(find_nccl_backends())

    def _forget_before(self, number: int) -> None:
        """Delete what older generations have left in the store."""
        with suppress(RuntimeError, AttributeError):  # a torch that cannot list them keeps them
            for key in self._store.list_keys():
                prefix, _, rest = key.partition(f"{MEETINGS}/")
                if not prefix and rest and int(rest.partition("/")[0]) < number:
                    self._store.delete_key(key)


def _keep_for_ever(group: Any) -> None:
    """Do not take a group apart in which a thread of Gloo's waits for ever: that would wait too."""
    ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(id(group)))
