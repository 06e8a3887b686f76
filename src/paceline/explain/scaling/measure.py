"""Running the job at each size, through the launcher, in turns.

Sizes take turns, forth and back, so that a machine that grows warm or busy does so for all of
them. Each run is recorded as with `paceline run --timeline`, and is ended when it has made enough
steps. What the script prints is kept away from the console.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import WorkerError
from paceline.explain.scaling.profile import Profile, Run, combine, read_run
from paceline.launcher import count_cores
from paceline.launcher.flags import LaunchOptions, read_options
from paceline.launcher.process import Ending, report
from paceline.launcher.run import LocalRun

ENOUGH = "enough steps were made"
_LOOK_EVERY_S = 0.2
_TAIL_BYTES = 2**14
_SAID_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What to run, and how."""

    program: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    as_torch: bool = False
    threads: int | None = None
    """For each worker, the same at all sizes; None leaves it to OMP_NUM_THREADS."""
    steps: int = 200
    """When every worker has made so many, a run is ended."""


def order(sizes: Sequence[int], repeats: int) -> Iterator[tuple[int, int]]:
    """(repeat, size) of all runs: forth, then back, and so on."""
    for repeat in range(repeats):
        for size in sizes if repeat % 2 == 0 else reversed(sizes):
            yield repeat, size


def measure(
    script: Script, sizes: Sequence[int], repeats: int, tell: Callable[[str], None]
) -> list[Profile]:
    """Run all sizes, all repeats; a usual step for each size."""
    runs: dict[int, list[Run]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="paceline-scale-") as scratch:
        for repeat, size in order(sizes, repeats):
            folder = Path(scratch) / f"run{repeat}-{size}"
            (folder / "job").mkdir(parents=True, mode=0o700)
            begun, before = time.monotonic(), _others_s()
            run_once(script, size, folder)
            wall_s = time.monotonic() - begun
            others_cores = max(0.0, (_others_s() - before) / wall_s)
            runs[size].append(read_run(folder / "timeline", wall_s, others_cores))
            profile = combine(size, runs[size][-1:])
            what = "for the whole job" if profile.is_whole_job else "a step"
            workers = f"{size} worker{'s' if size > 1 else ''}"
            tell(f"run {repeat + 1} of {repeats}, {workers}: {profile.step_s * 1e3:.2f} ms {what}")
    return [combine(size, runs[size]) for size in sizes]


def run_once(script: Script, size: int, folder: Path) -> None:
    """Start the script on `size` workers and wait for its end."""
    options = read_run_options(script, size, folder)
    timeline = folder / "timeline"
    with ExitStack() as stack:
        run = LocalRun(options, stack)
        ending = run.run_alone(
            0, lambda: ENOUGH if steps_made(timeline, size) >= script.steps else ""
        )
    if ending.signal is not None:
        raise SystemExit(128 + ending.signal)
    if not ending.succeeded and ending.elsewhere != ENOUGH:
        raise _failure(ending, size, Path(run.log_root))


def read_run_options(script: Script, size: int, folder: Path) -> LaunchOptions:
    """As `paceline run` would, with all output in files of ours."""
    given = {
        "nproc_per_node": str(size),
        "threads": str(script.threads) if script.threads else None,
        "module": "1" if script.is_module else None,
        "as_torch": "1" if script.as_torch else None,
        "timeline": str(folder / "timeline"),
        "redirects": "3",
        "log_dir": str(folder / "logs"),
        "monitor_interval": str(_LOOK_EVERY_S),
    }
    names = {"{workers}": str(size), "{folder}": str(folder / "job")}
    arguments = tuple(fill_in(argument, names) for argument in script.arguments)
    return read_options(given, {}, script.program, arguments)


def fill_in(argument: str, names: Mapping[str, str]) -> str:
    """Put values for `{workers}` and `{folder}` into an argument of the script."""
    for name, value in names.items():
        argument = argument.replace(name, value)
    return argument


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


def _others_s() -> float:
    """Seconds that cores worked for programs that are none of ours; 0 where nobody can tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    except (OSError, ValueError):
        return 0.0
    if count_cores() < (os.cpu_count() or 1):  # a container sees the work of all its neighbours
        return 0.0
    busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy_s - sum(usage.ru_utime + usage.ru_stime for usage in ours)


def _failure(ending: Ending, size: int, logs: Path) -> WorkerError:
    said = ""
    first = ending.first_failure
    if first is not None and (first.error is None or not first.error.traceback):
        for path in sorted(logs.glob(f"attempt_*/{first.rank}/stderr.log")):
            lines = path.read_text("utf-8", "replace").splitlines()
            said = "\n".join(lines[-_SAID_LINES:])
    return WorkerError(
        f"The job failed on {size} worker{'s' if size > 1 else ''}.",
        where=(report(ending).rstrip() + "\n" + said).rstrip(),
        advice="Try it with `paceline run` first.",
        rank=-1 if first is None else first.rank,
    )
