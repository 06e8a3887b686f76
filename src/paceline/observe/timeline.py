"""`paceline timeline`: the recordings of all ranks as one, on one clock, and what they add up to.

Files may be longer than memory, so they are read twice, line by line: first for the clocks and for
how long each rank waited in each step, then to be written out together. In every step the rank
that waited least came last: its time went into the transfer, and only what the others
waited beyond that was waiting for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import UsageError
from paceline.observe.spans import COMPUTE, SCHEMA

PHASES = ("data", "forward", "backward", "wait", "transfer", "optimizer", "other")
WARM_UP_STEPS = 2
_LINE_LIMIT = 2**20

TraceEvent = dict[str, Any]


@dataclass(slots=True)
class Clock:
    """What one recording says about its clock; `events` before the next one are on it."""

    machine: str = ""
    unix_ns: int = 0
    """What the clock of the day showed when the monotonic one showed nothing."""
    offset_ns: int | None = None
    """How much more rank 0's clock shows, where the ranks compared their clocks."""


@dataclass(slots=True)
class Recording:
    """One rank's file: its clocks in order, its waits by step, and what it cost."""

    path: Path
    rank: int
    clocks: list[Clock] = field(default_factory=list)
    waits_us: dict[int, float] = field(default_factory=dict)
    """By step, how long the rank waited for the sums of its gradients."""
    phases: Phases = field(default_factory=lambda: Phases())
    cost_us: float = 0.0
    recorded_us: float = 0.0
    dropped: int = 0


class Phases:
    """Adds up the phases of whole steps, from the end of one to the end of another.

    The first steps are left out where there are enough: they import, allocate and learn.
    """

    def __init__(self) -> None:
        self.us_by_phase: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.begin_us = 0.0
        self.end_us = 0.0
        self.counted: set[int] = set()
        self._parts: list[tuple[str, float]] = []
        self._ended = 0

    def add(self, name: str, duration_us: float) -> None:
        self._parts.append((name, duration_us))

    def end_step(self, step: int, end_us: float) -> None:
        if self._ended == 0:
            self.begin_us = end_us
        else:
            if self._ended == WARM_UP_STEPS + 1:
                self.begin_us, self.us_by_phase = self.end_us, dict.fromkeys(PHASES, 0.0)
                self.counted.clear()
            self.counted.add(step)
            for name, duration in self._parts:
                self.us_by_phase[name] += duration
        self.end_us = end_us
        self._parts.clear()
        self._ended += 1


def find_recordings(folder: Path) -> list[Path]:
    """The files of all ranks in a run folder, or in the folder named itself."""
    for place in (folder / "timeline", folder):
        named = [
            (int(match[1]), path)
            for path in (place.iterdir() if place.is_dir() else ())
            if (match := re.fullmatch(r"rank(\d{1,7})\.trace\.json", path.name))
            and path.is_file()
            and not path.is_symlink()
        ]
        if named:
            return [path for _, path in sorted(named)]
    raise UsageError(
        f"There is no recording in {folder}.",
        advice="Record one with `paceline run --timeline FOLDER script.py`.",
    )


def read_events(path: Path) -> Iterator[TraceEvent]:
    """The events of one file; half a line at the end of a file that grows is left out."""
    with open(path, encoding="utf-8", errors="replace") as file:
        while line := file.readline(_LINE_LIMIT):
            text = line.strip().rstrip(",")
            if not text.startswith("{"):
                continue
            try:
                event = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and isinstance(event.get("name"), str):
                yield event


def survey(path: Path) -> Recording:
    """The first reading of a file."""
    rank = int(re.findall(r"\d+", path.name)[0])
    found = Recording(path, rank)
    for event in read_events(path):
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if event.get("ph") == "M":
            _survey_metadata(found, event["name"], args)
        elif event.get("ph") == "X" and _is_number(event.get("ts"), event.get("dur")):
            step = args.get("step")
            if event.get("tid") == COMPUTE and event["name"] in PHASES and type(step) is int:
                found.phases.add(event["name"], event["dur"])
                if args.get("last") is True:
                    found.phases.end_step(step, event["ts"] + event["dur"])
                    if event["name"] == "wait":
                        found.waits_us[step] = event["dur"]
    return found


