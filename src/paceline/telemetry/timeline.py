"""`paceline timeline`: the recordings of all ranks merged on one clock, and their averages.

Files may be larger than memory, so they are read line by line: first for the clocks and the steps,
then to be written as one. Only with all ranks side by side can waiting for the last worker be told
from the transfer that follows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, WireError
from paceline.files import numbered_files, open_plain, parse_json, write_output
from paceline.telemetry.phases import MEASURED, Phase
from paceline.telemetry.spans import COMMUNICATION, COMPUTE, IN_FLIGHT, ROUNDING_GUARD_US, SCHEMA
from paceline.telemetry.units import table_lines

WARM_UP_STEPS = 5
"""The first steps import, allocate and learn the order of gradients; they are left out, but at most
a third of all steps."""
_LINE_LIMIT = 2**20
_TIMES_BY_KIND = {"X": ("ts", "dur"), "i": ("ts",), "M": ()}

TraceEvent = dict[str, Any]


@dataclass(slots=True)
class Clock:
    """A recording's clock; it applies to all events up to the next `Clock` of the file."""

    machine: str = ""
    zero_ns: int = 0
    """The machine's monotonic clock at time 0 of the recording."""
    zero_unix_ns: int = 0
    """The machine's wall clock at the same moment."""

    def us_behind(self, first: Clock) -> float:
        """What to add to a time to convert it to the first rank's clock."""
        if self.machine == first.machine:
            return (self.zero_ns - first.zero_ns) / 1000
        return (self.zero_unix_ns - first.zero_unix_ns) / 1000


@dataclass(slots=True)
class RecordedStep:
    """One rank's step, from the end of the previous step to its own end, in microseconds."""

    us_by_phase: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(MEASURED, 0.0))
    """The phases add up to the step: what no span covers is `other`."""
    samples: int = 0
    backward_us: float | None = None
    """When backward began."""
    ready: list[tuple[float, int]] = field(default_factory=list)
    """When each bucket was ready, and its bytes."""

    @property
    def buckets(self) -> list[tuple[float, int]]:
        """How long after the start of backward each bucket was ready, and its bytes."""
        begin_us = self.backward_us or 0.0
        return [(max(0.0, us - begin_us), nbytes) for us, nbytes in self.ready]


@dataclass(slots=True)
class RankRecording:
    """One rank's file: its clocks in order, its complete steps by number, and what is missing."""

    path: Path
    rank: int
    clocks: list[Clock] = field(default_factory=list)
    steps: dict[int, RecordedStep] = field(default_factory=dict)
    waits_us: dict[int, float] = field(default_factory=dict)
    """By step, how long the rank waited for the sums of its gradients."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the rank recorded about itself: size, device, threads."""
    most_events: int | None = None
    """How many were read at most; None for all."""
    dropped: int = 0


def find_recordings(folder: Path) -> list[Path]:
    """The files of all ranks in a run folder, or in `folder` itself."""
    for place in (folder / "timeline", folder):
        named = numbered_files(place, r"rank(\d{1,7})\.trace\.json")
        if named:
            return list(named.values())
    raise UsageError(
        f"There is no recording in {folder}.",
        advice="Record one with `paceline run --timeline FOLDER script.py`.",
    )


def read_events(path: Path) -> Iterator[TraceEvent]:
    """The valid events of one file, all with `args`; an incomplete last line is skipped."""
    with open_plain(path) as file:
        while line := file.readline(_LINE_LIMIT):
            text = line.strip().rstrip(b",")
            try:
                event = parse_json(text, path) if text.startswith(b"{") else None
            except WireError:
                continue
            if not isinstance(event, dict) or not isinstance(event.get("name"), str):
                continue
            times = _TIMES_BY_KIND.get(str(event.get("ph")))
            given: list[Any] = [event.get(key) for key in times or ()]
            is_timed = all(type(time) in (int, float) and abs(time) < 2**63 for time in given)
            if times is not None and is_timed:
                event.update({key: round(event[key], 3) for key in times})  # whole nanoseconds
                if not isinstance(event.get("args"), dict):
                    event["args"] = {}
                yield event


