"""Following runs: each is read once, in one task, however many pages show it.

A page has no queue: it remembers which version of each message it has sent, and takes the newest
when it can send more. So a slow page skips messages and delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, WireError
from paceline.files import RunFolder, read_info, read_log, replace_file
from paceline.show.report import document, page
from paceline.show.report.bounds import bounded
from paceline.show.report.collect import RunReader
from paceline.show.report.run_data import SILENT_S
from paceline.show.report.sketch import SKETCHED
from paceline.show.watch import live
from paceline.show.watch.machine import Machine

LIVE_PERIOD_S, DOCUMENT_PERIOD_S = 0.25, 1.0
REST_FACTOR = 20
"""After each reading the server rests this many times the CPU time it has used, so that it takes at
most a twentieth of a core from training."""
SKETCHED_ABOVE_BYTES, EXACT_UP_TO_BYTES = 2**21, 2**28
"""Above the first size, new events are sketched, so that a page opens within a second. Then, up to
the second size, all are read piece by piece, and exact numbers replace the estimates."""
BATCHES = 8
"""How many batches of events are read at a time meanwhile."""
KEEPALIVE_S = 15.0
LINES_LIMIT = 1000


class Followed:
    """One run, and the messages for its pages.

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
        """How many pages show the run now."""
        self._lock = threading.RLock()
        """Guards everything below, which is used in threads."""
        self._reader = RunReader(path, most_bytes=SKETCHED_ABOVE_BYTES)
        self._machine = Machine()
        self._info_version = -1
        self._settings: dict[str, Any] = {}
        self._exact: RunReader | None = None
        """Replaces a reader that has only sketched the run, once this one has read all."""

    @property
    def _is_sketched(self) -> bool:
        return "sketch" in self._reader.data.notes

    @property
    def is_shown(self) -> bool:
        """Whether there is a message for pages."""
        return bool(self._messages)

    def begin(self) -> None:
        """Start reading the run, because a page shows it or is about to."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._follow())

    async def messages(self) -> AsyncGenerator[bytes]:
        """Server-sent events for one page, the newest of each kind."""
        had: dict[str, int] = {}
        self.pages += 1
        self.begin()
        try:
            while True:
                # Taken before the messages are sent, so that news published meanwhile is not
                # missed.
                news = self._news
                for kind, (number, message) in list(self._messages.items()):
                    if had.get(kind) != number:
                        had[kind] = number
                        yield message
                try:
                    await asyncio.wait_for(news.wait(), KEEPALIVE_S)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.pages -= 1
            if not self.pages and self._reading is not None:
                self._reading.cancel()
                self._reading = None

    async def _follow(self) -> None:
        """Publish what is new until no page is open.

        The first document has no timeline, which follows at once, so that the page opens sooner.
        """
        document_due_s = live_due_s = 0.0
        has_news = self.is_shown
        if not self.is_shown:
            await asyncio.to_thread(self.read)
            self._publish("document", await asyncio.to_thread(self._build))
        state = self._watched.states()
        while True:
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            is_sketched, before = self._is_sketched, self.state
            has_news |= await asyncio.to_thread(self.read)
            await asyncio.to_thread(self.read_exactly)
            has_news |= is_sketched and not self._is_sketched
            has_news |= state != self._watched.states()
            state = self._watched.states()
            # A page that hears of the end must not tell what it knew while the run continued.
            if has_news and (began_s >= document_due_s or self.state != before):
                self._publish("document", await asyncio.to_thread(self._build))
                has_news, spent_s = False, time.process_time() - began_cpu_s
                document_due_s = began_s + max(DOCUMENT_PERIOD_S, REST_FACTOR * spent_s)
            elif has_news or began_s >= live_due_s:
                self._publish("live", await asyncio.to_thread(self.build_live))
                live_due_s = began_s + DOCUMENT_PERIOD_S
            if not self.pages:
                self._reading = None
                return
            rest_s = REST_FACTOR * (time.process_time() - began_cpu_s)
            period_s = 0.0 if self._exact else LIVE_PERIOD_S
            await asyncio.sleep(max(began_s + period_s - time.monotonic(), rest_s))

    def _publish(self, kind: str, value: Mapping[str, Any]) -> None:
        message = f"event: {kind}\ndata: {page.compact_json(value)}\n\n".encode()
        self._published += 1
        if kind == "document":
            self._messages.clear()  # a document includes all that older messages had
        self._messages[kind] = self._published, message
        # A new event for each publication: every page waits on the one that it has seen.
        self._news.set()
        self._news = asyncio.Event()

    def read(self) -> bool:
        """Read what is new; returns whether anything was. Data of a deleted folder is kept."""
        with self._lock:
            has_news = False
            if not self.path.is_dir():
                self.state = "unknown"  # the folder was deleted
                return has_news
            with contextlib.suppress(UsageError, OSError):
                has_news = self._reader.read(has_timeline=self.is_shown)
            self.state, self.step = self._reader.data.status, self._reader.data.steps
            return has_news

    def read_exactly(self) -> bool:
        """Read a piece of what was only sketched; returns whether there is more."""
        with self._lock:
            data = self._reader.data
            if not self._is_sketched or not self.path.is_dir():
                return False
            if self._reader.size > EXACT_UP_TO_BYTES:
                return False
            self._exact = self._exact or RunReader(self.path)
            with contextlib.suppress(UsageError, OSError):
                self._exact.read(has_timeline=False, most_batches=BATCHES)
            data.notes["sketch"] = f"{SKETCHED}, until all are read, in a minute or two."
            if not self._exact.is_behind:
                self._reader, self._exact = self._exact, None
            return self._exact is not None

    def _build(self) -> document.Json:
        with self._lock:
            built, runs = document.build(self._reader.data), self._watched.runs
            listed = bounded([run.describe() for run in runs]) if len(runs) > 1 else None
            return {**built, "live": self.build_live(), "runs": listed}

    def build_live(self) -> live.Json:
        """The current state of the run."""
        runs = [run.name_state() for run in self._watched.runs]
        with self._lock:
            is_asked = os.path.lexists(self._reader.data.folder.record_request)
            built = live.build(self._reader.data, self._machine)
        found = {**built, "recording": "asked" if is_asked else None}
        result: live.Json = bounded({"run": self.name, "runs": runs, **found})
        return result

    def read_status(self) -> None:
        """Read only `run.json`, if it has changed: enough for the list of runs."""
        folder = RunFolder(self.path)
        try:
            version = folder.info.lstat().st_mtime_ns
            info = read_info(folder) if version != self._info_version else None
        except (OSError, WireError):
            return
        self._info_version = version
        if info is None:
            return
        chosen = ("seed", "epochs", "global_batch", "workers", "model")
        self._settings = {**{name: getattr(info, name) for name in chosen}, **info.settings}
        if not self.is_shown:
            is_silent = info.status == "running" and time.time() - info.updated > SILENT_S
            self.state, self.step = "silent" if is_silent else info.status, info.step

    def describe(self) -> dict[str, Any]:
        """The run's entry in the list of runs, with its settings."""
        return {**self.name_state(), "settings": self._settings}

    def name_state(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "step": self.step}

    async def _catch_up(self) -> None:
        if self._reading is None:
            await asyncio.to_thread(self.read)

    async def document(self) -> str:
        """The document as it is now, as JSON."""
        await self._catch_up()
        return page.compact_json(await asyncio.to_thread(self._build))

    async def report(self) -> str:
        """The run's report as one HTML file."""
        await self._catch_up()
        while await asyncio.to_thread(self.read_exactly):
            pass
        return page.render(await asyncio.to_thread(self._build))

    async def search(self, wanted: str) -> list[Any]:
        """The newest lines of the output that contain these words."""
        folder = RunFolder(self.path)
        found = await asyncio.to_thread(read_log, folder, LINES_LIMIT, wanted=wanted)
        lines: list[Any] = bounded(found)
        return lines

    async def ask_to_record(self) -> str:
        """Request a recording of the next step; returns the reason if that is impossible."""
        await self._catch_up()
        if self.state != "running":
            return f"The run is not running: {self.state}."
        try:
            replace_file(RunFolder(self.path).record_request, [])
        except OSError as error:
            return f"The request cannot be written: {error.strerror}."
        return ""


