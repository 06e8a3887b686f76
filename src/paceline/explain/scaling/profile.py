"""A usual step at one size, made of what the workers recorded.

In each step one rank is typical: the one in the middle, by its own work. Its phases are the step's.
What it waits is split: the rank that waits least came last and waited for nobody, so its wait is
the exchange itself, and the rest of the typical rank's is waiting for the slowest.

    recordings --> steps after the warm-up --> all but the longest and shortest --> their mean

Means add up as single steps do, and a checkpoint or a stutter does not count. (A median would
not do: where workers share cores, steps have two or three usual lengths.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.explain.scaling.simulation import Bucket
from paceline.observe.spans import COMMUNICATION, COMPUTE
from paceline.observe.timeline import find_recordings, read_events

OWN = ("data", "forward", "backward", "optimizer", "other")
PHASES = (*OWN, "waiting", "communication")
WARM_UP_STEPS = 20
"""So many steps the search for a good bucket size takes; at most a third of all are left out."""

Seconds = dict[str, float]


@dataclass(slots=True)
class RankSteps:
    """What one rank recorded in one run."""

    seconds: dict[int, Seconds] = field(default_factory=dict)
    """By step, by phase: the own ones, and wait."""
    samples: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    buckets: dict[int, list[Bucket]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the job: its usable steps, and how long all of it took."""

    wall_s: float
    steps: tuple[Seconds, ...] = ()
    own_by_rank: tuple[tuple[Seconds, ...], ...] = ()
    """By step, by rank."""
    samples: int | None = None
    """In a global batch."""
    buckets: tuple[Bucket, ...] = ()
    devices: tuple[str, ...] = ()
    threads: int = 1
    others_cores: float = 0.0
    """How many cores other programs used meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A usual step of the job on some number of workers; `seconds` add up to `step_s`."""

    workers: int
    step_s: float
    seconds: Mapping[str, float]
    samples: int | None = None
    steps: int = 0
    runs_s: tuple[float, ...] = ()
    """A usual step of each run alone: how far they are apart is how far to trust them."""
    own_by_rank: tuple[Mapping[str, float], ...] = ()
    buckets: tuple[Bucket, ...] = ()
    threads: int = 1
    ranks_per_device: int = 1
    """1 on CPUs, whose cores are counted instead."""
    others_cores: float = 0.0
    """How many cores other programs used meanwhile."""
    is_whole_job: bool = False
    """Nothing was recorded: `step_s` is the time of the whole job, its start included."""


def read_run(folder: Path, wall_s: float, others_cores: float = 0.0) -> Run:
    """What all ranks of one run recorded, matched step by step."""
    try:
        ranks = [read_rank(read_events(path)) for path in find_recordings(folder)]
    except ValueError:
        ranks = []
    expected = max((rank.facts.get("size", 1) for rank in ranks), default=1)
    if not ranks or len(ranks) != expected:
        return Run(wall_s=wall_s, others_cores=others_cores)
    common = sorted(set.intersection(*(set(rank.seconds) for rank in ranks)))
    chosen = common[warm_up(len(common)) :]
    samples = [sum(rank.samples[step] for rank in ranks) for step in chosen]
    device_names = tuple(str(rank.facts.get("device", "cpu")) for rank in ranks)
    return Run(
        wall_s=wall_s,
        steps=tuple(typical([rank.seconds[step] for rank in ranks]) for step in chosen),
        own_by_rank=tuple(
            tuple({phase: rank.seconds[step][phase] for phase in OWN} for rank in ranks)
            for step in chosen
        ),
        samples=Counter(samples).most_common(1)[0][0] or None if samples else None,
        buckets=usual_buckets([r.buckets[s] for r in ranks for s in chosen if s in r.buckets]),
        devices=device_names,
        threads=max(rank.facts.get("threads", 1) for rank in ranks),
        others_cores=others_cores,
    )


