"""Time from the command to the first step of a `Run`, with one worker and with several.

A small training is started each time: by `paceline run`, with and without its template, by
`paceline.launch`, and by torchrun. Contestants alternate; a start ends when the last worker has
finished its first step.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.spread import ratio, rotated, spread
from benchmarks.tables import print_table

CONTESTANTS = {
    "paceline run": ["-m", "paceline", "run", "--workers={workers}", "-m"],
    "paceline run --no-template": [
        *("-m", "paceline", "run", "--no-template", "--workers={workers}", "-m")
    ],
    "paceline.launch": ["-c", "import benchmarks.launching as it; it.launch({workers})"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node={workers}", "-m"],
}
MARK = "first step at "


def train() -> None:
    """One step, on any number of workers."""
    import torch
    from torch.utils.data import TensorDataset

    import paceline

    net = torch.nn.Linear(64, 8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = TensorDataset(torch.zeros(64, 64), torch.zeros(64, dtype=torch.long))
    options = paceline.RunOptions(progress="quiet")
    run = paceline.Run(net, optimizer, data, global_batch=64, epochs=1, options=options)
    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(torch.nn.functional.cross_entropy(run.model(x), y))
    print(f"\n{MARK}{time.clock_gettime(time.CLOCK_MONOTONIC)}", flush=True)


def launch(workers: int) -> None:
    """Train in a function, as in a notebook."""
    import paceline

    paceline.launch(train, workers=workers)


def measure(contestant: str, workers: int) -> float:
    """Seconds until the last worker has finished its first step."""
    command = [part.format(workers=workers) for part in CONTESTANTS[contestant]]
    if command[-1] == "-m":
        command.append("benchmarks.launching")
    folder = str(Path(__file__).parents[1])
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}/src:{folder}"}
    begin_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    done = subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, check=True
    )
    times = re.findall(re.escape(MARK) + r"([\d.]+)", done.stdout)
    return max(map(float, times)) - begin_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, default=8, help="the number of several workers (default 8)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="1 round, 2 workers")


def main(args: argparse.Namespace) -> dict[str, Any]:
    several, rounds = (2, 1) if args.quick else (args.workers, args.rounds)
    cases = [(name, workers) for name in CONTESTANTS for workers in (1, several)]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in rotated(cases, 2 * number):
            seconds[case].append(measure(*case))
    rows = rows_of(seconds, several)
    print_table("first step", rows)
    return {"first step": rows}


def rows_of(seconds: dict[tuple[str, int], list[float]], several: int) -> list[dict[str, Any]]:
    """One row per contestant: seconds with one and with several workers, and their ratio."""
    rows = []
    for name in CONTESTANTS:
        one, more = seconds[name, 1], seconds[name, several]
        row: dict[str, Any] = {"contestant": name}
        row["1 worker, s"] = round(spread(one).median, 2)
        row[f"{several} workers, s"] = round(spread(more).median, 2)
        row[f"{several} / 1"] = round(ratio(more, one).median, 2)
        rows.append(row)
    return rows


if __name__ == "__main__":
    train()
