"""Cost of same_bits and of an audit, compared with the usual `Run`.

All run in the same processes, one thread each, and alternate in intervals of some steps; an
interval ends when the slowest rank ends it. The batch is cut into the same shards for all of them.
Deterministic algorithms are switched on for the whole process, so for the usual `Run` as well.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.run_overhead import take_turns, with_run
from benchmarks.spread import ratio, slowest
from benchmarks.tables import print_table
from paceline import World
from paceline.testing import run_processes

CONTESTANTS: dict[str, dict[str, Any]] = {
    "Run": {},
    "same_bits": {"same_bits": True},
    "same_bits, audit=0.01": {"same_bits": True, "audit": 0.01},
    "same_bits, audit=1": {"same_bits": True, "audit": 1.0},
}


def measure(
    world: World,
    options_by_name: dict[str, dict[str, Any]],
    model: str,
    shards: int,
    stretch: int,
    rounds: int,
) -> dict[str, list[float]]:
    """The seconds of each interval, by contestant, on this rank."""
    torch.set_num_threads(1)
    contestants = {
        each: with_run(world, MODELS[model], None, 0, shards=shards, **options)
        for each, options in options_by_name.items()
    }
    return take_turns(world, contestants, stretch, rounds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt-17M,mlp-8.4M", help="comma-separated names")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--shards", type=int, help="of each batch (default: one per rank)")
    parser.add_argument("--steps", type=int, default=20, help="steps per interval (default 20)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a short test that it runs")


def main(args: argparse.Namespace) -> dict[str, Any]:
    return compare(args, CONTESTANTS)


def compare(
    args: argparse.Namespace, options_by_name: dict[str, dict[str, Any]], digits: int = 3
) -> dict[str, Any]:
    """A table per model, of runs with other options; the first one is what others are compared
    with."""
    stretch, rounds = (2, 2) if args.quick else (args.steps, args.rounds)
    shards, results, usual = args.shards or args.ranks, {}, next(iter(options_by_name))
    for model in args.model.split(","):
        how = options_by_name, model, shards, stretch, rounds
        ranks = run_processes(args.ranks, measure, *how, timeout_s=3600)
        seconds = {name: slowest([rank[name] for rank in ranks]) for name in ranks[0]}
        rows = []
        for name, times in seconds.items():
            against = ratio(times, seconds[usual])
            rows.append(
                {
                    "contestant": name,
                    "ms per step": round(statistics.median(times) / stretch * 1e3, 2),
                    f"/ {usual}": round(against.median, digits),
                    "quartiles": f"{against.low:.{digits}f} to {against.high:.{digits}f}",
                    # One audited step of a hundred is in few intervals, and in no median.
                    "all steps": round(sum(times) / sum(seconds[usual]), digits),
                }
            )
        title = f"{model}, {args.ranks} ranks, {shards} shards"
        print_table(title, rows)
        results[title] = rows
    return results
