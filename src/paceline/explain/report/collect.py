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
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, WireError
from paceline.explain.report.files import lines_of, read_document
from paceline.explain.report.markup import as_number, count, text
from paceline.explain.report.series import Column
from paceline.observe.run_folder import Event, RunFolder, RunInfo, parse_event, read_info

PHASES = ("data", "forward", "backward", "wait", "transfer", "optimizer", "other")
OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""What a worker does by itself. The others depend on its peers."""

CLASS_WIDTH = 0.05
"""Times within 5 % of each other are in one class."""
METRICS_LIMIT = 12
RANKS_LIMIT = 1024
ROWS_LIMIT = 2000
"""The most epochs, checkpoints and so on that are kept; the oldest leave first."""
MESSAGES_LIMIT = 200
PIPELINES_LIMIT = 4
GONE_S = 5.0
"""Silence after which a run of this machine whose processes are gone has ended."""
SILENT_S, SILENT_STEPS = 300.0, 50
"""Silence, in seconds and in usual steps, after which a run is not taken to be running."""
NO_INFO = "There is no run.json, so the settings of the run (seed, batch, model) are unknown."
NO_EVENTS = "No worker has written events, so there are no curves and no times."
NO_RUN = "This folder holds no run: there is neither run.json nor a file of events in it."
COMPARED_STEPS_LIMIT = 2**16
"""Of so many steps it is remembered who waited least in each; the rest is taken to be alike."""


@dataclass(slots=True)
class Rank:
    """What one worker did in the whole run."""

    rank: int
    host: str = ""
    pid: int = 0
    device: str = ""
    starts: int = 0
    size: int = 1
    steps: int = 0
    samples: float = 0
    seconds: float = 0
    phases: dict[str, float] = field(default_factory=dict)
    spread: Counter[int] = field(default_factory=Counter)
    """How many steps took how much own work, in classes of equal ratio."""
    compared_wait_s: float = 0
    """Waiting in the steps that are compared with the other ranks'."""

    @property
    def own_s(self) -> float | None:
        """Seconds of own work in a step, on average; None where no phase was measured."""
        if not self.steps or not self.phases:
            return None
        return sum(self.phases.get(name, 0.0) for name in OWN_PHASES) / self.steps

    def own_quantile_s(self, share: float) -> float:
        """The own work that so large a share of the steps does not exceed."""
        left = share * sum(self.spread.values())
        for each in sorted(self.spread):
            left -= self.spread[each]
            if left <= 0:
                return math.exp(each * CLASS_WIDTH)
        return 0.0

    def phase_s(self, name: str) -> float | None:
        """Seconds of one phase in a step, on average."""
        return self.phases[name] / self.steps if self.steps and name in self.phases else None


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
    epochs: deque[Event] = field(default_factory=lambda: deque(maxlen=ROWS_LIMIT))
    evaluations: deque[Event] = field(default_factory=lambda: deque(maxlen=ROWS_LIMIT))
    checkpoints: deque[Event] = field(default_factory=lambda: deque(maxlen=ROWS_LIMIT))
    noises: deque[Event] = field(default_factory=lambda: deque(maxlen=ROWS_LIMIT))
    blames: deque[Event] = field(default_factory=lambda: deque(maxlen=ROWS_LIMIT))
    stops: deque[Event] = field(default_factory=lambda: deque(maxlen=ROWS_LIMIT))
    messages: deque[Event] = field(default_factory=lambda: deque(maxlen=MESSAGES_LIMIT))
    message_count: int = 0
    first_t: float = math.inf
    last_t: float = -math.inf
    least_waits: dict[int, tuple[float, int]] = field(default_factory=dict)
    """By step: the shortest wait of any rank, and how many ranks have told theirs."""
    read_t: float = field(default_factory=time.time)
    """When the folder was read."""
    left_out: set[str] = field(default_factory=set)
    """Metrics beyond the limit."""
    redone: int = 0
    """Steps of rank 0 that a restart has undone, and that were trained again."""
    restarts: int = 0
    kept: list[str] = field(default_factory=list)
    """The names in the folder of checkpoints."""
    pipelines: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    scaling: dict[str, Any] | None = None
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
        known = ("running", "finished", "stopped", "failed")
        said = next((each for each in known if self.info and self.info.status == each), "unknown")
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
        return not (self.has_run or self.pipelines or self.scaling)


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
    story = Story(folder, name=folder.name)
    _take_documents(story)
    _take_info(story)
    _take_events(story)
    _split_waiting(story)
    if {NO_INFO, NO_EVENTS} <= set(story.missing):
        others = [each for each in story.missing if each not in (NO_INFO, NO_EVENTS)]
        story.missing = [*([NO_RUN] if story.is_empty else []), *others]
    return story