class Watched:
    """The runs that a server shows, by name, and those that begin later.

    While there is none, `first` is the folder in which one may begin.
    """

    def __init__(self, paths: Sequence[Path], find: Callable[[], Sequence[Path]] = list) -> None:
        self.runs: list[Followed] = []
        self._find = find
        for path in paths:
            self._add(path)
        self.first = self.runs[0]

    def _add(self, path: Path) -> None:
        names, own = {run.name for run in self.runs}, os.path.basename(os.path.realpath(path))
        # Of several in different folders, all but the first get a number.
        numbered = chain([own], (f"{own}-{number}" for number in count(2)))
        name = next(each for each in numbered if each not in names)
        self.runs.append(Followed(name, path, self))
        self.runs[-1].read_status()

    def refresh(self) -> bool:
        """Find new runs, and read the others' status; returns whether there are new ones."""
        for run in self.runs:
            run.read_status()
        known = {run.path for run in self.runs}
        with contextlib.suppress(UsageError, OSError):
            new = [path for path in self._find() if path not in known]
            for path in new:
                self._add(path)
            if new and not RunFolder(self.first.path).info.is_file():
                self.runs.remove(self.first)
                self.first = self.runs[0]
            return bool(new)
        return False

    def states(self) -> list[tuple[str, str]]:
        """Names and states; if they change, the list of runs has changed."""
        return [(run.name, run.state) for run in self.runs]

    @property
    def pages(self) -> int:
        """How many pages are open."""
        return sum(run.pages for run in self.runs)

    def find(self, name: str | None) -> Followed | None:
        """The run of that name; the first where no name is given."""
        return self.first if name is None else next((r for r in self.runs if r.name == name), None)
