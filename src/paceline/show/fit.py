"""`paceline fit train.py`: how many samples fit into memory, and how fast each piece size is.

The script runs under `paceline run`, in a temporary folder. Its run measures a few steps with each
size and ends; the workers' results become a table. See `run.measured_fit`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.env import FIT_VARIABLE
from paceline.errors import UsageError, WorkerError, check_whole
from paceline.launcher import check_program
from paceline.show.scaling.measure import run_once
from paceline.telemetry import rate_text, table_lines

NEARLY = 0.97
"""Speeds within this share of the best count as equal; then the smaller size is chosen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a few steps with whole shards, and with pieces of half the size, a quarter and so "
        "on; then print how much memory each takes and how fast it is, and which one to pass as "
        "RunOptions(fit=). Nothing is written to the run's folder, but the script has its other "
        "effects until its loop ends."
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="workers (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("script", help="a script that trains with Run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def main(args: argparse.Namespace) -> int:
    """Measure and print; returns 1 where no size fits."""
    check_whole("--workers", args.workers)
    check_program(args.script, "script")
    with tempfile.TemporaryDirectory(prefix="paceline-fit-") as name:
        folder, size = Path(name), args.workers

        def is_done() -> bool:
            found = read(folder)
            return len(found) == size and all(each["is_done"] for each in found)

        command = [sys.executable, "-m", "paceline", "run", "--workers", str(size)]
        command += [args.script, *args.arguments]
        try:
            run_once(command, size, folder, is_done, {FIT_VARIABLE: name})
        except WorkerError:
            if not is_done():  # a run in which no size fits also fails
                raise
        if len(found := read(folder)) < size:
            raise UsageError(
                "The script ended before a size was measured.",
                advice="It must train with paceline.Run, for six steps at least.",
            )
    table = combine(found)
    print(json.dumps(table) if args.json else "\n".join(lines_of(table)))
    return 0 if table["choice"] is not None else 1


def read(folder: Path) -> list[dict[str, Any]]:
    """The workers' measurements so far, by rank."""
    return [json.loads(each.read_text()) for each in sorted(folder.glob("rank*.json"))]


def combine(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the workers' measurements: the most memory, and the lowest speed."""
    sizes = []
    for each in zip(*(worker["sizes"] for worker in found), strict=False):
        row = dict(each[0])
        if row["fits"]:
            peaks = [one["memory"] for one in each]
            row["memory"] = None if None in peaks else max(peaks)
            row["samples_per_s"] = min(one["samples_per_s"] for one in each)
        sizes.append(row)
    fitting = [row for row in sizes if row["fits"]]
    best = max((row["samples_per_s"] for row in fitting), default=0.0)
    near = [row["piece"] for row in fitting if row["samples_per_s"] >= NEARLY * best]
    first = {name: found[0][name] for name in ("rows", "device", "why")}
    return {**first, "workers": len(found), "sizes": sizes, "choice": min(near, default=None)}


def lines_of(table: dict[str, Any]) -> Iterator[str]:
    """The table as lines of text."""
    is_cpu, rows = table["device"] == "cpu", [["piece", "memory", "samples/s", ""]]
    for row in table["sizes"]:
        note = "whole shards" if row["piece"] == table["rows"] else ""
        note = "does not fit" if not row["fits"] else note
        if row["piece"] == table["choice"]:
            note = f"{note}, recommended".lstrip(", ")
        speed = rate_text(row["samples_per_s"]) if row["fits"] else "-"
        memory = "-" if row["memory"] is None else f"{row['memory'] / 2**20:,.0f} MiB"
        memory = "unknown" if row["fits"] and row["memory"] is None else memory
        rows.append([str(row["piece"]), memory, speed, note])
    yield from table_lines(rows, ">>><")
    yield ""
    whose = "of the whole process" if is_cpu else "allocated on the device"
    yield f"Memory is the peak {whose}, on the worker with the highest."
    if table["why"]:
        yield f"No smaller pieces: {table['why']}"
    if table["choice"] is None:
        yield "No size fits."
    elif table["choice"] == table["rows"]:
        yield "Whole shards are fastest: leave fit= out of RunOptions."
    else:
        yield f"Pass fit={table['choice']} in RunOptions."
