"""From a run folder to what is shown of it, in bounded memory, once or while the run continues.

Event files are read line by line, one rank after the other, and later only what was added. What is
missing, damaged or left out is remembered as a sentence, because a reader must know what the page
does not show. See Note [Long runs are sketched first].
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, WireError
from paceline.explain.report.bounds import amount, bounded, number, text, whole
from paceline.explain.report.curves import Curve
from paceline.explain.report.run_data import (
    EVENTS_LIMIT,
    KEPT_KINDS,
    LONGEST_STEPS,
    LongStep,
    RankTotals,
    RecentStep,
    RunData,
)
from paceline.explain.report.window import read_window
from paceline.observe.phases import OWN, Phase
from paceline.observe.run_folder import (
    Event,
    EventTail,
    RunFolder,
    open_plain,
    parse_event,
    read_info,
)
from paceline.observe.units import count_text, list_text
from paceline.record.schema import read as read_trace
from paceline.record.schema import read_document

METRICS_LIMIT = 12
RANKS_LIMIT = 1024
TRACES_LIMIT = 4
RUNS_LIMIT, FOLDERS_LIMIT = 3, 1000
"""Of runs that are named to whoever gives another folder, and of folders that are looked into."""
COMPARED_STEPS_LIMIT = 2**16
"""Of so many steps it is remembered who waited least in each; the rest is taken to be alike."""
WINDOW_PERIOD_S = 30.0
"""How old the window of the timelines may be: reading it takes a second."""
SKETCHED_LINES = 3000
"""So many steps of all ranks together are read for a sketch, spread over the run."""
SKETCHED_BYTES = 4096
"""Read at each place, for the first whole line in it."""
TAIL_BYTES = 2**15
SCANNED_BYTES = 2**26
"""Of the first rank's events, so many are searched for what is no step."""
CLOCK_PERIOD = 16
"""After how many lines the time is looked at."""
_PHASES = {str(phase): phase for phase in Phase}
_NO_STEP = re.compile(rb'\n(\{"kind":"(?!step")[^\n]*)')


def collect(path: Path) -> RunData:
    """Read a run folder in any state; a folder without anything of a run is an error."""
    reader = RunReader(path)
    reader.read()
    return reader.data


@dataclass(slots=True)
class Cursor:
    """How far one rank's events are read."""

    tail: EventTail
    size: int = 0
    """The file's, when it was last looked at."""
    damaged: int = 0
    before_t: float = 0.0
    before_step: int = 0
    """When the step or start before was written, and which it was."""


