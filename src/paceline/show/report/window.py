"""Some steps of the timelines: all workers on one clock, with waits split from transfers.

Timelines may be as long as the run. Only their beginnings are read, and the steps in the middle of
these are kept, as `paceline timeline` would write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.files import RunFolder
from paceline.show.report.bounds import text, whole
from paceline.telemetry import Phase, RankRecording, TraceEvent, find_recordings, merge, survey

RANKS_LIMIT = 16
STEPS = 10
"""How many steps the window has, if they fit."""
SPANS_LIMIT = 1500
"""The most spans of one worker."""
READ_EVENTS = 8000
"""The most events that are read of one worker's timeline, of which the middle is shown."""
LANES_LIMIT = 6
FACTS_LIMIT = 4
LANES = {1: "computing", 2: "exchange"}


def read_window(folder: RunFolder) -> dict[str, Any] | None:
    """The window for the page, or None where no complete steps were recorded."""
    try:
        paths = find_recordings(folder.path)
        surveyed = [survey(path, READ_EVENTS) for path in paths[:RANKS_LIMIT]]
        recordings = [recording for recording in surveyed if recording.steps]
        if not recordings:
            return None
        steps, spans = _take(recordings, STEPS)
        if any(len(each) > SPANS_LIMIT for each in spans.values()):
            steps, spans = _take(recordings, 1)
    except (UsageError, OSError):
        return None
    notes = []
    if any(len(each) > SPANS_LIMIT for each in spans.values()):
        notes.append(f"Only {SPANS_LIMIT:,} spans of each worker are shown.")
    if len(paths) > RANKS_LIMIT:
        notes.append(f"The first {RANKS_LIMIT} of {len(paths):,} workers are shown.")
    if len({clock.machine for each in recordings for clock in each.clocks}) > 1:
        notes.append("The workers ran on several machines; rows are as far apart as their clocks.")
    names: dict[str, int] = {}
    return {
        "steps": [steps[0], steps[-1]],
        "length": max((_end(span) for each in spans.values() for span in each), default=0.0),
        "ranks": [_pack(rank, each[:SPANS_LIMIT], names) for rank, each in spans.items()],
        "names": list(names),
        "phases": {phase: phase.meaning for phase in Phase},
        "notes": notes,
    }


def _take(
    recordings: Sequence[RankRecording], most_steps: int
) -> tuple[range, dict[int, list[TraceEvent]]]:
    """The middle of the steps that all ranks have completely, and their spans by rank."""
    common = sorted(set.intersection(*(set(recording.steps) for recording in recordings)))
    common = common or sorted(recordings[0].steps)
    begin = max(0, (len(common) - most_steps) // 2)
    chosen, spans = common[begin : begin + most_steps], dict[int, list[TraceEvent]]()
    for event in merge(recordings, range(chosen[0], chosen[-1] + 1)):
        rank = whole(event.get("pid"))
        if event["ph"] in ("X", "i", "I") and rank is not None:
            before = spans.setdefault(rank, [])
            if before and before[-1]["args"]["step"] > event["args"]["step"]:
                before.clear()  # after a restart: the steps before are repeated, or long ago
            before.append(event)
    begin_us = min((span["ts"] for each in spans.values() for span in each), default=0.0)
    for each in spans.values():
        for span in each:
            span["ts"] -= begin_us
        each.sort(key=lambda span: (span["ts"], -_end(span)))
    steps = [span["args"]["step"] for each in spans.values() for span in each] or chosen
    return range(min(steps), max(steps) + 1), spans


def _end(span: TraceEvent) -> float:
    end: float = span["ts"] + span.get("dur", 0.0)
    return end


def _pack(rank: int, spans: Sequence[TraceEvent], names: dict[str, int]) -> dict[str, Any]:
    """A worker's rows; a span is the index of its name, its row, its times and its facts."""
    lanes = sorted({whole(span.get("tid")) or 1 for span in spans})[:LANES_LIMIT]
    packed = []
    for span in spans:
        lane, facts = whole(span.get("tid")) or 1, list(span["args"].items())[:FACTS_LIMIT]
        if lane in lanes:
            name = names.setdefault(text(span["name"], 40), len(names))
            said = ", ".join(f"{text(key, 20)} {text(value, 40)}" for key, value in facts)
            times = [round(span["ts"], 1), round(span.get("dur", 0.0), 1)]
            packed.append([name, lanes.index(lane), *times, said])
    return {"rank": rank, "lanes": [LANES.get(lane, "thread") for lane in lanes], "spans": packed}
