"""Time of the first steps of a run, from wrapping the model on.

In fresh processes each time, with alternating contestants. Imports, the group and building the
model do not count; an engine's first work (ordering buckets, allocating memory) does.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.contestants import FLOOR, tuned_options
from benchmarks.models import MODELS
from benchmarks.spread import rotated, rows_of, slowest
from benchmarks.step import Member
from benchmarks.tables import print_table, read_names
from benchmarks.teams import standing

STEPS = 12


def measure(model: str, names: list[str], size: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each contestant: the first steps together, each as long as its slowest rank's."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in rotated(names, number):
            with standing(size, [name], Member, model) as teams:
                seconds[name].append(sum(slowest(teams[name].ask("train", steps=STEPS))))
    return rows_of(seconds, floors=[FLOOR], rival="torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", "--models", default="mlp-8.4M", help="comma-separated names, or all"
    )
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="1 round, three contestants")


def main(args: argparse.Namespace) -> dict[str, Any]:
    tuned = [name for name in tuned_options() if name.endswith((" 5 MB", " 25 MB"))]
    names = [FLOOR, "paceline", *tuned]
    results = {}
    for model in read_names(args.model, MODELS):
        title = f"the first {STEPS} steps, {model}, {args.ranks} ranks"
        rows = measure(
            model, names[:3] if args.quick else names, args.ranks, 1 if args.quick else args.rounds
        )
        print_table(title, rows)
        results[title] = rows
    return results
