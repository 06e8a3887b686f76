"""torch's default group, made anew for every generation.

Members first meet at the launcher's store, where waiting can be given up. Only when all are there
do they build the group, which takes milliseconds and cannot be given up. It is torch's own default
group, so `torch.distributed` keeps working in the user's code.
"""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline import env
from paceline.comm.sockets import Connections
from paceline.errors import PeerError
from paceline.survive.link import Generation

BUILD_TIMEOUT = timedelta(seconds=0.75)
"""All members are there when a group is built: one that does not answer in time has died."""
_PREFIX = "paceline/generation"


@cache
def _spare_children() -> None:
    """Keep processes that are forked from now on from collecting what they inherit.

    A group that was left may wait to be collected when a loader is forked. Collected there, its
    threads would be missing, and the loader would crash.
    """
    os.register_at_fork(after_in_child=gc.freeze)


class Meeting:
    """The members of one generation, as they arrive."""

    def __init__(self, store: Store, generation: Generation) -> None:
        self.generation = generation
        self.store = PrefixStore(f"{_PREFIX}/{generation.number}", store)
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
        self._store, self._connections = store, connections
        self._backend, self._timeout = backend, timeout

    def meet(self, generation: Generation) -> Meeting:
        return Meeting(self._store, generation)

    def make(self, meeting: Meeting) -> Any:
        _spare_children()
        generation = meeting.generation
        way = env.gloo_on_loopback() if generation.is_near else nullcontext()
        try:
            with way, self._connections.recorded():
                dist.init_process_group(
                    self._backend,
                    store=meeting.store,
                    rank=generation.rank,
                    world_size=generation.size,
                    timeout=BUILD_TIMEOUT,
                )
        except (RuntimeError, ValueError) as error:
            raise PeerError(f"Generation {generation.number} could not form a group.") from error
        group = dist.group.WORLD
        assert group is not None
        dist.distributed_c10d._set_pg_timeout(self._timeout, group)
        if generation.rank == 0:
            self._forget_before(generation.number)
        return group

    def leave(self) -> None:
        """Let go of the default group, if there is one."""
        self.interrupt()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def interrupt(self) -> None:
        """End what this process waits for in its group; may be called from another thread."""
        self._connections.shut()

    def _forget_before(self, number: int) -> None:
        """Delete what older generations have left in the store."""
        with suppress(RuntimeError, AttributeError):  # a torch that cannot list them keeps them
            for key in self._store.list_keys():
                prefix, _, rest = key.partition(f"{_PREFIX}/")
                if not prefix and rest and int(rest.partition("/")[0]) < number:
                    self._store.delete_key(key)