def survey(path: Path, most_events: int | None = None) -> RankRecording:
    """Read a file, or its beginning, for its clocks, steps and facts."""
    found = RankRecording(path, int(re.findall(r"\d+", path.name)[0]), most_events=most_events)
    step, ended_us = RecordedStep(), None
    for event in islice(read_events(path), most_events):
        name, args, number = event["name"], event["args"], event["args"].get("step")
        if event["ph"] == "M":
            _survey_metadata(found, name, args)
            if name == "paceline":  # a restarted rank: the interrupted step has no end
                step, ended_us = RecordedStep(), None
        elif type(number) is not int:
            continue
        elif name == "batch" and type(args.get("samples")) is int:
            step.samples += args["samples"]
        elif name == "ready" and type(args.get("bytes")) is int:
            step.ready.append((event["ts"], args["bytes"]))
        elif name in MEASURED and event.get("tid") == COMPUTE and event["ph"] == "X":
            step.us_by_phase[Phase(name)] += event["dur"]
            if name == Phase.BACKWARD and step.backward_us is None:
                step.backward_us = event["ts"]
            if args.get("last") is True:
                end_us = event["ts"] + event["dur"]
                found.waits_us[number] = event["dur"] if name == Phase.WAIT else 0.0
                if ended_us is not None:
                    us = step.us_by_phase
                    us[Phase.OTHER] += end_us - ended_us - sum(us.values())
                    found.steps[number] = step
                step, ended_us = RecordedStep(), end_us
    return found


def _survey_metadata(found: RankRecording, name: str, args: Mapping[str, Any]) -> None:
    if name == "paceline":
        if args.get("schema") != SCHEMA:
            raise UsageError(
                f"{found.path} has schema {args.get('schema')!r}; this paceline reads {SCHEMA}.",
                advice="Read it with the version that wrote it.",
            )
        unix, zero_unix = args.get("unix_minus_monotonic_ns"), args.get("zero_unix_ns")
        clock = Clock(str(args.get("machine")))
        if type(unix) is int and type(zero_unix) is int:
            clock.zero_ns, clock.zero_unix_ns = zero_unix - unix, zero_unix
        found.clocks.append(clock)
    elif name == "paceline_rank":
        kinds = {"size": int, "threads": int, "device": str}
        found.facts = {key: args[key] for key, kind in kinds.items() if type(args.get(key)) is kind}
    elif name == "paceline_cost" and type(args.get("dropped")) is int:
        found.dropped += args["dropped"]


def transfers_us(recordings: Sequence[RankRecording]) -> dict[int, float]:
    """By step that all ranks have: how long the sums took once every rank was ready.

    The rank that waited least came last: it waited for no other, so its wait is the transfer.
    """
    common = set.intersection(*(set(recording.waits_us) for recording in recordings))
    return {step: min(each.waits_us[step] for each in recordings) for step in common}


