"""Processes that load data, and signals: they live as long as the training wants batches.

Ctrl-C, a launcher and a cluster send signals to every process of a training. A loader that obeyed
at once would take the step away that the training is about to finish.
"""

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


class Lifeline:
    """One byte that a training shares with its loaders: whether it needs them.

        cut --tie, when the loop begins--> tied --cut, when it ends--> cut

    It is also cut when the training's process exits, before that waits for its children.
    """

    def __init__(self) -> None:
        self._is_tied = False
        self._shared: c_byte | None = None

    @property
    def on_start(self) -> Callable[[int], None]:
        """What a loader does first: a `DataLoader`'s `worker_init_fn`."""
        if self._shared is None:  # shared memory is a file: without loaders nobody needs one
            self._shared = RawValue(c_byte, self._is_tied)
            Finalize(self, _set, args=(self._shared, False), exitpriority=0)
        return partial(_hold, self._shared, os.getpid())

    def tie(self) -> None:
        """From now on a loader leaves the first SIGTERM to the training."""
        self._is_tied = True
        _set(self._shared, True)

    def cut(self) -> None:
        """From now on the first SIGTERM ends a loader."""
        self._is_tied = False
        _set(self._shared, False)


def _set(shared: c_byte | None, is_tied: bool) -> None:
    if shared is not None:
        shared.value = is_tied


def _hold(is_tied: c_byte, training: int, _number: int) -> None:
    """In a loader: leave the first signal to the training, and obey the second."""
    first_s: float | None = None

    def on_terminate(number: int, _frame: FrameType | None) -> None:
        nonlocal first_s
        now_s = time.monotonic()
        first_s = now_s if first_s is None else first_s
        if not is_tied.value or os.getppid() != training or now_s - first_s > SAME_PRESS_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate)
