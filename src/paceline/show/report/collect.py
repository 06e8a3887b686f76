"""Reading a run folder for a page, in bounded memory, once or while the run continues.

Event files are read line by line, one rank after the other, and later only what was added. What is
missing, damaged or left out becomes a sentence: readers must know what the page does not show.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceline import env
from paceline.errors import UsageError, WireError
from paceline.files import Event, EventTail, RunFolder, parse_event, read_info
from paceline.record import read as read_trace
from paceline.record import read_document
from paceline.show.report import sketch, window
from paceline.show.report.bounds import LARGEST_AMOUNT, amount, bounded, number, text, whole
from paceline.show.report.curves import Curve
from paceline.show.report.pace import RecentStep, find_spans
from paceline.show.report.run_data import (
    EVENTS_LIMIT,
    KEPT_KINDS,
    LONGEST_STEPS,
    LongStep,
    RankTotals,
    RunData,
)
from paceline.telemetry import OWN, Phase, count_text, list_text

METRICS_LIMIT = 12
RANKS_LIMIT = 1024
TRACES_LIMIT = 4
RUNS_LIMIT, FOLDERS_LIMIT = 3, 1000
"""How many runs an error message suggests, and how many folders are searched for them."""
COMPARED_STEPS_LIMIT = 2**16
"""For how many steps the shortest wait is kept; the others are assumed to be similar."""
WINDOW_PERIOD_S = 30.0
"""How often the window of the timelines is read again, which takes a second."""
_PHASES = {str(phase): phase for phase in Phase}


def collect(path: Path) -> RunData:
    """Read a run folder in any state; raises for a folder without any file of a run."""
    reader = RunReader(path)
    reader.read()
    return reader.data


def check_folder(path: Path) -> None:
    if not path.is_dir():
        raise UsageError(
            f"There is no run folder {str(path)!r}.",
            advice="Name the folder that a run wrote, the one with run.json and events/ in it.",
        )


@dataclass(slots=True)
class Cursor:
    """How far one rank's events are read."""

    rank: RankTotals
    tail: EventTail
    size: int = 0
    """The file's size when it was last checked."""
    damaged: int = 0
    before_t: float = 0.0
    before_step: int = 0
    """The time and number of the previous step or start."""
    is_behind_gap: bool = False
    """Whether steps between the previous one and the next were left out."""


