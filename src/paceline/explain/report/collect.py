"""From a run folder to the facts of the story: everything the report shows, in bounded memory.

Event files are read line by line, one rank after the other. What is missing, damaged or left out is
remembered as a sentence, because a reader must know what the page does not show.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.comm.documents import read_value
from paceline.errors import UsageError, WireError
from paceline.explain.report.markup import as_number, count, text
from paceline.explain.report.series import Column, Window, read_window
from paceline.observe.phases import OWN, Phase, transfer_of
from paceline.observe.run_folder import Event, RunFolder, RunInfo, read_info, stream_events
from paceline.record.schema import read as read_trace
from paceline.record.schema import read_document
from paceline.record.stages import Trace

METRICS_LIMIT = 12
METRICS_LEFT_OUT = f"Only the first {METRICS_LIMIT} metrics are shown."
RANKS_LIMIT = 1024
ROWS_LIMIT = 2000
"""The most epochs, checkpoints and so on that are kept; the oldest leave first."""
MESSAGES_LIMIT = 200
TRACES_LIMIT = 4
STEP_LIMIT = 2**53
COMPARED_STEPS_LIMIT = 2**16
"""Of so many steps it is remembered who waited least in each; the rest is taken to be alike."""
GONE_S = 5.0
"""Silence after which a run of this machine whose processes are gone has ended."""
SILENT_S, SILENT_STEPS = 300.0, 50
"""Silence, in seconds and in usual steps, after which a run is not taken to be running."""
KEPT_KINDS = ("epoch", "evaluation", "checkpoint", "noise", "blame", "stop")


@dataclass(slots=True)
class Rank:
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

    @property
    def own_s(self) -> float | None:
        """Seconds of own work in a step, on average; None where no phase was measured."""
        if not self.steps or not self.phases:
            return None
        return sum(self.phases.get(phase, 0.0) for phase in OWN) / self.steps

    def phase_s(self, phase: Phase) -> float | None:
        """Seconds of one phase in a step, on average."""
        return self.phases[phase] / self.steps if self.steps and phase in self.phases else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySize:
    """The job on some number of workers, measured or predicted."""

    workers: int
    speedup: float
    efficiency: float | None = None
    step_s: float | None = None
    lost: Mapping[str, float] = field(default_factory=dict)
    """Seconds or shares, by where they were lost."""
    network: str = ""

    @property
    def is_usable(self) -> bool:
        return self.workers > 0 and 1e-9 < self.speedup < 1e12

    @property
    def of_ideal(self) -> float:
        return self.speedup / self.workers if self.efficiency is None else self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A sentence of a study."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFile:
    """What is shown of `scaling.json`; keys beyond these are ignored."""

    sizes: list[StudySize]
    mode: str = ""
    predicted: list[StudySize] = field(default_factory=list)
    suggestion: Advice | None = None
    check: Advice | None = None


@dataclass(slots=True)
class Story:
    """Everything that the page tells."""

    folder: RunFolder
    name: str
    info: RunInfo | None = None
    ranks: dict[int, Rank] = field(default_factory=dict)
    metrics: dict[str, Column] = field(default_factory=dict)
    rate: Column = field(default_factory=Column)
    """Samples per second of all workers together."""
    events: dict[str, deque[Event]] = field(
        default_factory=lambda: {kind: deque(maxlen=ROWS_LIMIT) for kind in KEPT_KINDS}
    )
    """What happened other than steps, by kind."""
    messages: deque[Event] = field(default_factory=lambda: deque(maxlen=MESSAGES_LIMIT))
    message_count: int = 0
    first_t: float = math.inf
    last_t: float = -math.inf
    least_waits: dict[int, list[float]] = field(default_factory=dict)
    """By step: the two shortest waits of any ranks."""
    read_t: float = field(default_factory=time.time)
    """When the folder was read."""
    redone: int = 0
    """Steps of rank 0 that a restart has undone, and that were trained again."""
    restarts: int = 0
    kept: list[str] = field(default_factory=list)
    """The names in the folder of checkpoints."""
    traces: list[Trace] = field(default_factory=list)
    window: Window | None = None
    study: StudyFile | None = None
    missing: list[str] = field(default_factory=list)
    """What the page cannot show, in words."""

    @property
    def steps(self) -> int:
        """Steps applied, as far as anybody has written it down."""
        seen = max([self.rate.last, *(column.last for column in self.metrics.values())])
        return max(seen, self.info.step if self.info else 0)

    @property
    def workers(self) -> int:
        sizes = [rank.size for rank in self.ranks.values()]
        return max([self.info.workers if self.info else 0, *sizes, 0])

    @property
    def status(self) -> str:
        said = self.info.status if self.info else "unknown"
        return "silent" if said == "running" and self.is_silent else said

    @property
    def silent_s(self) -> float:
        """For how long nothing had been written when the folder was read."""
        return max(0.0, self.read_t - self.last_t) if self.last_t > 0 else 0.0

    @property
    def is_silent(self) -> bool:
        """Whether a run that never said that it ended has probably ended all the same."""
        mine = [rank for rank in self.ranks.values() if rank.host == socket.gethostname()]
        if mine and len(mine) == len(self.ranks) and not any(map(_is_alive, mine)):
            return self.silent_s > GONE_S
        steps_s = [rank.seconds / rank.steps for rank in self.ranks.values() if rank.steps]
        return self.silent_s > max(SILENT_S, SILENT_STEPS * max(steps_s, default=0.0))

    @property
    def has_run(self) -> bool:
        return self.info is not None or bool(self.ranks)

    @property
    def is_empty(self) -> bool:
        return not (self.has_run or self.traces or self.study)


def _is_alive(rank: Rank) -> bool:
    return os.path.exists(f"/proc/{rank.pid}") or not os.path.isdir("/proc/self")


def collect(path: Path) -> Story:
    """Read a run folder; only one that is not there at all is an error."""
    if not path.is_dir():
        raise UsageError(
            f"There is no run folder {str(path)!r}.",
            advice="Give the folder that a run wrote, the one with run.json and events/ in it.",
        )
    folder = RunFolder(path)
    story = Story(folder, name=folder.name, window=read_window(folder))
    _take_documents(story)
    _take_info(story)
    _take_events(story)
    _split_waiting(story)
    if story.is_empty and not story.missing:
        story.missing.append("This folder holds no run: it has neither run.json nor events.")
    return story


@contextlib.contextmanager
def _saying(story: Story, what: str) -> Iterator[None]:
    """What cannot be read is said on the page and nothing else; what is not there is no news."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (WireError, OSError) as error:
        reason = error.what if isinstance(error, WireError) else f"{error}."
        story.missing.append(f"{what} could not be read. {reason}")


