"""Release a device that waits for a rank that has left, and refuse what it then holds.

On a GPU the host does not wait for a sum. A rank that has left keeps the others' devices waiting,
and soon their hosts too: in the next `item()`, inside torch, where Python code cannot raise. The
watchdog of torch ends such a process after a minute, naming no rank. So a thread checks that the
newest sum arrives, and aborts NCCL's communicators when it cannot arrive any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import PeerError
from paceline.torch_private import abort_together, find_nccl_backends

PATIENCE_S = 10.0
"""How long a device may take for what it has been given, after a rank has left: a host can be a
thousand kernels ahead of it."""
_LOOK_S = 0.5


class DeviceWaits:
    """What the device of this process waits for, and the error once it is not to come.

        note() -> event recorded -> the device has passed it: none, until the next note()
                                 -> a rank has left, `patience_s`: aborted, `check()` raises

    Invariant: after an abort every later collective raises. What NCCL leaves in memory then is no
    result, so the process must not end as if it were one: `settle()` is called at its end.
    """

    def __init__(
        self,
        has_left: Callable[[Any], bool],
        explain: Callable[[Any, str, BaseException], PeerError],
        record: Callable[[], Any] | None = None,
        abort: Callable[[], None] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._has_left, self._explain = has_left, explain
        self._record, self._abort = record or _record_event, abort or _abort_all
        self._patience_s = patience_s
        self._watched: threading.Thread | None = None
        self._was_used = False
        self.error: PeerError | None = None
        """Why the device no longer waits for what was started, once that is so."""

    def note(self, group: Any, what: str) -> None:
        """The device now waits for this; one event at a time is looked after, each by a thread."""
        self.check()
        if self._watched is None or not self._watched.is_alive():
            self._was_used = True
            self._watched = threading.Thread(
                target=self._watch,
                args=(group, what, self._record()),
                name="paceline device waits",
                daemon=True,
            )
            self._watched.start()

    def check(self) -> None:
        """Raise if the device no longer waits for what was started before."""
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait until the device has done everything, and raise if it could not."""
        if self._was_used:
            torch.cuda.synchronize()
            self.check()

    def _watch(self, group: Any, what: str, event: Any) -> None:
        pause_s, left_s = min(_LOOK_S, self._patience_s / 4), 0.0
        while True:
            time.sleep(pause_s)
            if event.query():
                return
            if left_s == 0.0:
                left_s = time.monotonic() if self._has_left(group) else 0.0
            elif time.monotonic() - left_s > self._patience_s:
                break
        self.error = self._explain(group, what, RuntimeError("it waits for a rank that has left"))
        self._abort()


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _abort_all() -> None:
    abort_together(find_nccl_backends())
