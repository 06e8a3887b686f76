"""From a run folder to what the report shows of it, in bounded memory.

Event files are read line by line, one rank after the other. What is missing, damaged or left out is
remembered as a sentence, because a reader must know what the page does not show.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import UsageError, WireError
from paceline.explain.report.bounds import amount, bounded, number, text, whole
from paceline.explain.report.curves import Curve
from paceline.explain.report.window import read_window
from paceline.observe.phases import OWN, Phase
from paceline.observe.run_folder import Event, RunFolder, RunInfo, read_info, stream_events
from paceline.observe.units import count_text, list_text
from paceline.record.schema import read as read_trace
from paceline.record.schema import read_document
from paceline.record.stages import Trace

METRICS_LIMIT = 12
METRICS_LEFT_OUT = f"Only the first {METRICS_LIMIT} metrics are shown."
RANKS_LIMIT = 1024
EVENTS_LIMIT = 1000
"""The most epochs, checkpoints, messages and so on that are kept; the oldest leave first."""
TRACES_LIMIT = 4
RUNS_LIMIT, FOLDERS_LIMIT = 3, 1000
"""Of runs that are named to whoever gives another folder, and of folders that are looked into."""
RECENT_STEPS = 100
LONGEST_STEPS = 32
"""How many of a rank's longest steps are remembered."""
COMPARED_STEPS_LIMIT = 2**16
"""Of so many steps it is remembered who waited least in each; the rest is taken to be alike."""
SILENT_S, SILENT_STEPS = 300.0, 50
"""Silence, in seconds and in usual steps, after which a run is not taken to be running."""
KEPT_KINDS = (
    *("epoch", "evaluation", "checkpoint", "message", "noise", "blame", "generation", "stop"),
)
_PHASES = {str(phase): phase for phase in Phase}


class LongStep(NamedTuple):
    """A step of one rank, and what took longest in it."""

    seconds: float
    step: int
    phase: Phase


class RecentStep(NamedTuple):
    """One of a rank's last steps."""

    step: int
    t: float
    epoch: int
    samples: float
    phases: dict[Phase, float]


@dataclass(slots=True)
class RankTotals:
    """What one worker did in the whole run."""

    rank: int
    host: str = ""
    pid: int = 0
    device: str = ""
    size: int = 1
    steps: int = 0
    samples: float = 0
    seconds: float = 0
    phases: dict[Phase, float] = field(default_factory=dict)
    compared_wait_s: float = 0
    """Waiting in the steps that are compared with the other ranks'."""
    longest_own: list[LongStep] = field(default_factory=list)
    longest_whole: list[LongStep] = field(default_factory=list)
    """Heaps of its longest steps: by its own work, and with all waiting."""
    recent: deque[RecentStep] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    @property
    def own_s(self) -> float:
        """Seconds of own work in a step, on average; 0 where no phase was measured."""
        return sum(self.phases.get(phase, 0.0) for phase in OWN) / max(1, self.steps)

    @property
    def is_here(self) -> bool:
        """Whether its process is, or was, one of this machine's that can be asked about."""
        return self.host == socket.gethostname() and os.path.isdir("/proc/self")

    def is_gone(self) -> bool:
        """Whether its process has ended, as far as this machine can tell: a zombie has."""
        if not self.is_here:
            return False
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
        except OSError:
            return True


@dataclass(slots=True)
class RunData:
    """Everything that was read of a run folder."""

    folder: RunFolder
    name: str
    info: RunInfo | None = None
    ranks: dict[int, RankTotals] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    lr: Curve = field(default_factory=Curve)
    rate: Curve = field(default_factory=Curve)
    """Samples of all workers by the time that passed, from the end of one step to the next's."""
    events: dict[str, deque[Event]] = field(
        default_factory=lambda: {kind: deque(maxlen=EVENTS_LIMIT) for kind in KEPT_KINDS}
    )
    """What happened other than steps, by kind."""
    first_t: float = math.inf
    last_t: float = -math.inf
    least_waits: dict[int, float] = field(default_factory=dict)
    """By step: the shortest wait of any rank."""
    read_t: float = field(default_factory=time.time)
    """When the folder was read."""
    is_gone: bool = False
    """Whether all its processes had ended before `run.json` was read."""
    starts: list[tuple[float, int]] = field(default_factory=list)
    """When rank 0 began, and after which step at that time or later, in order of time."""
    redone: int = 0
    """Steps of rank 0 that a restart has undone, and that were trained again."""
    kept: list[str] = field(default_factory=list)
    """The names in the folder of checkpoints."""
    traces: list[Trace] = field(default_factory=list)
    timeline: dict[str, Any] | None = None
    study: dict[str, Any] | None = None
    """What `scaling.json` says."""
    missing: list[str] = field(default_factory=list)
    """What the page cannot show, in words."""

    @property
    def steps(self) -> int:
        """Steps applied, as far as anybody has written it down."""
        curves = [self.rate, *self.metrics.values()]
        return max([self.info.step if self.info else 0, *(curve.last for curve in curves)])

    @property
    def workers(self) -> int:
        sizes = [rank.size for rank in self.ranks.values()]
        return max([self.info.workers if self.info else 0, *sizes, 0])

    @property
    def status(self) -> str:
        """What `run.json` says, unless that is "running" and the run has ended all the same."""
        said = self.info.status if self.info else "unknown"
        if said != "running":
            return said
        steps_s = [rank.seconds / rank.steps for rank in self.ranks.values() if rank.steps]
        patience_s = max(SILENT_S, SILENT_STEPS * max(steps_s, default=0.0))
        return "killed" if self.is_gone else "silent" if self.silent_s > patience_s else said

    @property
    def silent_s(self) -> float:
        """For how long nothing had been written when the folder was read."""
        return max(0.0, self.read_t - self.last_t) if self.last_t > 0 else 0.0

    def is_undone(self, t: float, step: int) -> bool:
        """Whether a restart later than `t` has begun before `step`."""
        later = max(1, bisect.bisect_right(self.starts, (t, math.inf)))
        return later < len(self.starts) and self.starts[later][1] < step

    @property
    def has_run(self) -> bool:
        return self.info is not None or bool(self.ranks)

    @property
    def is_empty(self) -> bool:
        return not (self.has_run or self.traces or self.study or self.timeline)


