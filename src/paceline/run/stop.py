"""Ctrl-C and SIGTERM: the first asks the run to stop after a step, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_PRESS_S = 0.5
"""A terminal and a launcher may both pass one Ctrl-C on; so soon after the first it is the same."""


def name_signal(number: int) -> str:
    """What a person calls it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class StopRequest:
    """Whether somebody has asked this worker to stop, and with which signal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal = 0
        self._since_s = 0.0
        self._say = say
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """From now on signals are requests. Only the main thread can listen."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            # What was started to ignore an interrupt, as by nohup, goes on ignoring it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """Put back whoever handled the signals before; does nothing where nobody listens."""
        while self._before:
            number, handler = self._before.popitem()
            # None: a handler that was not installed from Python cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.signal:
            self.signal, self._since_s = number, now_s
            self._say(
                f"{name_signal(number)}: finishing the step and saving; once more ends it at once."
            )
        elif number != self.signal or now_s - self._since_s > SAME_PRESS_S:
            self.ignore()
            # Nobody's handler: whatever hangs, this ends it, with the right exit code.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
