"""An island's way to the others: requests to the meeting place, each on a connection of its own."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError, PeerError
from paceline.group import Refused
from paceline.islands.place import IslandPlace
from paceline.islands.wire import connect, receive, send

REACH_S = 600.0
"""How long an island tries to reach the meeting place, and trains no further meanwhile."""
LOCAL_REACH_S = 5.0
"""The same on one machine, where a launcher that does not answer is gone."""
_AGAIN_S = 0.2
_LOOK_S = 0.02


class IslandsError(PacelineError, RuntimeError):
    """The islands of a run cannot reach their meeting place."""

    ends_run = True


class Request:
    """Something asked, and answered after a while; the training continues meanwhile.

    It is asked again where the connection breaks, so the meeting place may hear it twice.
    """

    def __init__(self, place: IslandPlace, head: dict[str, Any], *bodies: Any) -> None:
        self._place, self._head, self._bodies = place, {**head, "island": place.number}, bodies
        self._connection: socket.socket | None = None
        self._answer: tuple[dict[str, Any], bytearray] | None = None
        self._problem: Exception | None = None
        self._is_dropped = False
        self._lock, self._done = threading.Lock(), threading.Event()
        self.began_s = time.perf_counter()
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._ask, name="paceline-islands", daemon=True)
        self._thread.start()

    def wait(self, is_broken: Callable[[], bool]) -> tuple[dict[str, Any], bytearray]:
        """The answer; a PeerError as soon as the group of this worker is broken."""
        try:
            while not self._done.wait(_LOOK_S):
                if is_broken():
                    raise PeerError("A worker of this island is gone while it waits for others.")
        except BaseException:
            self.drop()
            raise
        self._thread.join()
        if self._answer is None:
            raise IslandsError(
                f"The meeting place of the islands at {self._place.address} cannot be reached: "
                f"{self._problem}.",
                advice="It is the launcher's that was started first, or that of machine 0: see "
                "what that one printed. The run continues from its newest checkpoint.",
            )
        return self._answer

    def drop(self) -> None:
        """Do not wait for it any more."""
        with self._lock:
            self._is_dropped = True
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _ask(self) -> None:
        reach_s = LOCAL_REACH_S if os.path.isabs(self._place.address) else REACH_S
        give_up_s = time.monotonic() + reach_s
        try:
            while not self._is_dropped:
                try:
                    self._answer = self._try()
                    return
                except (OSError, ValueError) as error:
                    self._problem = error
                    if isinstance(error, Refused) or time.monotonic() > give_up_s:
                        return
                self._done.wait(_AGAIN_S)
        finally:
            self.ended_s = time.perf_counter()
            self._done.set()

    def _try(self) -> tuple[dict[str, Any], bytearray]:
        with connect(self._place.address) as connection:
            with self._lock:
                self._connection = connection
                if self._is_dropped:
                    raise ConnectionError("it is not wanted any more")
            send(connection, self._head, *self._bodies)
            return receive(connection)


class Presence:
    """A connection that says that this worker lives; it ends with the process."""

    def __init__(self, place: IslandPlace) -> None:
        self._place = place
        self._connection: socket.socket | None = None
        _opened.add(self)

    def renew(self) -> None:
        """Connect, unless that is done and holds."""
        if self._connection is not None and not self._has_ended(self._connection):
            return
        self.close()
        # Whether the others can be reached is found out by whoever asks them something.
        with suppress(OSError, ValueError):
            connection = connect(self._place.address)
            self._connection = connection
            send(connection, {"ask": "be", "island": self._place.number})
            receive(connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _has_ended(self, connection: socket.socket) -> bool:
        try:
            return not connection.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


_opened: weakref.WeakSet[Presence] = weakref.WeakSet()


def _close_in_child() -> None:
    """Processes that load data outlive a killed worker, and are not there for it."""
    for each in list(_opened):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
