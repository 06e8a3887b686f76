"""Interruption of a training when a worker is killed, and the cost of survival without kills.

Workers are killed (SIGKILL) at random moments. Measured is the time from the kill to the next step
that is finished without the dead worker, and to the first step of its replacement. Compared with
torchrun with `--max-restarts`, plain torch and a checkpoint every few steps. Without kills, the
same training with and without `--no-survive`, alternating.

    python -m benchmarks survive --everything --kills 200 --workers 3    all options, and --watch
    python -m benchmarks survive --everything --minutes 20 --workers 3   a soak
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.spread import ratio, rotated
from benchmarks.survive_training import BATCH, FINISHED, SAMPLES
from benchmarks.tables import print_table, read_names
from tests.faults import Training, TrainingFaults, run_training

SCRIPT = Path(__file__).with_name("survive_training.py")
STEPS_PER_EPOCH = SAMPLES // BATCH
TRANSPORTS = ["shared_memory", "c10d", "nccl"]
REPLACED_DEFAULT_S, REPLACED_S = 1.6, {"nccl": 5.0}
"""So long a replacement takes at most on a busy machine, 1.6 s without NCCL: kills come no
faster."""
LONGEST_S = 60.0
"""A training that has finished no step for so long after a kill counts as not come back."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", default="2,3,4", help="numbers of workers (default 2,3,4)")
    parser.add_argument(
        "--transport", default="all", help="shared_memory, c10d or all of these, or nccl"
    )
    parser.add_argument("--kills", type=int, default=20, help="for each number of workers")
    parser.add_argument("--restarts", type=int, default=4, help="kills under torchrun")
    parser.add_argument("--every", type=int, default=10, help="its steps between checkpoints")
    parser.add_argument("--step-ms", type=float, default=20.0, help="pause in each step")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of trainings without kills")
    parser.add_argument(
        "--everything",
        action="store_true",
        help="with timeline, trace, noise, EMA, tracker, page and loader processes: how long, how "
        "far from an undisturbed training, and what worker and launcher hold at the end",
    )
    parser.add_argument("--minutes", type=float, help="duration of the kills, with --everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a short test that it runs")


def main(args: argparse.Namespace) -> dict[str, Any]:
    if args.quick:
        args.workers, args.transport, args.kills, args.restarts, args.rounds = "2", "c10d", 1, 1, 1
    workers = [int(each) for each in args.workers.split(",")]
    pause_s = args.step_ms / 1e3
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    if args.everything:
        kills = args.kills if args.minutes is None else int(60 * args.minutes / REPLACED_DEFAULT_S)
        rows = [kill_with_everything(size, kills, pause_s, args.seed) for size in workers]
        title = f"Workers are killed {kills} times with everything on, load {load:.1f}"
        print_table(title, rows)
        return {title: rows}
    for size in workers:
        for transport in read_names(
            args.transport.replace("all", "shared_memory,c10d"), TRANSPORTS
        ):
            done = kill_workers(size, transport, args.kills, pause_s, args.seed)
            cells = summary("next step", done.recoveries_s)
            cells |= summary("replacement's", done.replacements_s)
            rows.append({"workers": size, "training": f"paceline, {transport}", **cells})
            rows[-1]["steps done again"] = 0
        if not args.restarts:
            continue
        stalls, again = kill_under_torchrun(size, args.restarts, pause_s, args.every, args.seed)
        cells = summary("next step", stalls) | summary("replacement's", stalls)
        name = f"torchrun, saved every {args.every} steps"
        rows.append({"workers": size, "training": name, **cells, "steps done again": again})
    title = f"A worker is killed, steps of {args.step_ms:g} ms, load {load:.1f} at the beginning"
    print_table(title, rows)
    if not args.rounds:
        return {title: rows}
    calm = in_calm(2, 5 if args.quick else 15, pause_s, args.rounds)
    calm_title = f"In calm, 2 workers, steps of {args.step_ms:g} ms"
    print_table(calm_title, calm)
    return {title: rows, calm_title: calm}


def summary(what: str, seconds: list[float]) -> dict[str, Any]:
    """Median, 95 % and worst in milliseconds."""
    ordered = sorted(seconds)
    at = {"median": 0.5, "p95": 0.95, "worst": 1.0}
    last = len(ordered) - 1
    cells: dict[str, Any] = {}
    for name, share in at.items():
        cells[f"{what} {name}, ms"] = round(1e3 * ordered[round(share * last)]) if ordered else "-"
    return cells


def kill_with_everything(size: int, kills: int, pause_s: float, seed: int) -> dict[str, Any]:
    """One training with all options on, compared with an undisturbed one on one worker."""
    with tempfile.TemporaryDirectory(prefix="paceline-everything-") as name:
        more = ["--everything", f"{name}/killed"]
        done = kill_workers(size, "shared_memory", kills, pause_s, seed, more, ["--watch"])
        epochs = len(done.steps) // STEPS_PER_EPOCH
        alone: list[Any] = [
            SCRIPT,
            "--epochs",
            epochs,
            "--pause",
            0,
            "--everything",
            f"{name}/calm",
        ]
        calm = run_training(*alone, workers=1, timeout_s=300 + len(done.steps))
    mine, theirs = (next(iter(each.states.values()))["model"] for each in (done, calm))
    held = [each for each in done.footprints if "launcher" in each]
    cells = summary("next step", done.recoveries_s) | summary("replacement's", done.replacements_s)
    cells["difference"] = max(float((mine[key] - theirs[key]).abs().max()) for key in mine)
    for who in ("worker", "launcher"):
        for at, what in enumerate(("descriptors", "threads", "MB")):
            most = [max(each[who][at] for each in part) for part in (held[: 2 * size], held)]
            most = [
                value // 1024 if what == "MB" else value for value in (*most, held[-1][who][at])
            ]
            cells[f"{who}: {what} at first, most, last"] = ", ".join(map(str, most))
    return {"workers": size, **cells}