class RunReader:
    """Reads a run folder, and what is added to it later.

        new --read--> up to date --(the run writes)--> behind --read--> up to date

    Invariant: after `read`, `data` is what a new reader would have. Where that cannot be computed
    from what was added (steps are undone, a file has become shorter), all is read again.

    If there are more than `most_bytes` of new events, only a sample of them and their end is read:
    that takes part of a second, means and curves are estimates, and a note says so.
    """

    def __init__(self, path: Path, *, most_bytes: float = math.inf) -> None:
        check_folder(path)
        self.folder = RunFolder(path)
        self._most_bytes = most_bytes
        self.is_behind = False
        """Whether the last reading was cut short by its limit."""
        self._seen: dict[Path, object] = {}
        """The version of every document when it was read."""
        self._begin()

    def _begin(self) -> None:
        self.data = RunData(self.folder, name=self.folder.name)
        self._cursors: dict[int, Cursor] = {}
        self._starts: EventTail | None = None
        self._clock = -1
        """The rank whose times are used for speeds: clocks of machines differ."""
        self._seen.clear()
        self._window_due_s = 0.0
        self._is_judged = True
        """Whether slow workers have been searched for in all that was read."""

    @property
    def size(self) -> int:
        """How many bytes of events there were at the last reading."""
        return sum(cursor.size for cursor in self._cursors.values())

    def read(self, *, has_timeline: bool = True, most_batches: int | None = None) -> bool:
        """Read what is new; returns whether there was any. Without timeline it takes half the time.

        With `most_batches`, `is_behind` is set if there is more to read.
        """
        seen = dict(self._seen)
        self._read_documents()
        has_events = self._read_ranks(most_batches)
        if has_timeline:
            self._read_timeline()
        data = self.data
        data.read_t = time.time()
        # Processes first, then run.json: a run that ends writes run.json before its processes end,
        # so one that ends between the two readings is not taken for killed.
        for rank in data.ranks.values():
            rank.is_gone = rank.is_here and env.read_process(rank.pid)[0] in (b"", b"Z")  # a zombie
        data.is_gone = bool(data.ranks) and all(rank.is_gone for rank in data.ranks.values())
        self._read_info()
        _split_waiting(data)
        self._is_judged &= not has_events
        if not self._is_judged and not self.is_behind:
            self._is_judged = True
            data.slow = find_spans(
                {rank.rank: rank.pace for rank in data.ranks.values()},
                {rank.rank: rank.recent for rank in data.ranks.values()},
            )
        if data.is_empty and not data.notes:
            runs = [str(run) for run in find_runs(self.folder.path)]
            raise UsageError(
                f"{str(self.folder.path)!r} has no run: no run.json, no events.",
                advice=f"Name the folder of a run: {list_text(runs, 'or')}."
                if runs
                else "Train one first.",
            )
        return has_events or seen != self._seen

    def _is_new(self, path: Path, version: object) -> bool:
        """Whether a document's version has changed since the last call."""
        is_new = self._seen.get(path) != version
        self._seen[path] = version
        return is_new

    @contextlib.contextmanager
    def _noting_errors(self, what: str) -> Iterator[None]:
        """Turn a file that cannot be read into a note on the page; a missing one is ignored."""
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
        """The recorded steps, the scaling study and the names of checkpoints."""
        data, folder = self.data, self.folder
        if self._is_new(folder.checkpoints, _version(folder.checkpoints)):
            data.kept = []
            with contextlib.suppress(OSError):
                data.kept = [each.name for each in islice(os.scandir(folder.checkpoints), 2**16)]
        if self._is_new(folder.pipeline, _version(folder.pipeline)):
            self._read_traces()
        if self._is_new(folder.scaling, _version(folder.scaling)):
            data.study = None
            with self._noting_errors("The scaling study"):
                study = bounded(read_document(folder.scaling))
                if not isinstance(study, dict):
                    raise WireError(f"{folder.scaling} is not an object.")
                data.study = study

    def _read_timeline(self) -> None:
        """Read a window of the timelines, at intervals while they are written."""
        if time.monotonic() < self._window_due_s:
            return
        self._window_due_s = time.monotonic() + WINDOW_PERIOD_S
        folder = self.folder
        versions = [_version(folder.timeline_of(rank)) for rank in range(window.RANKS_LIMIT)]
        if self._is_new(folder.timeline, versions):
            self.data.timeline = window.read_window(folder)

    def _read_traces(self) -> None:
        data = self.data
        steps = self.folder.pipeline_steps()
        if len(steps) > TRACES_LIMIT:
            data.notes["traces"] = (
                f"{len(steps)} steps were recorded; the last {TRACES_LIMIT} are shown."
            )
        data.traces = []
        for step in steps[-TRACES_LIMIT:]:
            with self._noting_errors(f"The recording of step {step}"):
                data.traces.append(read_trace(self.folder.pipeline_of(step)))

    def _read_info(self) -> None:
        data, info = self.data, self.folder.info
        if self._is_new(info, _version(info)):
            data.info = None
            with self._noting_errors("The description of the run"):
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
                f"There are no events of worker {shown}; sums leave their part out."
            )

    def _read_ranks(self, most_batches: int | None) -> bool:
        """Read what is new in all ranks' events; returns whether anything was."""
        ranks = self.folder.event_ranks()
        sizes = {rank: _version(self.folder.events_of(rank))[0] for rank in ranks[:RANKS_LIMIT]}
        is_shorter = any(sizes.get(rank, 0) < each.size for rank, each in self._cursors.items())
        is_other_clock = bool(self._cursors and ranks and ranks[0] != self._clock)
        if is_shorter or is_other_clock or self._read_starts():
            self._begin()
            self._read_starts()
            self._read_documents()
        if len(ranks) > RANKS_LIMIT:
            self.data.notes["ranks"] = (
                f"Only the first {RANKS_LIMIT:,} of {len(ranks):,} workers are read."
            )
        has_events, self._clock = False, ranks[0] if ranks else -1
        for rank in sizes.keys() - self._cursors.keys():
            totals = self.data.ranks[rank] = RankTotals(rank)
            self._cursors[rank] = Cursor(totals, EventTail(self.folder.events_of(rank)))
        unread = sum(size - self._cursors[rank].tail.position for rank, size in sizes.items())
        if is_long := unread > self._most_bytes:
            self._read_info()  # for the size of a batch
        left = most_batches
        for rank, size in sizes.items():
            cursor = self._cursors[rank]
            begin, cursor.size = cursor.tail.position, size
            if size <= begin:
                continue
            with self._noting_errors(f"Some events of worker {rank}"):
                if is_long:
                    self._skip_ahead(cursor, len(sizes))
                for batch in islice(cursor.tail.batches(), left):
                    for event in batch:
                        self._add(cursor, event)
                    left = left and left - 1
            has_events |= cursor.tail.position > begin
            if cursor.damaged:
                name = f"events/rank{rank}.jsonl"
                damaged = count_text(cursor.damaged, "line")
                self.data.notes[name] = f"{damaged} of {name} could not be read."
        self.is_behind = left == 0
        if has_events and len(ranks) > 1:
            for kind, events in self.data.events.items():
                self.data.events[kind] = deque(
                    sorted(events, key=itemgetter("t")), maxlen=events.maxlen
                )
        return has_events

    def _read_starts(self) -> bool:
        """Note when rank 0 has restarted; returns whether that undoes steps that were read.

        Called before other events are read, so that undone steps are left out.
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

    def _skip_ahead(self, cursor: Cursor, ranks: int) -> None:
        """Read a sample of one rank's new events, up to the part that is read completely."""
        data, path = self.data, cursor.tail.path
        begin, end = cursor.tail.position, sketch.find_tail(path, cursor.size, ranks)
        if end <= begin:
            return
        scanned_bytes = sketch.SCANNED_BYTES
        if cursor.rank.rank != self._clock:
            is_stable = len(data.starts) < 2 and not data.events["generation"]
            scanned_bytes //= ranks * (sketch.STABLE if is_stable else 1)
        lines = sketch.choose_lines(
            path, begin, end, steps=sketch.STEPS // ranks, scanned_bytes=scanned_bytes
        )
        data.notes["sketch"] = f"{sketch.SKETCHED}; `paceline report` reads every step."
        for event in filter(None, map(parse_event, lines)):
            cursor.is_behind_gap = True
            self._add(cursor, event)
        cursor.is_behind_gap, cursor.tail.position = True, end

    def _add(self, cursor: Cursor, event: Event | None) -> None:
        """Add one event."""
        data, rank = self.data, cursor.rank
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
        elif step is not None and kind == "step":
            self._add_step(cursor, step, t, event)
        elif step is not None and kind in KEPT_KINDS and not data.is_undone(t, step):
            data.events[kind].append({**bounded(event), "t": t})
        if step is None:
            return
        if kind == "stop":
            data.rate.add(step, 0.0, self._passed_s(cursor, t))
        if kind in ("step", "stop"):
            cursor.before_t, cursor.before_step = t, step
            cursor.is_behind_gap = False

    def _passed_s(self, cursor: Cursor, t: float) -> float:
        """Time since the previous step, for the rank whose clock is used; 0 for others."""
        is_known = cursor.rank.rank == self._clock and cursor.before_t
        return max(0.0, t - cursor.before_t) if is_known else 0.0

    def _add_step(self, cursor: Cursor, step: int, t: float, event: Event) -> None:
        """Add a step, which also stands for the steps before it that were left out."""
        data, rank, samples = self.data, cursor.rank, amount(event.get("samples"))
        is_exact = not cursor.is_behind_gap
        count = 1 if is_exact else max(1, step - cursor.before_step)
        if data.is_undone(t, step):
            data.redone += count if rank.rank == 0 else 0
            return
        rank.steps += count
        rank.samples += count * samples
        is_clock, passed_s = rank.rank == self._clock, self._passed_s(cursor, t)
        if "sketch" in data.notes:
            is_known = is_clock and data.info is not None
            samples_of_all = count * data.info.global_batch if is_known and data.info else 0
            data.rate.add(step, float(samples_of_all), passed_s)
        else:
            data.rate.add(step, samples, passed_s)
        data.last_step_t = max(data.last_step_t, t)
        lr = number(event.get("lr")) if is_clock else None
        if lr is not None:
            data.lr.add(step, lr, 1.0)
        spent, own_s = _read_phases(event.get("phases"))
        measured = rank.measured
        for phase, seconds in spent.items():
            measured[phase] = measured.get(phase, 0.0) + count * seconds
        metrics = event.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            if type(value) is not list or len(value) != 2:
                continue
            total, weight = number(value[0]), number(value[1])
            if total is None or weight is None or weight <= 0:
                continue
            curve = data.metrics.get(name)
            if curve is None and len(data.metrics) < METRICS_LIMIT:
                curve = data.metrics[name] = Curve()
            if curve is not None:
                curve.add(step, total, weight)
            else:
                data.notes["metrics"] = f"Only the first {METRICS_LIMIT} metrics are shown."
        if is_exact:
            epoch, queued = whole(event.get("epoch")) or 0, whole(event.get("queued"))
            rank.recent.append(RecentStep(step, t, epoch, samples, spent, queued))
            _compare(data, rank, step, spent, own_s)
        if own_s:
            rank.pace.add(step, spent, own_s)


