"""`paceline policy`: from the batch of one device to several, and what becomes of the rate."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from paceline.policy.batch import LearningRate, plan_batch
from paceline.telemetry import count_text

WIDTH = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline policy`."""
    parser.description = (
        "From the batch that works on one device to several workers: the batch in all, the rows of "
        "each, and the learning rate, in both honest ways."
    )
    add = parser.add_argument
    add("--batch", metavar="N", type=int, required=True, help="rows of a step on one device")
    add("--workers", metavar="N", type=int, required=True, help="how many workers there will be")
    add("--rows", metavar="N", type=int, help="rows of the dataset, to count steps")
    add("--json", action="store_true", help="print JSON instead of text")


def describe(batch: int, workers: int, rows: int | None = None) -> dict[str, dict[str, Any]]:
    """Both ways, by what is kept: the plan, the learning rate by optimizer, the steps."""
    found = {}
    for keep in ("device", "global"):
        if keep == "global" and workers > batch:
            continue
        plan = plan_batch(batch, workers, keep=keep)
        rates = {
            rule: LearningRate(single_batch=batch, global_batch=plan.global_batch, rule=rule).scale
            for rule in ("linear", "sqrt")
        }
        found[keep] = {
            "global_batch": plan.global_batch,
            "rows_by_worker": plan.rows_by_worker,
            "learning_rate": rates,
            "steps_per_epoch": None if rows is None else plan.steps_per_epoch(rows),
            "sentence": plan.sentence,
        }
    return found


def main(args: argparse.Namespace) -> int:
    """Print both ways."""
    found = describe(args.batch, args.workers, args.rows)
    if args.json:
        print(json.dumps(found))
        return 0
    for keep, way in found.items():
        whole, share = way["global_batch"], way["rows_by_worker"]
        each = f"{share[-1]:,}" if share[0] == share[-1] else f"{share[-1]:,} or {share[0]:,}"
        kept = "the rows of a device" if keep == "device" else "the batch"
        lines = [f"Keep {kept}: {whole:,} rows in all, {each} each. {way['sentence']}"]
        linear, root = way["learning_rate"]["linear"], way["learning_rate"]["sqrt"]
        if keep == "device" and args.workers > 1:
            lines.append(
                f"Learning rate: times {linear:.4g} for SGD (the linear rule, with a warm-up), "
                f"about times {root:.4g} for Adam (the square root). Measure it: rules of thumb "
                "end somewhere."
            )
        if way["steps_per_epoch"] is not None:
            lines.append(f"{count_text(way['steps_per_epoch'], 'step')} in an epoch.")
        for line in lines:
            print(textwrap.fill(line, WIDTH, subsequent_indent="  "))
    return 0
