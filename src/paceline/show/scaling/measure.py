"""Running the job at each size, in turns, and averaging the recorded steps to one usual step.

Sizes take turns, forth and back, so that a machine that becomes warm or busy affects all of them.
Each run is `paceline run --timeline`, ended when it has made enough steps.

In each step the rank with the median own work is typical: its phases are the step's.

    recordings --> steps after the warm-up --> all but the longest and shortest --> their mean

The phases of a mean step add up, as in single steps, and a checkpoint or a pause does not count. (A
median would not work: where workers share cores, steps have two or three typical lengths.)
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from paceline.env import RUNS_VARIABLE
from paceline.errors import UsageError, WorkerError
from paceline.launcher import die_with
from paceline.telemetry import (
    OWN,
    Blame,
    Phase,
    RankRecording,
    after_warm_up,
    count_text,
    find_recordings,
    find_slow_worker,
    survey,
    transfers_us,
)

_POLL_S = 0.2
_TAIL_BYTES = 2**14
_SAID_LINES = 40

Seconds = Mapping[Phase, float]


class BucketTiming(NamedTuple):
    """One bucket of gradients."""

    ready_s: float
    """How long after the start of backward the bucket is ready."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A usual step of the job on some number of workers; `seconds` add up to `step_s`."""

    workers: int
    seconds: Seconds
    samples: int | None = None
    """Samples in a global batch."""
    steps: int = 0
    runs_s: tuple[float, ...] = ()
    """The usual step of each run; their spread shows how reliable they are."""
    buckets: tuple[BucketTiming, ...] = ()
    threads: int = 1
    ranks_per_device: int = 1
    """1 on CPUs, for which cores are counted instead."""
    slow: Blame | None = None
    """The slow worker, if it is always the same one."""

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def own_s(self) -> float:
        return sum(self.seconds[phase] for phase in OWN)


def read_run(folder: Path, workers: int) -> Profile:
    """A usual step of one run, from the recordings of all ranks, matched by step."""
    with suppress(UsageError):
        ranks = [survey(path) for path in find_recordings(folder)]
        counted = after_warm_up(set.intersection(*(set(rank.steps) for rank in ranks)))
        if counted and len(ranks) == workers:
            return _usual_step(ranks, counted)
    raise UsageError(
        f"The script recorded no steps on {count_text(workers, 'worker')}.",
        advice="Scaling is measured for scripts that train with Paceline's "
        "DistributedDataParallel or Run for at least two steps; for scripts with torch's class "
        "add --as-torch.",
    )


def _usual_step(ranks: Sequence[RankRecording], counted: Sequence[int]) -> Profile:
    transfers = transfers_us(ranks)
    by_rank: dict[int, list[Seconds]] = {
        rank.rank: [
            {phase: us / 1e6 for phase, us in rank.steps[number].us_by_phase.items()}
            for number in counted
        ]
        for rank in ranks
    }
    steps, samples = [], Counter[int]()
    for number, every in zip(counted, zip(*by_rank.values(), strict=True), strict=True):
        steps.append(typical(every, transfers[number] / 1e6))
        samples[sum(rank.steps[number].samples for rank in ranks)] += 1
    seconds = mean_of(usual_steps(steps))
    devices = Counter(str(rank.facts.get("device", "cpu")) for rank in ranks)
    shared = [count for device, count in devices.items() if not device.startswith("cpu")]
    buckets = usual_buckets([rank.steps[step].buckets for rank in ranks for step in counted])
    return Profile(
        workers=len(ranks),
        seconds=seconds,
        samples=samples.most_common(1)[0][0] or None,
        steps=len(steps),
        runs_s=(sum(seconds.values()),),
        buckets=spread(buckets, seconds[Phase.BACKWARD]) if shared else buckets,
        threads=max(rank.facts.get("threads", 1) for rank in ranks),
        ranks_per_device=max(shared, default=1),
        slow=find_slow_worker(by_rank),
    )


