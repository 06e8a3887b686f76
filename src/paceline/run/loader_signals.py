"""How the processes that load data take signals: they live as long as the run wants batches."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from ctypes import c_byte
from functools import partial
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from types import FrameType

from paceline.run.stop import SAME_PRESS_S


class LoaderSignals:
    """Keeps the processes that load data alive as long as the training wants batches.

        released --hold, when the loop begins--> held --release, when it ends--> released

    Ctrl-C, a launcher and a cluster send signals to every process of a training; a loader that
    obeyed at once would take the step away that the training is about to finish. So one byte that
    they share says whether loaders are needed. They are also released when the training's process
    exits, before that waits for its children.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._shared: c_byte | None = None

    @property
    def on_start(self) -> Callable[[int], None]:
        """What a loader does first: a `DataLoader`'s `worker_init_fn`."""
        if self._shared is None:  # shared memory is a file: without loaders none is needed
            self._shared = RawValue(c_byte, self._is_held)
            Finalize(self, _set, args=(self._shared, False), exitpriority=0)
        return partial(_begin_loader, self._shared, os.getpid())

    def hold(self) -> None:
        """From now on a loader leaves the first SIGTERM to the training."""
        self._is_held = True
        _set(self._shared, True)

    def release(self) -> None:
        """From now on the first SIGTERM ends a loader."""
        self._is_held = False
        _set(self._shared, False)


def _set(shared: c_byte | None, is_held: bool) -> None:
    if shared is not None:
        shared.value = is_held


def _begin_loader(is_held: c_byte, training: int, _number: int) -> None:
    """In a loader: leave the first signal to the training, and obey the second."""
    first_s: float | None = None

    def on_terminate(number: int, _frame: FrameType | None) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        first_s = now_s if first_s is None else first_s
        if not is_held.value or os.getppid() != training or now_s - first_s > SAME_PRESS_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate)
    signal.signal(signal.SIGHUP, on_terminate)
