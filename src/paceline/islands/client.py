"""An island's requests to the meeting place, each on its own connection."""

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
from paceline.islands.wire import connect, make_room, receive, send

REACH_S = 600.0
"""How long an island tries to reach the meeting place; training waits meanwhile."""
LOCAL_REACH_S = 5.0
"""The same on one machine, where a launcher that does not answer has died."""
_RETRY_S = 0.2
_POLL_S = 0.02


class IslandsError(PacelineError, RuntimeError):
    """The islands of a run cannot reach their meeting place."""

    ends_run = True


class Request:
    """A request that is answered in the background while training continues.

    It is sent again if the connection breaks, so the meeting place may receive it twice.
    """

    def __init__(
        self,
        place: IslandPlace,
        head: dict[str, Any],
        get_body: Callable[[], Any] = bytes,
        room_for: Callable[[int], tuple[Any, memoryview]] = make_room,
    ) -> None:
        """`get_body` may wait for a device; `room_for` a number of bytes holds the answer's body.

        Both are called in the background.
        """
        self._place, self._head = place, {**head, "island": place.number}
        self._get_body, self._room_for = get_body, room_for
        self._connection: socket.socket | None = None
        self._answer: tuple[dict[str, Any], Any] | None = None
        self._problem: Exception | None = None
        self._is_dropped = False
        self._lock, self._done = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._ask, name="paceline-islands", daemon=True)
        self._thread.start()

    def wait(self, is_broken: Callable[[], bool]) -> tuple[dict[str, Any], Any]:
        """Wait for the answer; raises PeerError as soon as this worker's group is broken."""
        try:
            while not self._done.wait(_POLL_S):
                if is_broken():
                    raise PeerError("A worker of this island died while it waited for others.")
        except BaseException:
            self.drop()
            raise
        self._thread.join()
        if self._answer is None:
            raise IslandsError(
                f"The meeting place of the islands at {self._place.address} cannot be reached: "
                f"{self._problem}.",
                advice="It is in the launcher that was started first, or in that of machine 0: see "
                "what that launcher printed. The run continues from its newest checkpoint.",
            )
        return self._answer

    def drop(self) -> None:
        """Cancel the request."""
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
                self._done.wait(_RETRY_S)
        finally:
            self._done.set()

    def _try(self) -> tuple[dict[str, Any], Any]:
        with connect(self._place.address) as connection:
            with self._lock:
                self._connection = connection
                if self._is_dropped:
                    raise ConnectionError("the request was cancelled")
            send(connection, self._head, self._get_body())
            return receive(connection, self._room_for)


class Presence:
    """A connection that shows that this worker is alive; the kernel closes it with the process."""

    def __init__(self, place: IslandPlace) -> None:
        self._place = place
        self._connection: socket.socket | None = None
        _opened.add(self)

    def renew(self) -> None:
        """Connect, unless connected already."""
        if self._connection is not None and not self._has_ended(self._connection):
            return
        self.close()
        # A failure is ignored: the next `Request` reports it.
        with suppress(OSError, ValueError):
            connection = connect(self._place.address)
            self._connection = connection
            send(connection, {"ask": "be", "island": self._place.number})
            # Answered when it is counted: a request to join is refused to an island without a
            # presence.
            receive(connection, make_room)

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
    """After a fork: a loader's process outlives a killed worker, and must not keep it present."""
    for each in list(_opened):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)
