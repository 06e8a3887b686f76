"""torch's default group, made anew for every generation.

Members first meet at the launcher's store, and build the group when all are there, which takes
milliseconds. Should one of them die just then, the others wait there for its address: the launcher
ends their waits, and they shut the connections they have. It is torch's own default group, so
`torch.distributed` keeps working in the user's code.

Gloo's waits end with an error when its connections are shut, or in rare cases not at all. NCCL's
end without one when it is aborted, and leave anything in memory: see `comm.refuse_aborted`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from paceline import env
from paceline.errors import PeerError
from paceline.group import MEETINGS, Connections, Generation, have_ended, meeting_place
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
MOST_DOUBLINGS = 5
"""Or the machines are so busy, or so many, that it takes longer."""


@cache
def _spare_children() -> None:
    """Keep processes that are forked from now on from collecting what they inherit.

    A group that was left may wait to be collected when a loader is forked. Collected there, its
    threads would be missing, and the loader would crash.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def can_form_anew(backend: str) -> bool:
    """Whether groups of a backend can be left while somebody waits in them."""
    names = {part.rpartition(":")[2] for part in backend.split(",")}
    return names <= ({"gloo", "nccl"} if can_abort_nccl() else {"gloo"})


class Meeting:
    """The members of one generation, as they arrive."""

    def __init__(self, store: Store, generation: Generation) -> None:
        self.generation = generation
        self.store = PrefixStore(meeting_place(generation.number), store)
        self._missing = [f"here/{other}" for other in range(generation.size)]
        self.store.set(f"here/{generation.rank}", "")

    def is_complete(self) -> bool:
        while self._missing and self.store.check(self._missing[-1:]):
            self._missing.pop()
        return not self._missing


class Groups:
    """Makes and leaves the default group of this process."""

    def __init__(
        self, store: Store, connections: Connections, backend: str, timeout: timedelta
    ) -> None:
        """`connections` are those of the group that is there now."""
        self.backend = backend
        self.is_broken = False
        """Whether waits in the current group were ended: what NCCL leaves then is no result."""
        self._store, self._connections, self._timeout = store, connections, timeout
        self._tries = 0
        self._aborting = threading.Lock()

    def meet(self, generation: Generation) -> Meeting:
        return Meeting(self._store, generation)

    def make(self, meeting: Meeting) -> Any:
        """The group of all who have met; every time that this fails it is tried for longer."""
        _spare_children()
        generation, self._tries, self.is_broken = meeting.generation, self._tries + 1, False
        way = env.gloo_on_loopback() if generation.is_near else nullcontext()
        try:
            with way, self._connections.recorded():
                dist.init_process_group(
                    self.backend,
                    store=meeting.store,
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
        set_group_timeout(group, self._timeout)
        if generation.rank == 0:
            self._forget_before(generation.number)
        return group

    def leave(self) -> None:
        """Let go of the default group, if there is one."""
        has_nccl = bool(find_nccl_backends())
        if has_nccl and not self.is_broken:
            torch.cuda.synchronize()  # what was begun before
        self.interrupt()
        if dist.is_initialized():
            if not have_ended():
                _keep_for_ever(dist.group.WORLD)
            with suppress(RuntimeError):
                if has_nccl:  # which would wait for everybody before it is destroyed
                    abort_default_group()
                else:
                    dist.destroy_process_group()

    def interrupt(self) -> None:
        """End what this process waits for in its groups; may be called from another thread."""
        self.is_broken = True
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
