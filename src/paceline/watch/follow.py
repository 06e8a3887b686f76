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
from paceline.explain.report.run_data import RunData
from paceline.observe.run_folder import RunFolder, replace_file
from paceline.watch import live

LIVE_PERIOD_S, DOCUMENT_PERIOD_S = 0.25, 1.0
IDLE, SKETCH_IDLE = 20, 3
"""After some time of the processor there is so many times as long a rest, so that the training does
not notice: while a long run is read for the first time less, because somebody waits."""
SLICE_S = 0.2
"""For so long a run that is sketched is read at a time."""
SKETCHED = (
    "The run is long, and only some of its steps were read when this page was made: curves are "
    "sketched, and sums are too small."
)
SKETCHED_ABOVE_BYTES = 2**22
"""Larger event files than this, all together, are sketched first."""
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
        self.pages = 0
        """How many show it now."""
        self._lock = threading.Lock()
        """Around everything below: it is used in threads."""
        self._reader = RunReader(path)
        self._sketch: RunReader | None = None
        """What is shown until the reader has read everything."""
        if events_bytes(path) > SKETCHED_ABOVE_BYTES:
            self._sketch = RunReader(path, is_sketch=True)

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
        document_due_s = live_due_s = 0.0
        has_news, state = True, self.state
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
            rest_s = IDLE * (time.process_time() - began_cpu_s)
            if self._sketch is not None:
                rest_s = SKETCH_IDLE * SLICE_S
            await asyncio.sleep(max(began_s + LIVE_PERIOD_S - time.monotonic(), rest_s))

    def _publish(self, kind: str, value: Mapping[str, Any]) -> None:
        number, _ = self._messages.get(kind, (0, b""))
        message = f"event: {kind}\ndata: {_json(value)}\n\n".encode()
        self._messages[kind] = number + 1, message
        self._news.set()
        self._news = asyncio.Event()

    @property
    def _data(self) -> RunData:
        return (self._sketch or self._reader).data

    def read(self) -> bool:
        """Read what is new; whether anything was. A folder that is gone stays as it was."""
        with self._lock:
            has_news = False
            if not self.path.is_dir():
                return has_news
            with contextlib.suppress(UsageError, OSError):
                if self._sketch is not None:
                    has_news = self._sketch.read()
                    if self.is_shown:
                        self._reader.read(SLICE_S)
                    self._sketch.data.reading = self._reader.progress
                    self._sketch.data.notes["sketch"] = SKETCHED
                    if not self._reader.is_behind:
                        self._sketch = None
                else:
                    has_news = self._reader.read()
            self.state, self.step = self._data.status, self._data.steps
            return has_news or self._sketch is not None

    def _build(self) -> document.Json:
        with self._lock:
            return {**document.build(self._data), "live": self._live()}

    def build_live(self) -> live.Json:
        """How the run is now."""
        with self._lock:
            return self._live()

    def _live(self) -> live.Json:
        runs = [{"name": e.name, "state": e.state, "step": e.step} for e in self._watched.runs]
        is_asked = os.path.lexists(self._data.folder.record_request)
        found = {**live.build(self._data), "recording": "asked" if is_asked else None}
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


def events_bytes(path: Path) -> int:
    """How large the event files of a run are, all together."""
    with contextlib.suppress(OSError):
        return sum(each.lstat().st_size for each in RunFolder(path).events.iterdir())
    return 0


def _json(value: object) -> str:
    return json.dumps(plain_json(value), separators=(",", ":"), allow_nan=False)