def _survey_metadata(found: Recording, name: str, args: Mapping[str, Any]) -> None:
    if name == "paceline":
        if args.get("schema") != SCHEMA:
            raise UsageError(
                f"{found.path} has schema {args.get('schema')!r}; this paceline reads {SCHEMA}.",
                advice="Read it with the version that wrote it.",
            )
        unix = args.get("unix_minus_monotonic_ns")
        machine = str(args.get("machine", ""))
        found.clocks.append(Clock(machine, unix if type(unix) is int else 0))
    elif name == "paceline_clock" and found.clocks and type(args.get("offset_ns")) is int:
        found.clocks[-1].offset_ns = args["offset_ns"]
    elif name == "paceline_cost" and _is_number(*map(args.get, _COSTS)):
        spans, call, writer, wall = (args[key] for key in _COSTS)
        found.cost_us += (spans * call + writer) / 1000
        found.recorded_us += wall / 1000
        found.dropped += int(args.get("dropped", 0))


_COSTS = ("spans", "call_ns", "writer_ns", "wall_ns")


def offset_us(clock: Clock, first: Clock) -> float:
    """What to add to a time to have it on the first rank's clock."""
    if clock.machine == first.machine:
        return 0.0
    if clock.offset_ns is not None:
        return (clock.offset_ns - (first.offset_ns or 0)) / 1000
    return (clock.unix_ns - first.unix_ns) / 1000


def transfers_us(recordings: Sequence[Recording]) -> dict[int, float]:
    """By step: how long the sums took once everybody was there."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for recording in recordings:
        for step, wait in recording.waits_us.items():
            by_step[step].append(wait)
    return {step: min(waits) for step, waits in by_step.items() if len(waits) == len(recordings)}


def merge(recordings: Sequence[Recording], steps: range | None = None) -> Iterator[TraceEvent]:
    """All events on the first rank's clock, rank after rank; waits are split from transfers."""
    transfers = transfers_us(recordings)
    first = recordings[0].clocks[0] if recordings[0].clocks else Clock()
    # A span is written when it ends, so the first to begin is not the first in a file.
    times = (
        event["ts"]
        for recording in recordings
        for event in _shifted(recording, first, steps)
        if event.get("ph") != "M"
    )
    start = min(times, default=0.0)
    for recording in recordings:
        said = set[tuple[Any, Any]]()  # a restarted rank names itself again
        for event in _shifted(recording, first, steps):
            if event.get("ph") == "M":
                key = (event["name"], event.get("tid"))
                if key not in said:
                    said.add(key)
                    yield event
            else:
                event["ts"] = round(event["ts"] - start, 3)
                yield from _split_wait(event, transfers)


def _shifted(recording: Recording, first: Clock, steps: range | None) -> Iterator[TraceEvent]:
    """The chosen events of a file on the first rank's clock, and the names of its lanes."""
    clocks = iter(recording.clocks)
    shift = 0.0
    for event in read_events(recording.path):
        if event.get("ph") == "M":
            if event["name"] == "paceline":
                shift = offset_us(next(clocks, Clock()), first)
            elif not event["name"].startswith("paceline_"):
                yield event
        elif _is_number(event.get("ts")) and _is_chosen(event, steps):
            event["ts"] += shift
            yield event


def _is_chosen(event: TraceEvent, steps: range | None) -> bool:
    args = event.get("args")
    step = args.get("step") if isinstance(args, dict) else None
    return steps is None or (type(step) is int and step in steps)


