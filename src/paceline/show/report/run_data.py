"""The data of a run: totals by rank, curves, and all events but steps.

Its size is bounded, whatever the folder contains. `collect` fills it, and `document` reads it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import socket
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.files import Event, RunFolder, RunInfo
from paceline.record import Trace
from paceline.show.report.curves import Curve
from paceline.show.report.pace import PaceTable, RecentStep, SlowSpan
from paceline.telemetry import OWN, Phase

EVENTS_LIMIT = 1000
"""The most events of each kind that are kept; the oldest are dropped first."""
LONGEST_STEPS = 32
"""How many of a rank's longest steps are kept."""
RECENT_STEPS = 100
LATE_S, LATE_STEPS = 2.0, 10
"""Seconds and usual steps without a new step after which the page shows how long ago it was."""
SILENT_S, SILENT_STEPS = 300.0, 50
"""Silence, in seconds and in usual steps, after which a run no longer counts as running."""
KEPT_KINDS = ("epoch", "evaluation", "checkpoint", "message", "noise", "generation", "stop")


class LongStep(NamedTuple):
    """A long step of one rank, and its longest phase."""

    seconds: float
    step: int
    phase: Phase


@dataclass(slots=True)
class RankTotals:
    """One worker's totals over the run."""

    rank: int
    host: str = ""
    pid: int = 0
    device: str = ""
    size: int = 1
    steps: int = 0
    samples: float = 0
    measured: dict[Phase, float] = field(default_factory=dict)
    """Seconds by phase, as the worker recorded them."""
    phases: dict[Phase, float] = field(default_factory=dict)
    """The same with waits split into waiting and transfer, which needs all ranks' times."""
    compared_wait_s: float = 0
    """Waiting in the steps that are compared with other ranks."""
    longest_own: list[LongStep] = field(default_factory=list)
    longest_whole: list[LongStep] = field(default_factory=list)
    """Heaps of its longest steps: by its own work, and with all waiting."""
    pace: PaceTable = field(default_factory=PaceTable)
    is_gone: bool = False
    """Whether its process was on this machine and had ended when the folder was read."""
    recent: deque[RecentStep] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    @property
    def own_s(self) -> float:
        """Seconds of own work in a step, on average; 0 where no phase was measured."""
        return sum(self.phases.get(phase, 0.0) for phase in OWN) / max(1, self.steps)

    @property
    def is_here(self) -> bool:
        """Whether its process is, or was, on this machine, which has /proc."""
        return self.host == socket.gethostname() and os.path.isdir("/proc/self")


@dataclass(slots=True)
class RunData:
    """All data read from a run folder."""

    folder: RunFolder
    name: str
    info: RunInfo | None = None
    ranks: dict[int, RankTotals] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    lr: Curve = field(default_factory=Curve)
    rate: Curve = field(default_factory=Curve)
    """Samples of all workers per elapsed time, from the end of one step to the end of the next."""
    events: dict[str, deque[Event]] = field(
        default_factory=lambda: {kind: deque(maxlen=EVENTS_LIMIT) for kind in KEPT_KINDS}
    )
    """Events other than steps, by kind."""
    first_t: float = math.inf
    last_t: float = -math.inf
    last_step_t: float = -math.inf
    """When the newest step was written."""
    slow: list[SlowSpan] = field(default_factory=list)
    """The spans in which workers were slow; the most expensive first."""
    least_waits: dict[int, float] = field(default_factory=dict)
    """By step: the shortest wait of any rank."""
    read_t: float = field(default_factory=time.time)
    """When the folder was read."""
    is_gone: bool = False
    """Whether all its processes had ended before `run.json` was read."""
    starts: list[tuple[float, int]] = field(default_factory=list)
    """When rank 0 started, and after which step, taking later restarts into account."""
    redone: int = 0
    """How many of rank 0's steps were undone by a restart and trained again."""
    kept: list[str] = field(default_factory=list)
    """The names in the folder of checkpoints."""
    traces: list[Trace] = field(default_factory=list)
    timeline: dict[str, Any] | None = None
    study: dict[str, Any] | None = None
    """The contents of `scaling.json`."""
    notes: dict[str, str] = field(default_factory=dict)
    """Sentences about what the page cannot show, by subject."""

    @property
    def missing(self) -> list[str]:
        """Sentences about what the page cannot show."""
        return list(self.notes.values())

    @property
    def steps(self) -> int:
        """Steps applied, according to all files."""
        curves = [self.rate, *self.metrics.values()]
        return max([self.info.step if self.info else 0, *(curve.last for curve in curves)])

    @property
    def workers(self) -> int:
        sizes = [rank.size for rank in self.ranks.values()]
        return max([self.info.workers if self.info else 0, *sizes, 0])

    @property
    def status(self) -> str:
        """The status in `run.json`, but "killed" or "silent" for a running one that has ended."""
        said = self.info.status if self.info else "unknown"
        if said != "running":
            return said
        if self.is_gone:
            return "killed"
        return "silent" if self.silent_s > self._patience_s(SILENT_S, SILENT_STEPS) else said

    @property
    def usual_step_s(self) -> float:
        """The median time from the end of a step to the end of the next; 0 if unknown."""
        for rank in self.ranks.values():
            times = [recent.t for recent in rank.recent]
            if len(times) > 1:
                return statistics.median(b - a for a, b in itertools.pairwise(times))
        return 0.0

    @property
    def late_s(self) -> float:
        """How long a running run has applied no step, if that is unusually long; else 0."""
        since_s = self.read_t - self.last_step_t
        is_late = math.isfinite(since_s) and self.status == "running"
        return since_s if is_late and since_s > self._patience_s(LATE_S, LATE_STEPS) else 0.0

    def _patience_s(self, seconds: float, steps: int) -> float:
        return max(seconds, steps * self.usual_step_s)

    @property
    def silent_s(self) -> float:
        """How long nothing had been written when the folder was read."""
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