def _read_phases(value: Any) -> tuple[dict[Phase, float], float]:
    """Seconds by phase, and how many of these are own work."""
    if type(value) is not dict:
        return {}, 0.0
    phases, own = _find_phases(tuple(value))
    each = [
        s if type(s) is float and 0.0 <= s < LARGEST_AMOUNT else amount(s) for s in value.values()
    ]
    spent = dict(zip(phases, each, strict=True))
    if len(spent) < len(each):  # several unknown phases, which count as OTHER
        spent[Phase.OTHER] = sum(s for p, s in zip(phases, each, strict=True) if p is Phase.OTHER)
    return spent, sum([each[index] for index in own])


@lru_cache(maxsize=64)
def _find_phases(names: tuple[str, ...]) -> tuple[list[Phase], list[int]]:
    """The phases of these names, and the indices of those that are own work."""
    phases = [_PHASES.get(name, Phase.OTHER) for name in names]
    return phases, [index for index, phase in enumerate(phases) if phase in OWN]


def _compare(
    data: RunData, rank: RankTotals, step: int, spent: dict[Phase, float], own_s: float
) -> None:
    """Record one rank's step for comparisons: long steps, and the shortest wait of any rank."""
    whole_s = sum(spent.values())
    for heap, seconds in ((rank.longest_own, own_s), (rank.longest_whole, whole_s)):
        if seconds and (len(heap) < LONGEST_STEPS or seconds > heap[0].seconds):
            is_own = heap is rank.longest_own
            parts = {p: s for p, s in spent.items() if p in OWN} if is_own else spent
            heapq.heappush(heap, LongStep(seconds, step, max(parts, key=parts.__getitem__)))
            if len(heap) > LONGEST_STEPS:
                heapq.heappop(heap)
    waits = data.least_waits
    if step in waits or len(waits) < COMPARED_STEPS_LIMIT:
        waited = spent.get(Phase.WAIT, 0.0)
        waits[step] = min(waited, waits.get(step, math.inf))
        rank.compared_wait_s += waited