def _split_wait(event: TraceEvent, transfers: Mapping[int, float]) -> Iterator[TraceEvent]:
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    step = args.get("step")
    if (
        event["name"] != "wait"
        or type(step) is not int
        or step not in transfers
        or args.get("last") is not True
    ):
        yield event
        return
    whole, transfer = event["dur"], transfers[step]
    if whole > transfer:
        yield {**event, "dur": round(whole - transfer, 3)}
    begin = round(event["ts"] + whole - transfer, 3)
    yield {**event, "name": "transfer", "ts": begin, "dur": round(transfer, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank's average step in milliseconds by phase; the phases add up to `step`."""

    rank: int
    steps: int
    step_ms: float
    ms_by_phase: Mapping[str, float]


def rows(recordings: Sequence[Recording]) -> list[Row]:
    """Where each rank's time went; what no span covers is `other`."""
    transfers = transfers_us(recordings)
    found = []
    for recording in recordings:
        phases = recording.phases
        steps = len(phases.counted)
        if not steps:
            continue
        whole = phases.end_us - phases.begin_us
        known = dict(phases.us_by_phase)
        moved = sum(transfers.get(step, 0.0) for step in phases.counted)
        known["transfer"] = min(moved, known["wait"])
        known["wait"] -= known["transfer"]
        known["other"] = whole - sum(known[phase] for phase in PHASES if phase != "other")
        found.append(
            Row(
                rank=recording.rank,
                steps=steps,
                step_ms=whole / steps / 1000,
                ms_by_phase={phase: us / steps / 1000 for phase, us in known.items()},
            )
        )
    return found


def describe(recordings: Sequence[Recording]) -> Iterator[str]:
    """The table and the cost of recording, as lines of text."""
    table = rows(recordings)
    if table:
        yield "milliseconds in an average step"
        yield "  rank " + "".join(f"{phase:>10}" for phase in PHASES) + f"{'step':>10}"
        for row in table:
            cells = "".join(f"{row.ms_by_phase[phase]:>10.2f}" for phase in PHASES)
            yield f"{row.rank:>6} {cells}{row.step_ms:>10.2f}"
    else:
        yield f"No whole step was recorded by {len(recordings)} ranks."
    wall = sum(recording.recorded_us for recording in recordings)
    if wall:
        share = sum(recording.cost_us for recording in recordings) / wall
        yield f"Recording took {share:.2%} of the time."
    dropped = sum(recording.dropped for recording in recordings)
    if dropped:
        yield f"{dropped:,} spans are missing: they came faster than they could be written."


def write(events: Iterable[TraceEvent], file: TextIO) -> int:
    """Write a Chrome trace in its object form; how many events it has."""
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    count = 0
    for event in events:
        if event.get("dur"):
            # Readers that cut times off at whole nanoseconds would see neighbours overlap by one.
            event = {**event, "dur": round(max(0.0, event["dur"] - 0.001), 3)}
        file.write(",\n" if count else "")
        file.write(json.dumps(event, separators=(",", ":")))
        count += 1
    file.write("\n]}\n")
    return count


def _is_number(*values: object) -> bool:
    return all(type(value) in (int, float) for value in values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run folder, or a folder of recordings")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write one Chrome trace of all ranks, for Perfetto (https://ui.perfetto.dev)",
    )
    parser.add_argument(
        "--steps", metavar="A:B", help="only steps from A up to, not including, B", default=""
    )


def main(args: argparse.Namespace) -> int:
    steps = _steps(args.steps)
    recordings = [survey(path) for path in find_recordings(args.run)]
    for line in describe(recordings):
        print(line)
    if args.output is not None:
        count = _write_file(args.output, merge(recordings, steps))
        print(f"Wrote {count:,} events to {args.output}.")
    return 0


def _steps(text: str) -> range | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d{0,15}):(\d{0,15})", text)
    if match is None:
        raise UsageError(f"--steps is {text!r}.", advice="Write it as 100:120.")
    return range(int(match[1] or 0), int(match[2] or sys.maxsize))


def _write_file(path: Path, events: Iterable[TraceEvent]) -> int:
    """Write all of it, or leave what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
            count = write(events, file)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.", advice="Name another file."
        ) from error
    return count
