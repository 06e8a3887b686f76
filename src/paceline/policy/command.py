"""`paceline policy`: batch, learning rate and islands, from one device to several workers."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from paceline.errors import SettingError, check_whole
from paceline.islands import Forecast, forecast_islands
from paceline.policy.batch import LearningRate, plan_batch
from paceline.telemetry import count_text

WIDTH = 80
MOST_ROWS, MOST_WORKERS = 2**40, 2**20
"""Of which each has its rows in the plan."""
LEAST, MOST = 1e-6, 1e15
"""Of a model's parameters, of milliseconds and of gigabits per second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline policy`."""
    parser.description = (
        "Plan a step of several workers from the batch that works on one device: the global batch, "
        "the rows of each worker and the learning rate, in both usual ways. With three more "
        "numbers also whether islands pay, each worker being one that averages parameters rarely."
    )
    add = parser.add_argument
    add("--batch", metavar="N", type=int, required=True, help="rows of a step on one device")
    add("--workers", metavar="N", type=int, required=True, help="how many workers there will be")
    add("--rows", metavar="N", type=int, help="rows of the dataset, to count steps")
    add("--parameters", metavar="N", type=float, help="of the model, such as 34e6")
    add("--step-ms", metavar="MS", type=float, help="how long a step computes")
    add("--bandwidth-gbps", metavar="GBPS", type=float, help="gigabits per second between workers")
    add("--json", action="store_true", help="print JSON instead of text")


def describe(batch: int, workers: int, rows: int | None = None) -> dict[str, dict[str, Any]]:
    """Both ways, by what stays constant: the plan, the learning rates, the steps."""
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


def weigh_islands(args: argparse.Namespace) -> Forecast | None:
    """The forecast for islands, if its three numbers are given."""
    given = (args.parameters, args.step_ms, args.bandwidth_gbps)
    if given == (None, None, None):
        return None
    if None in given:
        raise SettingError(
            "Whether islands pay depends on three numbers.",
            advice="Pass --parameters, --step-ms and --bandwidth-gbps together.",
        )
    check_whole("--workers", args.workers, 2)
    parameters, step_ms, gbps = given
    per_s = gbps * 1e9 / 8
    return forecast_islands(
        step_s=step_ms / 1e3, parameters=parameters, bytes_per_s=per_s, islands=args.workers
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing, by the names of their flags."""
    check_whole("--batch", args.batch, most=MOST_ROWS)
    check_whole("--workers", args.workers, most=MOST_WORKERS)
    check_whole("--rows", args.rows, or_none=True)
    for name in ("parameters", "step_ms", "bandwidth_gbps"):
        value = getattr(args, name)
        if value is not None and not LEAST <= value <= MOST:
            raise SettingError(
                f"--{name.replace('_', '-')} is {value!r}.",
                advice=f"Pass a number from {LEAST:g} to {MOST:g}.",
            )


def main(args: argparse.Namespace) -> int:
    """Print both ways."""
    check_arguments(args)
    found = describe(args.batch, args.workers, args.rows)
    islands = weigh_islands(args)
    if args.json:
        print(json.dumps(found | ({"islands": islands.as_json()} if islands else {})))
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
                "have limits."
            )
        if way["steps_per_epoch"] is not None:
            lines.append(f"{count_text(way['steps_per_epoch'], 'step')} in an epoch.")
        for line in lines:
            print(textwrap.fill(line, WIDTH, subsequent_indent="  "))
    if islands:
        print(textwrap.fill(islands.sentence, WIDTH, subsequent_indent="  "))
    return 0
