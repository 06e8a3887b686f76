"""torch's default group, made anew for every generation.

Members first meet at the launcher's store, where waiting can be given up. Only when all are there
do they build the group, which takes milliseconds and cannot be given up. It is torch's own default
group, so `torch.distributed` keeps working in the user's code.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.comm.sockets import Connections
from paceline.errors import PeerError

BUILD_TIMEOUT = timedelta(seconds=0.75)
"""All members are there when a group is built: one that does not answer in time has died."""
_PREFIX = "paceline/generation"


class Meeting:
    """The members of one generation, as they arrive."""

    def __init__(self, store: Store, number: int, rank: int, size: int) -> None:
        self.number, self.rank, self.size = number, rank, size
        self.store = PrefixStore(f"{_PREFIX}/{number}", store)
        self._missing = [f"here/{other}" for other in range(size)]
        self.store.set(f"here/{rank}", "")

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

    def meet(self, number: int, rank: int, size: int) -> Meeting:
        return Meeting(self._store, number, rank, size)

    def make(self, meeting: Meeting) -> Any:
        try:
            with self._connections.recorded():
                dist.init_process_group(
                    self._backend,
                    store=meeting.store,
                    rank=meeting.rank,
                    world_size=meeting.size,
                    timeout=BUILD_TIMEOUT,
                )
        except (RuntimeError, ValueError) as error:
            raise PeerError(f"Generation {meeting.number} could not form a group.") from error
        group = dist.group.WORLD
        assert group is not None
        dist.distributed_c10d._set_pg_timeout(self._timeout, group)
        if meeting.rank == 0:
            self._forget_before(meeting.number)
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