def find_runs(path: Path, limit: int = RUNS_LIMIT) -> list[Path]:
    """Some run folders near a folder: its parent, and those inside it, with their islands."""
    found, folders = list[Path](), deque([path.parent, path])
    for _ in range(FOLDERS_LIMIT):
        if folders and len(found) < limit:
            folder = folders.popleft()
            if RunFolder(folder).info.is_file():
                found.append(folder)
                if folder != path.parent:
                    folders.extendleft(sorted(folder.glob("island-*"), reverse=True))
            elif folder != path.parent:
                with contextlib.suppress(OSError):
                    entries = islice(os.scandir(folder), FOLDERS_LIMIT)
                    folders += sorted(Path(e) for e in entries if e.is_dir(follow_symlinks=False))
    return found


def _version(path: Path) -> tuple[int, int, int]:
    """Size, inode and time of a file or folder, which differ between versions."""
    try:
        found = path.lstat()
    except OSError:
        return 0, 0, 0
    return found.st_size, found.st_ino, found.st_mtime_ns


def _split_waiting(data: RunData) -> None:
    """Split waits into transfer and waiting for others, which needs all ranks' times.

    The rank that waits least in a step came last, so all its wait was the transfer; unless the last
    one died in that step, and all others have waited for it.
    """
    ranks, repeated = data.ranks.values(), {each["step"] + 1 for each in data.events["generation"]}
    for rank in ranks:
        rank.phases = dict(rank.measured)
    if len(ranks) < 2 or any(Phase.TRANSFER in rank.measured for rank in ranks):
        return
    moved = sum(wait for step, wait in data.least_waits.items() if step not in repeated)
    for rank in ranks:
        waited = rank.measured.get(Phase.WAIT, 0.0)
        if waited and moved:
            transfer = waited * min(1.0, moved / max(rank.compared_wait_s, 1e-12))
            rank.phases |= {Phase.WAIT: waited - transfer, Phase.TRANSFER: transfer}