def combine(runs: Sequence[Profile]) -> Profile:
    """Average the faster half of the runs at one size.

    Other work on the machine can only make runs slower, so the faster ones are more accurate.
    """
    taken = sorted(runs, key=lambda run: run.step_s)[: (len(runs) + 1) // 2]
    return replace(
        taken[0],
        seconds=mean_of([run.seconds for run in taken]),
        steps=sum(run.steps for run in taken),
        runs_s=tuple(run.step_s for run in runs),
    )


def mean_of(every: Sequence[Seconds]) -> Seconds:
    return {phase: fmean(each[phase] for each in every) for phase in every[0]}


def typical(ranks: Sequence[Seconds], transfer_s: float) -> Seconds:
    """One step: the phases of the rank with the median own work, its wait split in two."""
    own = [sum(seconds[phase] for phase in OWN) for seconds in ranks]
    middle = sorted(range(len(ranks)), key=lambda rank: own[rank])[(len(ranks) - 1) // 2]
    wait_s = ranks[middle][Phase.WAIT] - transfer_s
    return {**ranks[middle], Phase.WAIT: wait_s, Phase.TRANSFER: transfer_s}


def usual_buckets(steps: Sequence[Sequence[tuple[float, int]]]) -> tuple[BucketTiming, ...]:
    """The most frequent bucket layout, with median ready times, given in microseconds."""
    sizes = Counter(tuple(nbytes for _, nbytes in step) for step in steps)
    usual = sizes.most_common(1)[0][0] if sizes else ()
    alike = [step for step in steps if tuple(nbytes for _, nbytes in step) == usual]
    return tuple(
        BucketTiming(median(step[number][0] for step in alike) / 1e6, nbytes)
        for number, nbytes in enumerate(usual)
    )


def spread(buckets: Sequence[BucketTiming], backward_s: float) -> tuple[BucketTiming, ...]:
    """Buckets on a GPU, ready in proportion to bytes: the host, which records, runs ahead."""
    whole = sum(bucket.nbytes for bucket in buckets)
    so_far, found = 0, []
    for bucket in buckets:
        so_far += bucket.nbytes
        found.append(BucketTiming(backward_s * so_far / max(1, whole), bucket.nbytes))
    return tuple(found)


def usual_steps(steps: Sequence[Seconds]) -> list[Seconds]:
    """All steps except the longest tenth and the shortest tenth."""
    by_length = sorted(steps, key=lambda seconds: sum(seconds.values()))
    tenth = len(steps) // 10
    return by_length[tenth : len(steps) - tenth]


def measure(
    script: Sequence[str],
    sizes: Sequence[int],
    repeats: int,
    steps: int,
    log: Callable[[str], None],
) -> list[Profile]:
    """Run all sizes and repeats; returns a usual step for each size.

    `script` has the arguments of `paceline run`: flags, the script, its arguments. A run is ended
    when every worker has made `steps` steps.
    """
    runs: dict[int, list[Profile]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="paceline-scale-") as scratch:
        forth_and_back = [sizes, sizes[::-1]] * repeats
        for repeat, size in ((n, size) for n in range(repeats) for size in forth_and_back[n]):
            profile = _measure_once(script, size, steps, Path(scratch) / f"run{repeat}-{size}")
            runs[size].append(profile)
            workers = count_text(size, "worker")
            log(f"run {repeat + 1} of {repeats}, {workers}: {profile.step_s * 1e3:.2f} ms a step")
    return [combine(runs[size]) for size in sizes]


def _measure_once(script: Sequence[str], size: int, steps: int, folder: Path) -> Profile:
    (folder / "job").mkdir(parents=True, mode=0o700)
    timeline = folder / "timeline"
    command = command_of(script, size, folder)
    run_once(command, size, folder, lambda: steps_made(timeline, size) >= steps)
    return read_run(timeline, size)


def command_of(script: Sequence[str], size: int, folder: Path) -> list[str]:
    """The command of one run; `{workers}` and `{folder}` in arguments are filled in."""
    run = [sys.executable, "-m", "paceline", "run", "--workers", str(size)]
    own = [
        argument.replace("{workers}", str(size)).replace("{folder}", str(folder / "job"))
        for argument in script
    ]
    return [*run, "--timeline", str(folder / "timeline"), *own]


def run_once(
    command: Sequence[str],
    size: int,
    folder: Path,
    is_done: Callable[[], bool],
    environ: Mapping[str, str] = {},
) -> None:
    """Start the job and wait until it ends or `is_done`; its output goes to a file."""
    said = folder / "output"
    with open(said, "wb") as output:
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A new runs folder each time: a script that resumes its run would have nothing left to
            # do.
            env={**os.environ, RUNS_VARIABLE: str(folder / "runs"), **environ},
            # Ended by the kernel if this process is killed, which cannot end it then.
            preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
        )
    has_enough = False
    try:
        while job.poll() is None and not has_enough:
            time.sleep(_POLL_S)
            has_enough = is_done()
    finally:
        job.terminate()  # the launcher ends its workers; no effect if it has ended
        job.wait()
    if job.returncode and not has_enough:
        lines = said.read_text("utf-8", "replace").splitlines()
        raise WorkerError(
            f"The job failed on {count_text(size, 'worker')}.",
            where="\n".join(lines[-_SAID_LINES:]),
            advice="Run it with `paceline run` first.",
            rank=-1,
        )


def steps_made(timeline: Path, size: int) -> int:
    """How many steps the slowest rank has recorded so far."""
    found = []
    for rank in range(size):
        try:
            with open(timeline / f"rank{rank}.trace.json", "rb") as file:
                file.seek(0, 2)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                ended = re.findall(rb'"step": (\d+), "last": true', file.read(_TAIL_BYTES))
        except FileNotFoundError:
            return 0
        found.append(int(ended[-1]) if ended else 0)
    return min(found)
