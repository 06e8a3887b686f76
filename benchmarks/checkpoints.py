"""Cost of background checkpoints for the training: a save every so many steps against none.

Workers train with DistributedDataParallel, one thread each, on a model with AdamW; rank 0 saves.
Intervals with one save alternate with intervals without, in one process, so that other load of
the machine affects both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.spread import ratio, spread
from benchmarks.tables import print_table
from paceline import DistributedDataParallel, World
from paceline.checkpoint import Checkpoints
from paceline.testing import run_processes


def measure(world: World, name: str, steps: int, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds of each interval with and without a save, and the reports of the saves."""
    model = MODELS[name]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model.build())
    optimizer = torch.optim.AdamW(ddp.parameters())
    batch = model.batch(torch.Generator().manual_seed(world.rank))

    def stretch(checkpoints: Checkpoints | None, number: int) -> float:
        world.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model.loss(ddp, batch).backward()
            optimizer.step()
            if checkpoints is not None and world.rank == 0:
                state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoints.save(number, state, facts={})
                checkpoints = None
        world.barrier()
        return time.perf_counter() - begin

    with Checkpoints(folder, keep=2) as checkpoints:
        stretch(checkpoints, 0)  # allocates memory
        checkpoints.wait()
        checkpoints.take_finished()
        with_save: list[float] = []
        without: list[float] = []
        for number in range(1, rounds + 1):
            for is_saving in (True, False) if number % 2 else (False, True):
                seconds = stretch(checkpoints if is_saving else None, number)
                checkpoints.wait()
                (with_save if is_saving else without).append(seconds)
        written = [[each.bytes, each.seconds] for each in checkpoints.take_finished()]
    return {"with": with_save, "without": without, "written": written}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt-17M", choices=MODELS, help="one name")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--steps", type=int, default=50, help="steps between saves (default 50)")
    parser.add_argument("--rounds", type=int, default=6, help="intervals of each kind (default 6)")
    parser.add_argument("--quick", action="store_true", help="5 steps, 2 rounds")


def main(args: argparse.Namespace) -> dict[str, Any]:
    steps, rounds = (5, 2) if args.quick else (args.steps, args.rounds)
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = tempfile.mkdtemp(prefix="paceline-")
    try:
        found = run_processes(
            args.ranks, measure, args.model, steps, rounds, folder, timeout_s=900
        )[0]
    finally:
        shutil.rmtree(folder)
    size, snapshot = zip(*found["written"], strict=True)
    change = ratio(found["with"], found["without"])
    title = f"{args.model} with AdamW, {args.ranks} ranks, a save every {steps} steps"
    rows = [
        {
            "size, MB": round(size[0] / 1e6, 1),
            "step without, ms": round(spread(found["without"]).median / steps * 1e3, 1),
            "save returns after, ms": round(spread(snapshot).median * 1e3, 1),
            "with / without": round(change.median, 3),
            "quartiles": f"{change.low:.3f} to {change.high:.3f}",
        }
    ]
    print_table(title, rows)
    return {title: rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    main(parser.parse_args())