def kill_workers(
    size: int,
    transport: str,
    kills: int,
    pause_s: float,
    seed: int,
    more: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> Training:
    """One training in which workers are killed, each when all workers train again."""
    rng = random.Random(seed)
    replaced_s = REPLACED_S.get(transport, REPLACED_DEFAULT_S)
    plan, apart = TrainingFaults(), int(replaced_s / pause_s)
    for number in range(kills):
        rank, seconds = rng.randrange(size), rng.uniform(0.001, 3 * pause_s)
        plan = plan.kill_later(rank=rank, step=10 + apart * number, seconds=seconds)
    epochs = 1 + (1 + kills) * apart // STEPS_PER_EPOCH
    environment = os.environ.get("PACELINE_TRANSPORT")
    arguments: list[Any] = [SCRIPT, "--epochs", epochs, "--pause", pause_s, *more]
    if transport == "nccl":
        arguments, flags = [*arguments, "--large"], ["--share-gpus"]
    limit_s = 900 + 3 * kills * replaced_s
    os.environ["PACELINE_TRANSPORT"] = "c10d" if transport == "nccl" else transport
    try:
        done = run_training(*arguments, workers=size, faults=plan, flags=flags, timeout_s=limit_s)
    finally:
        del os.environ["PACELINE_TRANSPORT"]
        if environment is not None:
            os.environ["PACELINE_TRANSPORT"] = environment
    numbers = [step.number for step in done.steps]
    if done.exit_code or numbers != list(range(1, epochs * STEPS_PER_EPOCH + 1)):
        raise SystemExit(f"The training did not survive:\n{done.output}")
    return done


def kill_under_torchrun(
    size: int, kills: int, pause_s: float, every: int, seed: int
) -> tuple[list[float], float]:
    """Seconds from each kill to the next finished step, and the number of repeated steps."""
    rng, stalls, again = random.Random(seed), list[float](), 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    limits = ["--nproc-per-node", str(size), "--max-restarts", str(kills)]
    with tempfile.TemporaryDirectory(prefix="paceline-torchrun-") as name:
        folder = Path(name)
        what = [str(SCRIPT), "--epochs", "100000", "--pause", str(pause_s)]
        command = [*torchrun, *limits, *what, "--folder", name, "--every", str(every)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            for _ in range(kills):
                _wait_for_step(folder, time.monotonic())
                time.sleep(rng.uniform(0.5, 1.5))
                files = sorted(folder.glob(f"{FINISHED}.*"), key=lambda path: path.stat().st_ctime)
                newest = {path.name.split(".")[1]: int(path.name.split(".")[2]) for path in files}
                before = max(step for step, _ in _finished(folder))
                killed_s = time.monotonic()
                os.kill(newest[str(rng.randrange(size))], signal.SIGKILL)
                try:
                    step, time_s = _wait_for_step(folder, killed_s + 5 * pause_s)
                except TimeoutError:
                    stalls.append(LONGEST_S)
                    break
                stalls.append(time_s - killed_s)
                again += max(0, before - step + 1)
        finally:
            process.terminate()
            process.wait(30)
    return stalls, round(again / max(1, len(stalls)), 1)


def _finished(folder: Path) -> list[tuple[int, float]]:
    """Every step that a process has finished, and when."""
    found = []
    for path in folder.glob(f"{FINISHED}.*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step, time_s = line.split()
                found.append((int(step), float(time_s)))
    return found


def _wait_for_step(folder: Path, after_s: float) -> tuple[int, float]:
    """The first step that is finished after a time."""
    deadline_s = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline_s:
        later = [(time_s, step) for step, time_s in _finished(folder) if time_s > after_s]
        if later:
            time_s, step = min(later)
            return step, time_s
        time.sleep(0.05)
    raise TimeoutError


def in_calm(size: int, epochs: int, pause_s: float, rounds: int) -> list[dict[str, Any]]:
    """Trainings with and without survival, alternating: seconds of a step, and the ratio."""
    flags = {"survives": [], "--no-survive": ["--no-survive"]}
    seconds: dict[str, list[float]] = {name: [] for name in flags}
    for number in range(rounds):
        for name in rotated(list(flags), number):
            done = run_training(
                SCRIPT, "--epochs", epochs, "--pause", pause_s, workers=size, flags=flags[name]
            )
            times = [step.time_s for step in done.steps[STEPS_PER_EPOCH:]]  # past the first steps
            seconds[name].append((times[-1] - times[0]) / (len(times) - 1))
    against = ratio(seconds["survives"], seconds["--no-survive"])
    quartiles = {"survives": f"{against.low:.3f} to {against.high:.3f}"}
    shares = {"survives": round(against.median, 4), "--no-survive": 1.0}
    return [
        {
            "training": name,
            "ms per step": round(1e3 * sorted(each)[len(each) // 2], 3),
            "/ --no-survive": shares[name],
            "quartiles": quartiles.get(name, ""),
        }
        for name, each in seconds.items()
    ]
