"""What workers print, read as fast as what is shown of it is read.

A pipe behind the console that is not emptied, such as that of a stopped pager, holds workers that
print, but not the launcher: it reads nothing more of theirs, and goes on with everything else.
"""

from __future__ import annotations

import os
import selectors
import time
from functools import partial

from paceline.launcher.output import LAST_WAIT_S, Console, Source

# How long output may still come after the last worker has ended.
DRAIN_S = 0.25
# How long to wait for room in a pipe that is not read.
FULL_PIPE_S = 0.02


class Reading:
    """The open streams of all workers, each registered with the selector unless all are held."""

    def __init__(self, selector: selectors.BaseSelector, console: Console) -> None:
        self._selector, self._console = selector, console
        self._sources: list[Source] = []
        self._is_held = False

    def add(self, sources: list[Source]) -> None:
        """Read from these, too."""
        for source in sources:
            os.set_blocking(source.fd, False)
            self._sources.append(source)
            if not self._is_held:
                self._listen(source)

    def drop(self, sources: list[Source]) -> None:
        """Their worker has ended: read what there is, and nothing more."""
        for source in sources:
            if source in self._sources:
                self._read(source)
            if source in self._sources:
                self._forget(source)

    def due_s(self, now_s: float) -> list[float]:
        """When there is something to do."""
        due = [source.due_s for source in self._sources if source.due_s is not None]
        return [*due, now_s + FULL_PIPE_S] if self._console.is_waiting else due

    def turn(self) -> None:
        """Do what is due, write what waits, and hold workers or let them go."""
        now_s = time.monotonic()
        for source in self._sources:
            source.tick(now_s)
        self._console.flush()
        if self._console.is_full == self._is_held:
            return
        self._is_held = not self._is_held
        for source in self._sources:
            if self._is_held:
                self._selector.unregister(source.fd)
            else:
                self._listen(source)

    def drain(self) -> None:
        """All workers have ended: read the last of it, which others may hold open."""
        if self._is_held:
            self._console.flush(LAST_WAIT_S)
            self.turn()
        deadline_s = time.monotonic() + DRAIN_S
        while self._sources and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                if key.fd in {source.fd for source in self._sources}:
                    key.data()
                else:
                    self._selector.unregister(key.fd)

    def _listen(self, source: Source) -> None:
        self._selector.register(source.fd, selectors.EVENT_READ, partial(self._read, source))

    def _read(self, source: Source) -> None:
        if not source.read(time.monotonic()):
            self._forget(source)
            source.close()

    def _forget(self, source: Source) -> None:
        self._sources.remove(source)
        if not self._is_held:
            self._selector.unregister(source.fd)