def _take_info(story: Story) -> None:
    try:
        story.info = read_info(story.folder)
    except (WireError, OSError) as error:
        story.missing.append(f"The description of the run could not be read. {_said(error)}")
        return
    if story.info is None:
        story.missing.append(NO_INFO)
        return
    story.info, wrong = sane(story.info)
    if wrong:
        story.missing.append(f"run.json says nothing usable about: {', '.join(wrong)}.")
    story.name = text(story.info.name, 200) or story.name


def sane(info: RunInfo) -> tuple[RunInfo, list[str]]:
    """The description with every value that is of the wrong kind put to nothing, and which."""
    nothing: dict[str, Any] = {}
    for name in ("name", "model", "device", "host"):
        nothing |= {} if isinstance(getattr(info, name), str) else {name: ""}
    for name in ("created", "updated"):
        nothing |= {} if as_number(getattr(info, name)) is not None else {name: 0.0}
    for name in ("epochs", "global_batch", "shards", "workers", "step", "parameters"):
        nothing |= {} if _is_whole(getattr(info, name)) else {name: 0}
    for name in ("dataset_size", "steps_per_epoch", "steps"):
        value = getattr(info, name)
        nothing |= {} if value is None or _is_whole(value) else {name: None}
    nothing |= {} if isinstance(info.policy, list) else {"policy": []}
    nothing |= {} if isinstance(info.versions, dict) else {"versions": {}}
    return replace(info, **nothing), sorted(nothing)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _take_events(story: Story) -> None:
    ranks = story.folder.event_ranks()
    if not ranks:
        story.missing.append(NO_EVENTS)
    if len(ranks) > RANKS_LIMIT:
        story.missing.append(f"Only the first {RANKS_LIMIT:,} of {len(ranks):,} ranks are read.")
    starts = [
        (event["t"], event.get("step", 0))
        for event in _events_of(story.folder.events_of(0), only=b'"start"')
        if event["kind"] == "start" and isinstance(event.get("step", 0), int)
    ]
    story.restarts = max(0, len(starts) - 1)
    for rank in ranks[:RANKS_LIMIT]:
        problems: Counter[str] = Counter()
        for event in _events_of(story.folder.events_of(rank), problems=problems):
            _take_event(story, rank, event, starts)
        for problem, times in problems.items():
            story.missing.append(
                f"{count(times, 'line')} of events/rank{rank}.jsonl could not be read."
                if problem == "line"
                else f"The events of rank {rank} could not be read. {problem}"
            )
    if story.left_out:
        known = METRICS_LIMIT + len(story.left_out)
        story.missing.append(f"Only the first {METRICS_LIMIT} of {known:,} metrics are shown.")
    there = set(ranks)
    expected = min(story.info.workers, RANKS_LIMIT) if story.info else 0
    if ranks and (lost := [rank for rank in range(expected) if rank not in there]):
        shown = ", ".join(map(str, lost[:8])) + (" …" if len(lost) > 8 else "")
        story.missing.append(f"There are no events of rank {shown}; sums leave their part out.")


def _events_of(
    path: Path, *, only: bytes = b"", problems: Counter[str] | None = None
) -> Iterator[Event]:
    """The events of a file, with what could not be read counted in `problems`."""
    problems = Counter() if problems is None else problems
    try:
        for line in lines_of(path):
            if only and only not in line:
                continue
            event = parse_event(line)
            if event is not None:
                yield event
            elif line.strip():
                problems["line"] += 1
    except FileNotFoundError:
        return
    except (WireError, OSError) as error:
        problems[_said(error)] += 1


