"""Following runs: each is read once, in one task, however many pages show it.

A page holds no queue: it remembers which version of each message it has had, and takes the newest
when it is ready for more. So a slow page misses messages, and costs nobody anything.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.comm.documents import plain_json
from paceline.explain.report import document, page
from paceline.explain.report.bounds import bounded
from paceline.explain.report.collect import RunData, collect
from paceline.watch import live

LIVE_PERIOD_S, DOCUMENT_PERIOD_S = 0.25, 1.0
BUSY = 5
"""Reading takes at most one part in so many of the time."""
STILL_HERE_S = 15.0


class Followed:
    """One run, and what its pages are sent.

    quiet --(a page opens)--> read again and again --(the last page closes)--> quiet
    """

    def __init__(self, name: str, path: Path, watched: Watched) -> None:
        self.name, self.path = name, path
        self.state, self.step = "unknown", 0
        self._watched = watched
        self._messages: dict[str, tuple[int, bytes]] = {}
        """The newest of each kind, and its number."""
        self._news = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._pages = 0

    async def messages(self) -> AsyncIterator[bytes]:
        """Server-sent events for one page, the newest of each kind."""
        had: dict[str, int] = {}
        self._pages += 1
        if self._reading is None:
            self._reading = asyncio.create_task(self._follow())
        try:
            while True:
                news = self._news
                for kind, (number, message) in list(self._messages.items()):
                    if had.get(kind) != number:
                        had[kind] = number
                        yield message
                try:
                    await asyncio.wait_for(news.wait(), STILL_HERE_S)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._pages -= 1
            if not self._pages and self._reading is not None:
                self._reading.cancel()
                self._reading = None

    async def _follow(self) -> None:
        while True:
            began_s = time.monotonic()
            shown = await asyncio.to_thread(self._read)
            self._publish("document", shown)
            self._publish("live", shown["live"])
            spent_s = time.monotonic() - began_s
            await asyncio.sleep(max(DOCUMENT_PERIOD_S, BUSY * spent_s))

    def _publish(self, kind: str, value: Mapping[str, Any]) -> None:
        number, _ = self._messages.get(kind, (0, b""))
        message = f"event: {kind}\ndata: {_json(value)}\n\n".encode()
        self._messages[kind] = number + 1, message
        self._news.set()
        self._news = asyncio.Event()

    def _read(self) -> document.Json:
        data = collect(self.path)
        return {**document.build(data), "live": self._live(data)}

    def _live(self, data: RunData) -> live.Json:
        found = live.build(data)
        self.state, self.step = found["state"], found["step"]
        runs = [{"name": e.name, "state": e.state, "step": e.step} for e in self._watched.runs]
        result: live.Json = bounded({"run": self.name, "runs": runs, **found})
        return result

    async def document(self) -> str:
        """The document as it is now."""
        return _json(await asyncio.to_thread(self._read))

    async def report(self) -> str:
        """The run as one file."""
        return await asyncio.to_thread(lambda: page.render(document.build(collect(self.path))))

    async def ask_to_record(self) -> str:
        """Ask for the next step to be recorded; why that cannot be, if it cannot."""
        return "This run cannot be asked."


class Watched:
    """The runs that a server shows, by name."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.runs = [Followed(path.resolve().name, path, self) for path in paths]
        self.first = self.runs[0]

    def find(self, name: str | None) -> Followed | None:
        """The run of that name; the first where no name is given."""
        return self.first if name is None else next((r for r in self.runs if r.name == name), None)


def _json(value: object) -> str:
    return json.dumps(plain_json(value), separators=(",", ":"), allow_nan=False)
