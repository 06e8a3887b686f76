"""`paceline speedup`: speed-up and efficiency from two times of the same job."""

from __future__ import annotations

import argparse
import json

from paceline.show.scaling.attribution import speedup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the time of a job on one worker with its time on several: how many times as fast, "
        "and what share of the ideal that is. `paceline scale` finds where the rest is lost."
    )
    parser.add_argument("before", type=float, help="the time on one worker, in any unit")
    parser.add_argument("after", type=float, help="the time on several, in the same unit")
    parser.add_argument("--workers", metavar="N", type=int, required=True, help="how many")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def main(args: argparse.Namespace) -> int:
    """Print the comparison."""
    found = speedup(before=args.before, after=args.after, workers=args.workers)
    if args.json:
        numbers = {name: getattr(found, name) for name in ("ratio", "efficiency", "lost")}
        print(json.dumps({**numbers, "workers": found.workers, "serial_share": found.serial_share}))
    else:
        print(found)
    return 0
