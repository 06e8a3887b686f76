"""What being observed costs: nobody, blame, and blame with a timeline, taking turns.

    python -m benchmarks.observing

Every rank trains copies of one model in one process, a block of steps each in turn, so that all
see the same weather. The number is the median of the blocks' ratios to the block of the same
round that nobody observed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.spread import rotated
from paceline import DistributedDataParallel, World, spans
from paceline.testing import run_processes

OBSERVERS = ("nobody", "still nobody", "blame", "timeline")
"""The second is the first once more, in a model of its own: what it differs by is chance."""


def measure(world: World, name: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of an average step in each block, by who observes it."""
    torch.set_num_threads(1)
    model = MODELS[name]
    batch = model.batch(torch.Generator().manual_seed(world.rank))

    def prepare(blames: bool) -> Callable[[], None]:
        os.environ["PACELINE_BLAME"] = "1" if blames else "0"
        torch.manual_seed(0)
        wrapped = DistributedDataParallel(model.build(), process_group=world.group)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.001)

        def step() -> None:
            optimizer.zero_grad()
            model.loss(wrapped, batch).backward()
            optimizer.step()

        return step

    # Without blame there is no observer at all, so that one is wrapped first.
    step_by_observer = {who: prepare(who in ("blame", "timeline")) for who in OBSERVERS}
    seconds: dict[str, list[float]] = {who: [] for who in OBSERVERS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for who in rotated(list(OBSERVERS), number):
                if who == "timeline":
                    spans.start(folder, world.rank)
                world.barrier()
                begin = time.perf_counter()
                for _ in range(steps):
                    step_by_observer[who]()
                taken = (time.perf_counter() - begin) / steps
                spans.stop()
                if number:  # the first round warms up
                    seconds[who].append(taken)
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="mlp-8.4M,deep-200x64", help="names, with commas")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="in a block")


def main(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in args.models.split(","):
        seconds = run_processes(
            args.ranks, measure, name, args.rounds, args.steps, timeout_s=600.0
        )[0]
        base = seconds["nobody"]
        ratios = {
            who: median(a / b for a, b in zip(seconds[who], base, strict=True)) for who in OBSERVERS
        }
        results[name] = {"ms": {who: median(seconds[who]) * 1e3 for who in OBSERVERS}} | {
            "ratio": ratios
        }
        print(f"{name}: {median(base) * 1e3:.2f} ms a step that nobody observes")
        for who in OBSERVERS[1:]:
            print(f"  {who:<14}{(ratios[who] - 1) * 100:+.2f} %")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    main(parser.parse_args())
