"""`paceline demo`: a small model, trained on several workers before your eyes.

`options` is what to train, `task` the data and the model, `training` what a worker does, `outcome`
what came of it, `words` how it is told. The data set is generated, so nothing is downloaded, and
everything is written to one folder, whose place is printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

from paceline.demo import words
from paceline.demo.options import ROWS, Options
from paceline.errors import UsageError

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline demo`."""
    parser.description = (
        f"Train a small model on {ROWS:,} generated rows with several workers on the CPU. Compare "
        "the result with one process on whole batches, and with a resume on another number of "
        "workers. Then write the report."
    )
    default = Options()
    for name, help_text in (
        ("workers", "how many processes share every batch"),
        ("epochs", "how many passes over the data"),
        ("seed", "generates the data, the model and the order of the rows"),
    ):
        value = getattr(default, name)
        parser.add_argument(
            f"--{name}",
            metavar="N",
            type=int,
            default=value,
            help=f"{help_text} (default: {value})",
        )
    parser.add_argument(
        "--folder", help="an empty folder for the run (default: a new one for temporary files)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--quiet", action="store_true", help="print only what is not as promised")


def main(args: argparse.Namespace) -> int:
    """Train and print; 1 if something is not as promised."""
    options = Options(args.workers, args.epochs, args.seed)
    folder = make_folder(args.folder)
    is_text = not (args.json or args.quiet)
    if is_text:
        # The workers are separate processes and write past Python's buffer.
        print(words.introduction(options), flush=True)
    with warnings.catch_warnings():
        # torch says this on import where NumPy is missing; nothing here uses NumPy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        from paceline.demo.training import train

        outcome = train(options, folder)
    if args.json:
        print(json.dumps({**asdict(options), **asdict(outcome)}))
    else:
        lines = words.report(outcome) if is_text else words.complaints(outcome)
        print("".join(f"{line}\n" for line in lines), end="")
    return 0 if outcome.is_as_promised else 1


def make_folder(wanted: str | None) -> Path:
    """The folder for everything: a new one, or the one that was asked for if it is empty."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="paceline-demo-"))
    folder = Path(wanted).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_empty = next(folder.iterdir(), None) is None
    except OSError as error:
        raise UsageError(
            f"--folder {wanted} cannot be used: {error.strerror or error}.",
            advice="Name a folder that you may write to.",
        ) from error
    if not is_empty:
        raise UsageError(
            f"--folder {wanted} is not empty.", advice="Name a new or an empty folder."
        )
    return folder