def warm_up(steps: int) -> int:
    """How many first steps are left out."""
    return min(WARM_UP_STEPS, steps // 3)


def read_rank(events: Iterable[Mapping[str, Any]]) -> RankSteps:
    """One rank's steps. A step reaches from the end of the one before it to its own."""
    found = RankSteps()
    parts: Seconds = dict.fromkeys((*OWN, "wait"), 0.0)
    ready: list[tuple[float, int]] = []
    ended_us: float | None = None
    backward_us = 0.0
    for event in events:
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        name, step, at = event["name"], args.get("step"), event.get("ts")
        if event.get("ph") == "M":
            if name == "paceline_rank":
                found.facts = _facts(args)
        elif type(step) is not int or not isinstance(at, int | float):
            continue
        elif name == "batch" and type(args.get("samples")) is int:
            found.samples[step] += args["samples"]
        elif name == "ready" and event.get("tid") == COMMUNICATION:
            if type(args.get("bytes")) is int:
                ready.append((float(at), args["bytes"]))
        elif name in parts and event.get("tid") == COMPUTE and _is_number(event.get("dur")):
            duration_us = event["dur"]
            if name == "backward" and (not ready or at < ready[0][0]) and not backward_us:
                backward_us = at
            parts[name] += duration_us / 1e6
            if args.get("last") is True:
                end_us = at + duration_us
                if ended_us is not None:
                    whole = (end_us - ended_us) / 1e6
                    parts["other"] = whole - sum(parts[p] for p in parts if p != "other")
                    found.seconds[step] = parts
                    found.buckets[step] = [
                        Bucket(max(0.0, (us - backward_us) / 1e6), nbytes) for us, nbytes in ready
                    ]
                ended_us, backward_us = end_us, 0.0
                parts, ready = dict.fromkeys((*OWN, "wait"), 0.0), []
    return found


def typical(ranks: Sequence[Seconds]) -> Seconds:
    """One step: the phases of the rank in the middle, its wait split in two."""
    own = [sum(seconds[phase] for phase in OWN) for seconds in ranks]
    middle = sorted(range(len(ranks)), key=lambda rank: own[rank])[(len(ranks) - 1) // 2]
    found = {phase: ranks[middle][phase] for phase in OWN}
    communication = min(seconds["wait"] for seconds in ranks)
    found["communication"] = communication
    found["waiting"] = ranks[middle]["wait"] - communication
    return found


def usual_buckets(steps: Sequence[Sequence[Bucket]]) -> tuple[Bucket, ...]:
    """The buckets of most steps, each ready at the median of its times."""
    if not steps:
        return ()
    sizes = Counter(tuple(bucket.nbytes for bucket in step) for step in steps)
    usual = sizes.most_common(1)[0][0]
    alike = [step for step in steps if tuple(bucket.nbytes for bucket in step) == usual]
    return tuple(
        Bucket(median(step[number].ready_s for step in alike), nbytes)
        for number, nbytes in enumerate(usual)
    )


def spread(buckets: Sequence[Bucket], backward_s: float) -> tuple[Bucket, ...]:
    """Buckets on a GPU, ready as their bytes come: the host, which notes times, runs ahead."""
    whole = sum(bucket.nbytes for bucket in buckets)
    so_far, found = 0, []
    for bucket in buckets:
        so_far += bucket.nbytes
        found.append(Bucket(backward_s * so_far / max(1, whole), bucket.nbytes))
    return tuple(found)


def usual_steps(steps: Sequence[Seconds]) -> list[int]:
    """Which steps are usual: all but a tenth, the longest, and a tenth, the shortest."""
    by_length = sorted(range(len(steps)), key=lambda index: sum(steps[index].values()))
    tenth = len(steps) // 10
    return by_length[tenth : len(steps) - tenth]


def combine(workers: int, runs: Sequence[Run]) -> Profile:
    """The faster half of the runs at one size as one usual step.

    Whatever else a machine does makes runs longer, never shorter.
    """
    is_whole_job = not all(run.steps for run in runs)
    lengths = [run.wall_s if is_whole_job else _length(run) for run in runs]
    by_length = sorted(range(len(runs)), key=lambda index: lengths[index])
    taken = [runs[index] for index in by_length[: (len(runs) + 1) // 2]]
    others = fmean(run.others_cores for run in taken)
    if is_whole_job:
        whole = median(run.wall_s for run in taken)
        return Profile(
            workers=workers,
            step_s=whole,
            seconds={**dict.fromkeys(PHASES, 0.0), "other": whole},
            runs_s=tuple(lengths),
            others_cores=others,
            is_whole_job=True,
        )
    steps = [step for run in taken for step in run.steps]
    own = [ranks for run in taken for ranks in run.own_by_rank]
    chosen = usual_steps(steps)
    seconds = {phase: fmean(steps[index][phase] for index in chosen) for phase in PHASES}
    best = taken[0]
    sharing = Counter(device for device in best.devices if not device.startswith("cpu"))
    return Profile(
        workers=workers,
        step_s=sum(seconds.values()),
        seconds=seconds,
        samples=best.samples,
        steps=len(steps),
        runs_s=tuple(lengths),
        own_by_rank=tuple(
            {phase: fmean(own[index][rank][phase] for index in chosen) for phase in OWN}
            for rank in range(workers)
        ),
        buckets=spread(best.buckets, seconds["backward"]) if sharing else best.buckets,
        threads=best.threads,
        ranks_per_device=max(sharing.values(), default=1),
        others_cores=others,
    )


def _length(run: Run) -> float:
    """A usual step of one run."""
    return fmean(sum(run.steps[index].values()) for index in usual_steps(run.steps))


def _facts(args: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {"size": int, "threads": int, "device": str}
    return {key: args[key] for key, kind in kinds.items() if type(args.get(key)) is kind}


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
