"""How long one training step takes: ours, torch's DistributedDataParallel, and no communication.

All contestants live in the same processes and take turns, so that noise of the machine hits them
alike; what counts is the ratio. A step is zero_grad, forward, backward and an SGD update.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.models import MODELS
from benchmarks.tables import print_table
from paceline import DistributedDataParallel, World
from paceline.testing import run_processes

Wrap = Callable[[nn.Module], nn.Module]


def tuned(bucket_mb: int) -> Wrap:
    """torch's class with every option that makes it faster, and buckets of the given size."""
    options: dict[str, Any] = {
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "batched_grad_copy": True,
    }
    known = inspect.signature(TorchDDP).parameters  # older releases have fewer
    options = {name: value for name, value in options.items() if name in known}
    return lambda module: TorchDDP(module, bucket_cap_mb=bucket_mb, **options)


CONTESTANTS: dict[str, Wrap] = {
    "no communication": lambda module: module,
    "paceline": DistributedDataParallel,
    "torch default": TorchDDP,
    **{f"torch tuned, {cap} MB": tuned(cap) for cap in (1, 5, 25, 100)},
}


def measure(world: World, name: str, contestants: list[str], rounds: int, steps: int) -> Any:
    """Median seconds of a step, by contestant and round, on this rank."""
    model = MODELS[name]
    batch = model.batch(torch.Generator().manual_seed(world.rank))
    entries = {}
    for contestant in contestants:
        torch.manual_seed(0)
        module = CONTESTANTS[contestant](model.build())
        entries[contestant] = (module, torch.optim.SGD(module.parameters(), lr=1e-3))
    seconds: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for number in range(rounds + 1):
        for contestant, (module, optimizer) in entries.items():
            times = []
            for _ in range(steps):
                world.barrier()
                start = time.perf_counter()
                optimizer.zero_grad()
                model.loss(module, batch).backward()
                optimizer.step()
                times.append(time.perf_counter() - start)
            if number:  # the first round warms up
                seconds[contestant].append(statistics.median(times))
    del entries
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="all", help="comma-separated names, or all")
    parser.add_argument("--workers", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds after the warm-up")
    parser.add_argument("--steps", type=int, default=10, help="steps per contestant and round")


def main(args: argparse.Namespace) -> dict[str, Any]:
    names = list(MODELS) if args.models == "all" else args.models.split(",")
    results: dict[str, Any] = {}
    for name in names:
        contestants = list(CONTESTANTS)
        ranks = run_processes(
            args.workers, measure, name, contestants, args.rounds, args.steps, timeout_s=900
        )
        results[name] = summarise(ranks, contestants)
        print_table(f"{name}, {args.workers} ranks", results[name])
    return results


def summarise(ranks: list[dict[str, list[float]]], contestants: list[str]) -> list[dict[str, Any]]:
    """One row a contestant: the slowest rank counts, and ratios are taken round by round."""
    rounds = {
        c: [max(r) for r in zip(*(rank[c] for rank in ranks), strict=True)] for c in contestants
    }
    tuned = [c for c in contestants if c.startswith("torch")]
    best = min(tuned, key=lambda c: statistics.median(rounds[c]))
    floor = rounds["no communication"]
    rows = []
    for contestant in contestants:
        times = rounds[contestant]
        rows.append(
            {
                "contestant": contestant + (" (best torch)" if contestant == best else ""),
                "ms": round(statistics.median(times) * 1e3, 3),
                "min": round(min(times) * 1e3, 3),
                "max": round(max(times) * 1e3, 3),
                "/ best torch": _ratio(times, rounds[best]),
                "/ no comm.": _ratio(times, floor),
            }
        )
    return rows


def _ratio(times: list[float], reference: list[float]) -> float:
    pairs = zip(times, reference, strict=True)
    return round(statistics.median(mine / theirs for mine, theirs in pairs), 3)