def _take_documents(story: Story) -> None:
    """The recorded steps, the scaling study and the names of checkpoints, where there are any."""
    with contextlib.suppress(OSError):
        listed = islice(os.scandir(story.folder.checkpoints), ROWS_LIMIT)
        story.kept = [entry.name for entry in listed]
    steps = story.folder.pipeline_steps()
    if len(steps) > TRACES_LIMIT:
        story.missing.append(
            f"{len(steps)} steps were recorded; the first {TRACES_LIMIT} are shown."
        )
    for step in steps[:TRACES_LIMIT]:
        with _saying(story, f"The recording of step {step}"):
            story.traces.append(read_trace(story.folder.pipeline_of(step)))
    with _saying(story, "The scaling study"):
        document = read_document(story.folder.scaling)
        story.study = read_value(StudyFile, document, "scaling.json")


def _take_info(story: Story) -> None:
    with _saying(story, "The description of the run"):
        info = read_info(story.folder)
        if info is not None:
            story.info = read_value(RunInfo, asdict(info), "run.json")
            story.name = text(info.name, 200) or story.name
        elif story.folder.event_ranks():
            story.missing.append(
                "There is no run.json, so the settings of the run (seed, batch, model) are unknown."
            )


def _take_events(story: Story) -> None:
    ranks = story.folder.event_ranks()
    if not ranks and story.info:
        story.missing.append("No worker has written events, so there are no curves and no times.")
    if len(ranks) > RANKS_LIMIT:
        story.missing.append(f"Only the first {RANKS_LIMIT:,} of {len(ranks):,} ranks are read.")
    starts: list[tuple[float, int]] = []
    with contextlib.suppress(WireError, OSError):
        for event in stream_events(story.folder, 0):
            is_start = event is not None and event["kind"] == "start" and len(starts) < ROWS_LIMIT
            if event and is_start and type(step := event.get("step", 0)) is int:
                starts.append((event["t"], step))
    story.restarts = max(0, len(starts) - 1)
    for rank in ranks[:RANKS_LIMIT]:
        damaged = 0
        with _saying(story, f"Some events of rank {rank}"):
            for event in stream_events(story.folder, rank):
                if event is None:
                    damaged += 1
                else:
                    _take_event(story, rank, event, starts)
        if damaged:
            name = f"events/rank{rank}.jsonl"
            story.missing.append(f"{count(damaged, 'line')} of {name} could not be read.")
    expected = min(story.info.workers, RANKS_LIMIT) if story.info else 0
    if ranks and (lost := sorted(set(range(expected)) - set(ranks))):
        shown = ", ".join(map(str, lost[:8])) + (" …" if len(lost) > 8 else "")
        story.missing.append(f"There are no events of rank {shown}; sums leave their part out.")