def collect(path: Path) -> RunData:
    """Read a run folder in any state; a folder without anything of a run is an error."""
    if not path.is_dir():
        raise UsageError(
            f"There is no run folder {str(path)!r}.",
            advice="Give the folder that a run wrote, the one with run.json and events/ in it.",
        )
    folder = RunFolder(path)
    data = RunData(folder, name=folder.name, timeline=read_window(folder))
    _read_documents(data)
    _read_ranks(data)
    # In this order: a run that ends meanwhile says so in run.json before its processes end.
    data.is_gone = bool(data.ranks) and all(rank.is_gone() for rank in data.ranks.values())
    _read_info(data)
    _split_waiting(data)
    if data.is_empty and not data.missing:
        runs = [str(run) for run in _find_runs(path)]
        advice = (
            f"Give the folder of a run: {list_text(runs, 'or')}." if runs else "Train one first."
        )
        raise UsageError(f"{str(path)!r} holds no run: no run.json, no events.", advice=advice)
    return data


def _find_runs(path: Path) -> list[Path]:
    """Some run folders around a folder: the one it is in, and those in it."""
    found, folders = list[Path](), deque([path.parent, path])
    for _ in range(FOLDERS_LIMIT):
        if folders and len(found) < RUNS_LIMIT:
            folder = folders.popleft()
            if RunFolder(folder).info.is_file():
                found.append(folder)
            elif folder != path.parent:
                with contextlib.suppress(OSError):
                    entries = islice(os.scandir(folder), FOLDERS_LIMIT)
                    folders += sorted(Path(e) for e in entries if e.is_dir(follow_symlinks=False))
    return found