def _take_event(story: Story, number: int, event: Event, starts: list[tuple[float, int]]) -> None:
    """Add one event to the story. `starts`: when rank 0 began, and from which step."""
    kind, t, step = event["kind"], event["t"], event.get("step")
    if math.isfinite(t) and t > 0:
        story.first_t = min(story.first_t, t)
        story.last_t = max(story.last_t, t)
    rank = story.ranks.setdefault(number, Rank(number))
    if kind == "start":
        rank.starts += 1
        rank.host, rank.device = text(event.get("host", ""), 80), text(event.get("device", ""), 40)
        rank.pid = pid if type(pid := event.get("pid")) is int else 0
        rank.size = max(1, size) if isinstance(size := event.get("size"), int) else rank.size
        return
    if kind == "message":
        story.messages.append(event)
        story.message_count += 1
        return
    if type(step) is not int:
        return
    if any(began > t and applied < step for began, applied in starts[1:]) and kind != "stop":
        story.redone += kind == "step" and number == 0
        return
    if kind == "step":
        _take_step(story, rank, step, event)
    elif kind in {"epoch", "evaluation", "checkpoint", "noise", "blame", "stop"}:
        getattr(story, "noises" if kind == "noise" else kind + "s").append(event)


def _take_step(story: Story, rank: Rank, step: int, event: Event) -> None:
    samples, seconds = as_number(event.get("samples")), as_number(event.get("seconds"))
    rank.steps += 1
    rank.samples += samples or 0
    if seconds is not None and math.isfinite(seconds) and seconds > 0:
        rank.seconds += seconds
        if samples:
            # Each rank brings its share of the step's time: lost ranks must not look like speed.
            story.rate.add(step, samples, seconds / rank.size)
    phases = event.get("phases")
    own = waited = 0.0
    for name, value in phases.items() if isinstance(phases, dict) else ():
        spent = as_number(value)
        if spent is not None and 0 <= spent < math.inf:
            name = name if name in PHASES else "other"
            rank.phases[name] = rank.phases.get(name, 0.0) + spent
            own += spent if name in OWN_PHASES else 0.0
            waited += spent if name == "wait" else 0.0
    if step in story.least_waits or len(story.least_waits) < COMPARED_STEPS_LIMIT:
        least, ranks = story.least_waits.get(step, (math.inf, 0))
        story.least_waits[step] = (min(least, waited), ranks + 1)
        rank.compared_wait_s += waited
    if own > 0:
        rank.spread[round(math.log(own) / CLASS_WIDTH)] += 1
    metrics = event.get("metrics")
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if name not in story.metrics:
            if len(story.metrics) >= METRICS_LIMIT:
                if len(story.left_out) < ROWS_LIMIT:
                    story.left_out.add(name)
                continue
            story.metrics[name] = Column()
        match value:
            case [int() | float() as total, int() | float() as weight] if weight > 0:
                story.metrics[name].add(step, total, weight)
            case [int() | float() as total, int() | float() as weight] if math.isnan(weight):
                story.metrics[name].add(step, math.nan, 1)


def _split_waiting(story: Story) -> None:
    """Tell the exchange from waiting for others.

    A rank by itself cannot: both end when the sums arrive. Who waits least in a step came last and
    waited for nobody, so that wait is the exchange, for everybody.
    """
    if any("transfer" in rank.phases for rank in story.ranks.values()):
        return
    exchange = sum(least for least, ranks in story.least_waits.values() if ranks > 1)
    for rank in story.ranks.values():
        waited = rank.phases.get("wait", 0.0)
        if waited and exchange:
            transfer = waited * min(1.0, exchange / rank.compared_wait_s)
            rank.phases |= {"wait": waited - transfer, "transfer": transfer}


def _take_documents(story: Story) -> None:
    """The pipeline traces, the scaling study and the names of checkpoints, where there are any."""
    with contextlib.suppress(OSError):
        listed = islice(os.scandir(story.folder.checkpoints), ROWS_LIMIT)
        story.kept = sorted(entry.name for entry in listed)
    steps = story.folder.pipeline_steps()
    if len(steps) > PIPELINES_LIMIT:
        story.missing.append(
            f"{len(steps)} batches were followed; the first {PIPELINES_LIMIT} are shown."
        )
    for step in steps[:PIPELINES_LIMIT]:
        try:
            story.pipelines.append((step, read_document(story.folder.pipeline_of(step))))
        except (WireError, OSError) as error:
            story.missing.append(f"The trace of step {step} could not be read. {_said(error)}")
    try:
        story.scaling = read_document(story.folder.scaling)
    except FileNotFoundError:
        pass
    except (WireError, OSError) as error:
        story.missing.append(f"The scaling study could not be read. {_said(error)}")


def _said(error: Exception) -> str:
    return error.what if isinstance(error, WireError) else f"{error}."