def _take_event(story: Story, number: int, event: Event, starts: list[tuple[float, int]]) -> None:
    """Add one event to the story. `starts`: when rank 0 began, and from which step."""
    kind, t, step = event["kind"], as_number(event["t"]) or 0.0, event.get("step")
    event["t"] = t
    if 0 < t < math.inf:
        story.first_t = min(story.first_t, t)
        story.last_t = max(story.last_t, t)
    rank = story.ranks.setdefault(number, Rank(number))
    if kind == "start":
        rank.host, rank.device = text(event.get("host", ""), 80), text(event.get("device", ""), 40)
        rank.pid = pid if type(pid := event.get("pid")) is int else 0
        rank.size = size if type(size := event.get("size")) is int and size > 0 else rank.size
    elif kind == "message":
        story.messages.append(event)
        story.message_count += 1
    elif type(step) is not int or not 0 <= step < STEP_LIMIT:
        return
    elif any(began > t and applied < step for began, applied in starts[1:]) and kind != "stop":
        story.redone += kind == "step" and number == 0
    elif kind == "step":
        _take_step(story, rank, step, event)
    elif kind in KEPT_KINDS:
        story.events[kind].append(event)


def _take_step(story: Story, rank: Rank, step: int, event: Event) -> None:
    samples, seconds = as_number(event.get("samples")), as_number(event.get("seconds"))
    rank.steps += 1
    rank.samples += samples or 0
    if seconds is not None and 0 < seconds < math.inf:
        rank.seconds += seconds
        if samples:
            # Each rank brings its share of the step's time: lost ranks must not look like speed.
            story.rate.add(step, samples, seconds / rank.size)
    waited = 0.0
    for name, value in _items(event.get("phases")):
        spent = as_number(value)
        if spent is not None and 0 <= spent < math.inf:
            phase = _PHASES.get(name, Phase.OTHER)
            rank.phases[phase] = rank.phases.get(phase, 0.0) + spent
            waited += spent if phase is Phase.WAIT else 0.0
    if step in story.least_waits or len(story.least_waits) < COMPARED_STEPS_LIMIT:
        waits = story.least_waits.setdefault(step, [])
        waits[:] = sorted([*waits, waited])[:2]
        rank.compared_wait_s += waited
    for name, value in _items(event.get("metrics")):
        pair = [as_number(each) for each in value] if isinstance(value, list) else []
        match pair:
            case [float() as total, float() as weight] if not weight <= 0:
                if name in story.metrics or len(story.metrics) < METRICS_LIMIT:
                    story.metrics.setdefault(name, Column()).add(step, total, weight)
                elif METRICS_LEFT_OUT not in story.missing:
                    story.missing.append(METRICS_LEFT_OUT)


_PHASES = {str(phase): phase for phase in Phase}


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _split_waiting(story: Story) -> None:
    """Tell the transfer from waiting for others, which a rank by itself cannot."""
    if any(Phase.TRANSFER in rank.phases for rank in story.ranks.values()):
        return
    moved = sum(transfer_of(waits) for waits in story.least_waits.values() if len(waits) > 1)
    for rank in story.ranks.values():
        waited = rank.phases.get(Phase.WAIT, 0.0)
        if waited and moved:
            transfer = waited * min(1.0, moved / rank.compared_wait_s)
            rank.phases |= {Phase.WAIT: waited - transfer, Phase.TRANSFER: transfer}