class RunReader:
    """Reads a run folder, and what is added to it later.

        new --read--> as the folder is --(the run writes)--> behind --read--> as the folder is

    Invariant: after `read`, `data` is what a reader that begins now would have, whatever it has
    read when. Where that cannot be had from what was added (steps are undone, a file is shorter
    than before), all is read again.
    """

    def __init__(self, path: Path, *, is_sketch: bool = False) -> None:
        if not path.is_dir():
            raise UsageError(
                f"There is no run folder {str(path)!r}.",
                advice="Give the folder that a run wrote, the one with run.json and events/ in it.",
            )
        self.folder = RunFolder(path)
        self.is_sketch = is_sketch
        """Whether of what is there now only some lines are read, and all of what comes."""
        self.is_behind = True
        """Whether there was more to read than there was time for."""
        self._seen: dict[Path, object] = {}
        """Of every document what told its version when it was read."""
        self._begin()

    def _begin(self) -> None:
        self.data = RunData(self.folder, name=self.folder.name)
        self._cursors: dict[int, Cursor] = {}
        self._starts: EventTail | None = None
        self._clock = -1
        """Whose clock counts for all."""
        self._seen.clear()
        self._window_due_s = 0.0

    @property
    def progress(self) -> float:
        """How much of the events is read, from 0 to 1."""
        size = sum(cursor.size for cursor in self._cursors.values())
        read = sum(cursor.tail.position for cursor in self._cursors.values())
        return min(1.0, read / size) if size else float(not self.folder.event_ranks())

    def read(self, limit_s: float = math.inf) -> bool:
        """Read what is new, for about `limit_s` seconds of the processor; whether there was any."""
        seen = dict(self._seen)
        self._read_documents()
        has_events = self._read_ranks(time.thread_time() + limit_s)
        data = self.data
        data.read_t = time.time()
        # In this order: a run that ends meanwhile says so in run.json before its processes end.
        for rank in data.ranks.values():
            rank.is_gone = rank.find_gone()
        data.is_gone = bool(data.ranks) and all(rank.is_gone for rank in data.ranks.values())
        self._read_info()
        _split_waiting(data)
        if data.is_empty and not data.notes:
            runs = [str(run) for run in find_runs(self.folder.path)]
            raise UsageError(
                f"{str(self.folder.path)!r} holds no run: no run.json, no events.",
                advice=f"Give the folder of a run: {list_text(runs, 'or')}."
                if runs
                else "Train one first.",
            )
        return has_events or seen != self._seen

    def _is_new(self, path: Path, version: object) -> bool:
        """Whether a document is another one than when this was asked before."""
        is_new = self._seen.get(path) != version
        self._seen[path] = version
        return is_new

    @contextlib.contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """What cannot be read is said on the page, and no more; what is not there is no news."""
        notes = self.data.notes
        notes.pop(what, None)
        try:
            yield
        except FileNotFoundError:
            pass
        except (WireError, OSError) as error:
            reason = error.what if isinstance(error, WireError) else f"{error}."
            notes[what] = f"{what} could not be read. {reason}"

    def _read_documents(self) -> None:
        """The recorded steps, the scaling study and the names of checkpoints, where there are any.

        And a window of the timelines, now and then.
        """
        data, folder = self.data, self.folder
        kept = _version(folder.checkpoints)
        if self._is_new(folder.checkpoints, kept):
            data.kept = []
            with contextlib.suppress(OSError):
                data.kept = [each.name for each in islice(os.scandir(folder.checkpoints), 2**16)]
        if self._is_new(folder.pipeline, _version(folder.pipeline)):
            self._read_traces()
        if self._is_new(folder.scaling, _version(folder.scaling)):
            data.study = None
            with self._noting("The scaling study"):
                study = bounded(read_document(folder.scaling))
                if not isinstance(study, dict):
                    raise WireError(f"{folder.scaling} is not an object.")
                data.study = study
        if time.monotonic() >= self._window_due_s:
            self._window_due_s = time.monotonic() + WINDOW_PERIOD_S
            data.timeline = read_window(folder)

    def _read_traces(self) -> None:
        data = self.data
        steps = self.folder.pipeline_steps()
        if len(steps) > TRACES_LIMIT:
            data.notes["traces"] = (
                f"{len(steps)} steps were recorded; the last {TRACES_LIMIT} are shown."
            )
        data.traces = []
        for step in steps[-TRACES_LIMIT:]:
            with self._noting(f"The recording of step {step}"):
                data.traces.append(read_trace(self.folder.pipeline_of(step)))

    def _read_info(self) -> None:
        data, info = self.data, self.folder.info
        if self._is_new(info, _version(info)):
            data.info = None
            with self._noting("The description of the run"):
                data.info = read_info(self.folder)
        for about in ("info", "events"):
            data.notes.pop(about, None)
        if data.info is None:
            if data.ranks and "The description of the run" not in data.notes:
                data.notes["info"] = (
                    "There is no run.json, so the settings of the run (seed, batch, model) are "
                    "unknown."
                )
            return
        data.name = text(data.info.name, 200) or data.name
        lost = sorted(set(range(min(data.info.workers, RANKS_LIMIT))) - set(data.ranks))
        if not data.ranks:
            data.notes["events"] = (
                "No worker has written events, so there are no curves and no times."
            )
        elif lost:
            shown = ", ".join(map(str, lost[:8])) + (" …" if len(lost) > 8 else "")
            data.notes["events"] = (
                f"There are no events of rank {shown}; sums leave their part out."
            )

    def _read_ranks(self, until_s: float) -> bool:
        """Read what is new of all ranks' events; whether anything was."""
        ranks = self.folder.event_ranks()
        sizes = {rank: _size(self.folder.events_of(rank)) for rank in ranks[:RANKS_LIMIT]}
        is_shorter = any(sizes.get(rank, 0) < each.size for rank, each in self._cursors.items())
        is_other_clock = bool(self._cursors and ranks and ranks[0] != self._clock)
        if is_shorter or is_other_clock or self._read_starts():
            self._begin()
            self._read_starts()
            self._read_documents()
        if len(ranks) > RANKS_LIMIT:
            self.data.notes["ranks"] = (
                f"Only the first {RANKS_LIMIT:,} of {len(ranks):,} ranks are read."
            )
        if self.is_sketch:
            self._read_info()  # for the size of a batch
        has_events = self.is_behind = False
        self._clock = ranks[0] if ranks else -1
        lines = SKETCHED_LINES // max(1, len(sizes))
        for rank, size in sizes.items():
            cursor = self._cursors.get(rank)
            if cursor is None:
                cursor = self._cursors[rank] = Cursor(EventTail(self.folder.events_of(rank)))
                self.data.ranks[rank] = RankTotals(rank)
            begin, is_first, cursor.size = cursor.tail.position, cursor.size == 0, size
            if size <= begin:
                continue
            if time.thread_time() > until_s:
                self.is_behind = True
                continue
            with self._noting(f"Some events of rank {rank}"):
                if is_first and self.is_sketch and size > 2 * TAIL_BYTES:
                    self._sketch_rank(rank, cursor, lines)
                for number_read, event in enumerate(cursor.tail.read()):
                    self._add(rank, cursor, event, is_compared=True)
                    if number_read % CLOCK_PERIOD == 0 and time.thread_time() > until_s:
                        self.is_behind = True
                        break
            has_events |= cursor.tail.position > begin
            if cursor.damaged:
                name = f"events/rank{rank}.jsonl"
                damaged = count_text(cursor.damaged, "line")
                self.data.notes[name] = f"{damaged} of {name} could not be read."
        if has_events and len(ranks) > 1:
            for kind, events in self.data.events.items():
                self.data.events[kind] = deque(sorted(events, key=_time), maxlen=events.maxlen)
        return has_events

    def _read_starts(self) -> bool:
        """Note when rank 0 began anew; whether that undoes anything that was read before.

        This comes before all else is read, so that what is undone is left out.
        """
        if self._starts is None:
            self._starts = EventTail(self.folder.events_of(0))
        found = list[tuple[float, int]]()
        with contextlib.suppress(WireError, OSError):
            pieces = (piece for piece in self._starts.pieces() if b'"start"' in piece)
            for line in (line for piece in pieces for line in piece.splitlines()):
                event = parse_event(line) if b'"start"' in line else None
                if event is not None and event["kind"] == "start":
                    found.append((amount(event["t"]), whole(event.get("step")) or 0))
        data = self.data
        undoes = any(
            recent.step > step and recent.t < t
            for t, step in found
            for rank in data.ranks.values()
            for recent in rank.recent
        )
        data.starts = sorted([*data.starts, *found][:EVENTS_LIMIT])
        for index in range(len(data.starts) - 1, 1, -1):
            (began, done), (_, later) = data.starts[index - 1 : index + 1]
            data.starts[index - 1] = began, min(done, later)
        return undoes

    def _sketch_rank(self, rank: int, cursor: Cursor, lines: int) -> None:
        """Read some steps in the order of the file, and all of the last ones.

        Where workers were replaced, and of the rank that writes for all, also what is no step.
        """
        data = self.data
        is_scanned = rank == self._clock or len(data.starts) > 1 or bool(data.events["generation"])
        with open_plain(self.folder.events_of(rank)) as file:
            file.seek(cursor.size - TAIL_BYTES)
            tail_at = cursor.tail.position = file.tell() + len(file.readline(TAIL_BYTES))
            beginning = EventTail(self.folder.events_of(rank))
            for piece in beginning.pieces():
                before = piece[: tail_at - (beginning.position - len(piece))]
                for found in _NO_STEP.finditer(b"\n" + before):
                    if (event := parse_event(found[1])) is not None:
                        self._add(rank, cursor, event)
                if not is_scanned or beginning.position >= min(tail_at, SCANNED_BYTES):
                    break
            for place in range(0, tail_at, max(SKETCHED_BYTES, tail_at // max(1, lines))):
                file.seek(place)
                lines_there = file.read(SKETCHED_BYTES).split(b"\n", 2)
                event = parse_event(lines_there[1]) if len(lines_there) == 3 else None
                if event is not None and event["kind"] == "step":
                    self._add(rank, cursor, event)

    def _add(
        self, rank_number: int, cursor: Cursor, event: Event | None, *, is_compared: bool = False
    ) -> None:
        """Add one event; the clock of one rank counts for all."""
        data, rank = self.data, self.data.ranks[rank_number]
        if event is None:
            cursor.damaged += 1
            return
        kind, t, step = event["kind"], amount(event["t"]), whole(event.get("step"))
        if t:
            data.first_t, data.last_t = min(data.first_t, t), max(data.last_t, t)
        if kind == "start":
            rank.host, rank.device = text(event.get("host", "")), text(event.get("device", ""))
            rank.pid = whole(event.get("pid")) or 0
            rank.size = whole(event.get("size"), 1) or rank.size
            cursor.before_t, cursor.before_step = t, step or 0
        elif kind == "message":
            data.events[kind].append({**bounded(event), "t": t})
        elif step is None:
            return
        elif data.is_undone(t, step):
            data.redone += kind == "step" and rank_number == 0
        elif kind == "step":
            self._add_step(rank, step, t, event, is_compared)
        elif kind in KEPT_KINDS:
            data.events[kind].append({**bounded(event), "t": t})
        if rank_number == self._clock and kind in ("step", "stop") and step is not None:
            passed_s = max(0.0, t - cursor.before_t) if cursor.before_t else 0.0
            samples = 0.0
            if self.is_sketch and data.info is not None:
                samples = data.info.global_batch * max(0, step - cursor.before_step)
            data.rate.add(step, samples, passed_s)
            cursor.before_t, cursor.before_step = t, step

    def _add_step(
        self, rank: RankTotals, step: int, t: float, event: Event, is_compared: bool
    ) -> None:
        data, samples = self.data, amount(event.get("samples"))
        rank.steps += 1
        rank.samples += samples
        rank.seconds += amount(event.get("seconds"))
        if not self.is_sketch:
            data.rate.add(step, samples, 0.0)
        if (lr := number(event.get("lr"))) is not None:
            data.lr.add(step, lr, 1.0)
        spent: dict[Phase, float] = {}
        for name, value in _items(event.get("phases")):
            phase = _PHASES.get(name, Phase.OTHER)
            spent[phase] = spent.get(phase, 0.0) + amount(value)
        for phase, seconds in spent.items():
            rank.measured[phase] = rank.measured.get(phase, 0.0) + seconds
        epoch = whole(event.get("epoch")) or 0
        rank.recent.append(RecentStep(step, t, epoch, samples, spent))
        own = {phase: seconds for phase, seconds in spent.items() if phase in OWN}
        for heap, parts in ((rank.longest_own, own), (rank.longest_whole, spent)):
            seconds = sum(parts.values())
            if parts and (len(heap) < LONGEST_STEPS or seconds > heap[0].seconds):
                heapq.heappush(heap, LongStep(seconds, step, max(parts, key=parts.__getitem__)))
                if len(heap) > LONGEST_STEPS:
                    heapq.heappop(heap)
        waits = data.least_waits
        if is_compared and (step in waits or len(waits) < COMPARED_STEPS_LIMIT):
            waited = spent.get(Phase.WAIT, 0.0)
            waits[step] = min(waited, waits.get(step, math.inf))
            rank.compared_wait_s += waited
        for name, value in _items(event.get("metrics")):
            pair = [number(each) for each in value] if isinstance(value, list) else []
            match pair:
                case [float() as total, float() as weight] if not weight <= 0:
                    if name in data.metrics or len(data.metrics) < METRICS_LIMIT:
                        data.metrics.setdefault(name, Curve()).add(step, total, weight)
                    else:
                        data.notes["metrics"] = f"Only the first {METRICS_LIMIT} metrics are shown."


def find_runs(path: Path, limit: int = RUNS_LIMIT) -> list[Path]:
    """Some run folders around a folder: the one it is in, and those in it."""
    found, folders = list[Path](), deque([path.parent, path])
    for _ in range(FOLDERS_LIMIT):
        if folders and len(found) < limit:
            folder = folders.popleft()
            if RunFolder(folder).info.is_file():
                found.append(folder)
            elif folder != path.parent:
                with contextlib.suppress(OSError):
                    entries = islice(os.scandir(folder), FOLDERS_LIMIT)
                    folders += sorted(Path(e) for e in entries if e.is_dir(follow_symlinks=False))
    return found


def _version(path: Path) -> object:
    """What differs when a file, or the list of files in a folder, is another one."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _time(event: Event) -> float:
    t: float = event["t"]
    return t


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _split_waiting(data: RunData) -> None:
    """Tell the transfer from waiting for others, which a rank by itself cannot.

    Who waits least in a step came last and waited for nobody: all its wait was the transfer.
    """
    ranks = data.ranks.values()
    for rank in ranks:
        rank.phases = dict(rank.measured)
    if len(ranks) < 2 or any(Phase.TRANSFER in rank.measured for rank in ranks):
        return
    moved = sum(data.least_waits.values())
    for rank in ranks:
        waited = rank.measured.get(Phase.WAIT, 0.0)
        if waited and moved:
            transfer = waited * min(1.0, moved / max(rank.compared_wait_s, 1e-12))
            rank.phases |= {Phase.WAIT: waited - transfer, Phase.TRANSFER: transfer}


# Note [Long runs are sketched first]
# Reading a step takes some 30 µs, so 100,000 steps of 8 workers take half a minute. A live page
# shows a sketch meanwhile: of each rank some lines at even distances and all of the last ones, and
# of the first rank, which writes for all, everything that is no step. Means, curves and the newest
# steps come out as they are; sums of steps and samples are those of the lines that were read.
# Another reader reads everything, a slice at a time, and replaces the sketch when it is done.