@contextlib.contextmanager
def _noting(data: RunData, what: str) -> Iterator[None]:
    """What cannot be read is said on the page and nothing else; what is not there is no news."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (WireError, OSError) as error:
        reason = error.what if isinstance(error, WireError) else f"{error}."
        data.missing.append(f"{what} could not be read. {reason}")


def _read_documents(data: RunData) -> None:
    """The recorded steps, the scaling study and the names of checkpoints, where there are any."""
    with contextlib.suppress(OSError):
        data.kept = [each.name for each in islice(os.scandir(data.folder.checkpoints), 2**16)]
    steps = data.folder.pipeline_steps()
    if len(steps) > TRACES_LIMIT:
        data.missing.append(
            f"{len(steps)} steps were recorded; the first {TRACES_LIMIT} are shown."
        )
    for step in steps[:TRACES_LIMIT]:
        with _noting(data, f"The recording of step {step}"):
            data.traces.append(read_trace(data.folder.pipeline_of(step)))
    with _noting(data, "The scaling study"):
        study = bounded(read_document(data.folder.scaling))
        if not isinstance(study, dict):
            raise WireError(f"{data.folder.scaling} is not an object.")
        data.study = study


def _read_info(data: RunData) -> None:
    with _noting(data, "The description of the run"):
        data.info = read_info(data.folder)
        if data.info is None and data.ranks:
            data.missing.append(
                "There is no run.json, so the settings of the run (seed, batch, model) are unknown."
            )
    if data.info is None:
        return
    data.name = text(data.info.name, 200) or data.name
    lost = sorted(set(range(min(data.info.workers, RANKS_LIMIT))) - set(data.ranks))
    if not data.ranks:
        data.missing.append("No worker has written events, so there are no curves and no times.")
    elif lost:
        shown = ", ".join(map(str, lost[:8])) + (" …" if len(lost) > 8 else "")
        data.missing.append(f"There are no events of rank {shown}; sums leave their part out.")


def _read_ranks(data: RunData) -> None:
    ranks = data.folder.event_ranks()
    if len(ranks) > RANKS_LIMIT:
        data.missing.append(f"Only the first {RANKS_LIMIT:,} of {len(ranks):,} ranks are read.")
    with contextlib.suppress(WireError, OSError):
        for event in stream_events(data.folder, 0):
            if event is not None and event["kind"] == "start" and len(data.starts) < EVENTS_LIMIT:
                data.starts.append((amount(event["t"]), whole(event.get("step")) or 0))
    data.starts.sort()
    for index in range(len(data.starts) - 1, 1, -1):
        (began, done), (_, later) = data.starts[index - 1 : index + 1]
        data.starts[index - 1] = began, min(done, later)
    for rank in ranks[:RANKS_LIMIT]:
        with _noting(data, f"Some events of rank {rank}"):
            _read_rank(data, rank, keeps_time=rank == ranks[0])


def _read_rank(data: RunData, rank_number: int, *, keeps_time: bool) -> None:
    """Add what one rank has written; the clock of one of them counts for all."""
    rank = data.ranks.setdefault(rank_number, RankTotals(rank_number))
    damaged, before_t = 0, 0.0
    for event in stream_events(data.folder, rank_number):
        if event is None:
            damaged += 1
            continue
        kind, t, step = event["kind"], amount(event["t"]), whole(event.get("step"))
        if t:
            data.first_t, data.last_t = min(data.first_t, t), max(data.last_t, t)
        if kind == "start":
            rank.host, rank.device = text(event.get("host", "")), text(event.get("device", ""))
            rank.pid = whole(event.get("pid")) or 0
            rank.size = whole(event.get("size"), 1) or rank.size
            before_t = t
        elif kind == "message":
            data.events[kind].append({**bounded(event), "t": t})
        elif step is None:
            continue
        elif data.is_undone(t, step):
            data.redone += kind == "step" and rank_number == 0
        elif kind == "step":
            _add_step(data, rank, step, event)
        elif kind in KEPT_KINDS:
            data.events[kind].append({**bounded(event), "t": t})
        if keeps_time and kind in ("step", "stop") and step is not None:
            data.rate.add(step, 0.0, max(0.0, t - before_t) if before_t else 0.0)
            before_t = t
    if damaged:
        name = f"events/rank{rank_number}.jsonl"
        data.missing.append(f"{count_text(damaged, 'line')} of {name} could not be read.")


def _add_step(data: RunData, rank: RankTotals, step: int, event: Event) -> None:
    samples = amount(event.get("samples"))
    rank.steps += 1
    rank.samples += samples
    rank.seconds += amount(event.get("seconds"))
    data.rate.add(step, samples, 0.0)
    if (lr := number(event.get("lr"))) is not None:
        data.lr.add(step, lr, 1.0)
    spent: dict[Phase, float] = {}
    for name, value in _items(event.get("phases")):
        phase = _PHASES.get(name, Phase.OTHER)
        spent[phase] = spent.get(phase, 0.0) + amount(value)
    for phase, seconds in spent.items():
        rank.phases[phase] = rank.phases.get(phase, 0.0) + seconds
    epoch, t = whole(event.get("epoch")) or 0, amount(event["t"])
    rank.recent.append(RecentStep(step, t, epoch, samples, spent))
    own = {phase: seconds for phase, seconds in spent.items() if phase in OWN}
    for heap, parts in ((rank.longest_own, own), (rank.longest_whole, spent)):
        if parts:
            longest = max(parts, key=lambda phase: parts[phase])
            heapq.heappush(heap, LongStep(sum(parts.values()), step, longest))
            if len(heap) > LONGEST_STEPS:
                heapq.heappop(heap)
    if step in data.least_waits or len(data.least_waits) < COMPARED_STEPS_LIMIT:
        waited = spent.get(Phase.WAIT, 0.0)
        data.least_waits[step] = min(waited, data.least_waits.get(step, math.inf))
        rank.compared_wait_s += waited
    for name, value in _items(event.get("metrics")):
        pair = [number(each) for each in value] if isinstance(value, list) else []
        match pair:
            case [float() as total, float() as weight] if not weight <= 0:
                if name in data.metrics or len(data.metrics) < METRICS_LIMIT:
                    data.metrics.setdefault(name, Curve()).add(step, total, weight)
                elif METRICS_LEFT_OUT not in data.missing:
                    data.missing.append(METRICS_LEFT_OUT)


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _split_waiting(data: RunData) -> None:
    """Tell the transfer from waiting for others, which a rank by itself cannot.

    Who waits least in a step came last and waited for nobody: all its wait was the transfer.
    """
    ranks = data.ranks.values()
    if len(ranks) < 2 or any(Phase.TRANSFER in rank.phases for rank in ranks):
        return
    moved = sum(data.least_waits.values())
    for rank in ranks:
        waited = rank.phases.get(Phase.WAIT, 0.0)
        if waited and moved:
            transfer = waited * min(1.0, moved / max(rank.compared_wait_s, 1e-12))
            rank.phases |= {Phase.WAIT: waited - transfer, Phase.TRANSFER: transfer}
