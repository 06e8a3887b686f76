"""`paceline report`: one HTML file from a run folder."""

from __future__ import annotations

import argparse
import os

from paceline.explain.report import write
from paceline.explain.report.markup import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "run", metavar="RUN", help="the run folder, with run.json and events/ in it"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it (RUN/report.html if not given)"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace FILE even if it is not a report"
    )


def main(args: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    path = write(args.run, args.output, force=args.force)
    print(f"{path} ({size(os.path.getsize(path))}): open it in a browser; it needs no network.")
    return 0
