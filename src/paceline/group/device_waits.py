"""Release a device that waits for a rank that has left, and refuse what it then holds.

On a GPU the host does not wait for a sum. A rank that has left keeps the others' devices waiting,
and soon their hosts too: in the next `item()`, inside torch, where Python code cannot raise. The
watchdog of torch ends such a process after a minute, naming no rank. So a thread checks that the
newest sum arrives, and aborts NCCL's communicators when it cannot arrive any more. A sum whose
connection is lost arrives all the same, with anything in memory: only the communicator knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import PeerError
from paceline.torch_private import abort_together, find_nccl_backends, has_failed

PATIENCE_S = 10.0
"""How long a device may take for what it has been given, after a rank has left: a host can be a
thousand kernels ahead of it."""
_LOOK_S = 0.5
_WATCHDOG_S = 0.25
"""How long torch's watchdog, which looks every 0.1 s, may take to find a lost connection."""


class DeviceWaits:
    """What the device of this process waits for, and the error once it is not to come.

        note() -> event recorded -> the device has passed it: nothing to watch
                                 -> a rank has left, `patience_s`: aborted, `check()` raises
                                 -> a connection is lost: the same, at once

    There is one event, recorded again by each `note()`: once the device has passed it, it has
    passed everything before. A thread watches it from a note on until then.

    Invariant: after an abort every later collective raises. What NCCL leaves in memory then is not
    a result, so the process must not end as if it were one: `settle()` is called at its end.
    """

    def __init__(
        self,
        has_left: Callable[[Any], bool],
        explain: Callable[[Any, str, BaseException], PeerError],
        make_event: Callable[[], Any] = torch.cuda.Event,
        abort: Callable[[], None] | None = None,
        patience_s: float = PATIENCE_S,
        has_failed: Callable[[], bool] | None = None,
    ) -> None:
        self._has_left, self._explain = has_left, explain
        self._make_event, self._abort = make_event, abort or _abort_all
        self._patience_s = patience_s
        self.has_failed = has_failed or _has_any_failed
        """Whether a connection between devices is known to be lost."""
        self._event: Any = None
        self._newest: tuple[Any, str] | None = None
        self._is_watched = False
        self._lock = threading.Lock()
        self.error: PeerError | None = None
        """Why the device no longer waits for what was started, once that is so."""

    def note(self, group: Any, what: str) -> None:
        """The device now waits for this."""
        self.check()
        with self._lock:
            if self._event is None:
                self._event = self._make_event()
            self._event.record()
            self._newest = group, what
            is_watched, self._is_watched = self._is_watched, True
        if not is_watched:
            threading.Thread(target=self._watch, name="paceline device waits", daemon=True).start()

    def stop(self) -> None:
        """The host waits for everything from now on: a lost connection is an error of its wait."""
        with self._lock:
            self._event = None

    def check(self) -> None:
        """Raise if the device no longer waits for what was started before."""
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait until the device has done everything, and raise if it could not."""
        if self._event is not None:
            torch.cuda.synchronize()
            time.sleep(_WATCHDOG_S)
            if self.error is None and self.has_failed():
                self._give_up("a connection was lost")
            self.check()

    def _watch(self) -> None:
        pause_s, left_s = min(_LOOK_S, self._patience_s / 4), 0.0
        reason = "it waits for a rank that has left"
        while True:
            time.sleep(pause_s)
            is_lost = self.has_failed()
            with self._lock:
                # Under the lock: a note meanwhile would rely on this thread, which is about to end.
                if self._event is None or (not is_lost and self._event.query()):
                    self._is_watched = False
                    return
                assert self._newest is not None
                group, _ = self._newest
            if is_lost:
                reason = "a connection was lost"
                break
            if left_s == 0.0:
                left_s = time.monotonic() if self._has_left(group) else 0.0
            elif time.monotonic() - left_s > self._patience_s:
                break
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        with self._lock:
            assert self._newest is not None
            group, what = self._newest
        # Before the abort: threads that the abort releases must find the error.
        self.error = self._explain(group, what, RuntimeError(reason))
        self._abort()


def _has_any_failed() -> bool:
    return any(map(has_failed, find_nccl_backends()))


def _abort_all() -> None:
    abort_together(find_nccl_backends())