def after_warm_up(steps: Iterable[int]) -> list[int]:
    """The steps that count."""
    every = sorted(steps)
    return every[min(WARM_UP_STEPS, len(every) // 3) :]


def average_steps(
    recordings: Sequence[RankRecording], chosen: range | None = None
) -> dict[int, dict[Phase, float]]:
    """By rank: milliseconds by phase in an average step; the phases add up to the step."""
    transfers = transfers_us(recordings)
    found = {}
    for recording in recordings:
        steps = after_warm_up(recording.steps)
        if chosen is not None:
            steps = [step for step in recording.steps if step in chosen]
        if steps:
            total = {
                phase: sum(recording.steps[step].us_by_phase[phase] for step in steps)
                for phase in MEASURED
            }
            total[Phase.TRANSFER] = sum(transfers.get(step, 0.0) for step in steps)
            total[Phase.WAIT] -= total[Phase.TRANSFER]
            found[recording.rank] = {phase: total[phase] / len(steps) / 1000 for phase in Phase}
    return found


def merge(recordings: Sequence[RankRecording], steps: range | None = None) -> Iterator[TraceEvent]:
    """All events on the first rank's clock, rank after rank; waits are split from transfers."""
    transfers = transfers_us(recordings)
    first = recordings[0].clocks[0] if recordings[0].clocks else Clock()
    start = sys.float_info.max
    all_ready: dict[Any, float] = defaultdict(float)
    # A span is written when it ends, so the first to begin is not the first in a file.
    for recording in recordings:
        for event in _shifted(recording, first, steps):
            if event["ph"] != "M":
                start = min(start, event["ts"])
            if event["name"] == "ready":
                bucket = _bucket(event)
                all_ready[bucket] = max(all_ready[bucket], event["ts"])
    for recording in recordings:
        seen = set[tuple[str, str]]()  # a restarted rank repeats its metadata
        for event in _shifted(recording, first, steps):
            if event["ph"] == "M":
                key = (event["name"], str(event.get("tid")))
                if key not in seen:
                    seen.add(key)
                    yield event
            else:
                for part in _split(event, transfers, all_ready):
                    yield {**part, "ts": round(part["ts"] - start, 3)}


def _bucket(event: TraceEvent) -> tuple[str, str]:
    return str(event["args"].get("step")), str(event["args"].get("bucket"))


def _shifted(recording: RankRecording, first: Clock, steps: range | None) -> Iterator[TraceEvent]:
    """The chosen events of a file on the first rank's clock, and the names of its lanes."""
    clocks = iter(recording.clocks)
    shift = 0.0
    for event in islice(read_events(recording.path), recording.most_events):
        step = event["args"].get("step")
        if event["ph"] == "M":
            if event["name"] == "paceline":
                shift = next(clocks, Clock()).us_behind(first)
            elif not event["name"].startswith("paceline_"):
                yield event
        elif steps is None or (type(step) is int and step in steps):
            event["ts"] += shift
            yield event


def _split(
    event: TraceEvent, transfers: Mapping[int, float], all_ready: Mapping[Any, float]
) -> Iterator[TraceEvent]:
    """Split a wait: it becomes a transfer when the last rank is ready."""
    if event["ph"] != "X":
        yield event
        return
    end, step = event["ts"] + event["dur"], event["args"].get("step")
    if event["name"] == IN_FLIGHT and event.get("tid") == COMMUNICATION:
        begin = min(end, max(event["ts"], all_ready.get(_bucket(event), 0.0)))
        yield {**event, "name": Phase.TRANSFER, "ts": begin, "dur": round(end - begin, 3)}
    elif event["name"] == Phase.WAIT and event["args"].get("last") is True:
        transfer = min(event["dur"], transfers.get(step, 0.0) if type(step) is int else 0.0)
        if transfer < event["dur"]:
            yield {**event, "dur": round(event["dur"] - transfer, 3)}
        if transfer:
            moved = {"name": Phase.TRANSFER, "ts": end - transfer, "dur": transfer}
            yield {**event, **moved}
    else:
        yield event


def describe(recordings: Sequence[RankRecording], chosen: range | None = None) -> Iterator[str]:
    """The table of all steps, or of the chosen ones, and how much is missing, as lines of text."""
    averages = average_steps(recordings, chosen)
    if averages:
        which = f" from step {chosen.start} up to, not including, {chosen.stop}" if chosen else ""
        yield f"milliseconds in an average step{which}"
        rows = [["  worker", *Phase, "step"]]
        for rank, by_phase in averages.items():
            whole = sum(by_phase.values())
            rows.append([str(rank), *(f"{by_phase[phase]:.2f}" for phase in Phase), f"{whole:.2f}"])
        yield from table_lines(rows, ">")
    else:
        yield f"No whole step was recorded by {len(recordings)} workers."
    dropped = sum(recording.dropped for recording in recordings)
    if dropped:
        yield f"{dropped:,} spans are missing: they came faster than they could be written."


def as_text(events: Iterable[TraceEvent]) -> Iterator[str]:
    """A Chrome trace in its object form, one event per line."""
    before = '{"displayTimeUnit":"ms","traceEvents":[\n'
    for event in events:
        for key in _TIMES_BY_KIND[event["ph"]]:  # see Note [Nanoseconds as microseconds] in spans
            event[key] = round(event[key] + ROUNDING_GUARD_US, 5)
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"
    yield "\n]}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, help="a run folder, or a folder of recordings")
    help = "write one Chrome trace of all workers, for Perfetto (https://ui.perfetto.dev)"
    add("-o", "--output", type=Path, metavar="FILE", help=help)
    help = "only steps from A up to, not including, B: in the table and in FILE"
    add("--steps", metavar="A:B", help=help, default=":")


def main(args: argparse.Namespace) -> int:
    match = re.fullmatch(r"(\d{0,15}):(\d{0,15})", args.steps)
    if match is None:
        raise UsageError(f"--steps is {args.steps!r}.", advice="Write it as 100:120.")
    recordings = [survey(path) for path in find_recordings(args.run)]
    every = sorted({step for recording in recordings for step in recording.waits_us})
    chosen = None
    if args.steps != ":" and every:
        chosen = range(int(match[1] or every[0]), int(match[2] or every[-1] + 1))
        if not any(step in chosen for step in every):
            raise UsageError(
                f"--steps is {args.steps}, of which no step was recorded.",
                advice=f"Choose from {every[0]}:{every[-1] + 1}.",
            )
    for line in describe(recordings, chosen):
        print(line)
    if args.output is not None:
        write_output(args.output, as_text(merge(recordings, chosen)))
        print(f"Wrote {args.output}.")
    return 0
