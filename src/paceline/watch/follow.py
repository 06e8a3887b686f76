"""Following runs: each is read once, in one task, however many pages show it.

A page holds no queue: it remembers which version of each message it has had, and takes the newest
when it is ready for more. So a slow page misses messages, and costs nobody anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.comm.documents import plain_json
from paceline.errors import UsageError
from paceline.explain.report import document, page
from paceline.explain.report.bounds import bounded
from paceline.explain.report.collect import RunReader
from paceline.observe.run_folder import RunFolder, replace_file
from paceline.watch import live

LIVE_PERIOD_S, DOCUMENT_PERIOD_S = 0.25, 1.0
IDLE = 20
"""After some time of the processor there is so many times as long a rest, so that the training does
not notice."""
SKETCHED_ABOVE_BYTES = 2**21
"""More new events than this, all together, are sketched: a page opens within a second."""
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
        self._published = 0
        self._news = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self.pages = 0
        """How many show it now."""
        self._lock = threading.Lock()
        """Around everything below: it is used in threads."""
        self._reader = RunReader(path, most_bytes=SKETCHED_ABOVE_BYTES)

    @property
    def is_shown(self) -> bool:
        """Whether there is something for a page to show."""
        return bool(self._messages)

    def begin(self) -> None:
        """Read the run from now on, because a page shows it or will."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._follow())

    async def messages(self) -> AsyncGenerator[bytes]:
        """Server-sent events for one page, the newest of each kind."""
        had: dict[str, int] = {}
        self.pages += 1
        self.begin()
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
            self.pages -= 1
            if not self.pages and self._reading is not None:
                self._reading.cancel()
                self._reading = None

    async def _follow(self) -> None:
        """Publish what is new until no page is open.

        The first document comes without the timeline, which follows at once: somebody waits.
        """
        document_due_s = live_due_s = 0.0
        has_news = self.is_shown
        if not self.is_shown:
            await asyncio.to_thread(self.read)
            self._publish("document", await asyncio.to_thread(self._build))
        state = self.state
        while True:
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            has_news |= await asyncio.to_thread(self.read)
            has_news |= state != self.state
            state = self.state
            if has_news and began_s >= document_due_s:
                self._publish("document", await asyncio.to_thread(self._build))
                has_news, spent_s = False, time.process_time() - began_cpu_s
                document_due_s = began_s + max(DOCUMENT_PERIOD_S, IDLE * spent_s)
            elif has_news or began_s >= live_due_s:
                self._publish("live", await asyncio.to_thread(self.build_live))
                live_due_s = began_s + DOCUMENT_PERIOD_S
            if not self.pages:
                self._reading = None
                return
            rest_s = IDLE * (time.process_time() - began_cpu_s)
            await asyncio.sleep(max(began_s + LIVE_PERIOD_S - time.monotonic(), rest_s))

    def _publish(self, kind: str, value: Mapping[str, Any]) -> None:
        message = f"event: {kind}\ndata: {_json(value)}\n\n".encode()
        self._published += 1
        if kind == "document":
            self._messages.clear()  # it says all that an older message did
        self._messages[kind] = self._published, message
        self._news.set()
        self._news = asyncio.Event()

    def read(self) -> bool:
        """Read what is new; whether anything was. A folder that is gone stays as it was."""
        with self._lock:
            has_news = False
            if not self.path.is_dir():
                return has_news
            with contextlib.suppress(UsageError, OSError):
                has_news = self._reader.read(has_timeline=self.is_shown)
            self.state, self.step = self._reader.data.status, self._reader.data.steps
            return has_news

    def _build(self) -> document.Json:
        with self._lock:
            return {**document.build(self._reader.data), "live": self._live()}

    def build_live(self) -> live.Json:
        """How the run is now."""
        with self._lock:
            return self._live()

    def _live(self) -> live.Json:
        runs = [{"name": e.name, "state": e.state, "step": e.step} for e in self._watched.runs]
        is_asked = os.path.lexists(self._reader.data.folder.record_request)
        found = {**live.build(self._reader.data), "recording": "asked" if is_asked else None}
        result: live.Json = bounded({"run": self.name, "runs": runs, **found})
        return result

    async def document(self) -> str:
        """The document as it is now, as JSON."""
        if self._reading is None:
            await asyncio.to_thread(self.read)
        return _json(await asyncio.to_thread(self._build))

    async def report(self) -> str:
        """The run as one file."""
        if self._reading is None:
            await asyncio.to_thread(self.read)
        return page.render(await asyncio.to_thread(self._build))

    async def ask_to_record(self) -> str:
        """Ask for the next step to be recorded; why that cannot be, if it cannot."""
        if self._reading is None:
            await asyncio.to_thread(self.read)
        if self.state != "running":
            return f"The run is not running: {self.state}."
        try:
            replace_file(RunFolder(self.path).record_request, [])
        except OSError as error:
            return f"The request cannot be written: {error.strerror}."
        return ""


class Watched:
    """The runs that a server shows, by name."""

    def __init__(self, paths: Sequence[Path]) -> None:
        names = [path.resolve().name for path in paths]
        for index, name in enumerate(names):
            if name in names[:index]:  # of two in different folders, the second gets a number
                names[index] = f"{name}-{index + 1}"
        self.runs = [Followed(n, path, self) for n, path in zip(names, paths, strict=True)]
        self.first = self.runs[0]

    @property
    def pages(self) -> int:
        """How many are open."""
        return sum(run.pages for run in self.runs)

    def find(self, name: str | None) -> Followed | None:
        """The run of that name; the first where no name is given."""
        return self.first if name is None else next((r for r in self.runs if r.name == name), None)


def _json(value: object) -> str:
    return json.dumps(plain_json(value), separators=(",", ":"), allow_nan=False)
