"""`paceline demo`: a small model, trained on several workers before your eyes.

This file is what can be asked for and how it is told; `training` is what the workers do. The data
set is generated, so nothing is downloaded, and everything is written to one folder, whose place is
printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
import warnings
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from paceline.errors import UsageError, check_whole
from paceline.observe.units import count_text

__all__ = ["add_arguments", "main"]

ROWS, FEATURES, HIDDEN, CLASSES = 1_000, 10, 32, 2
HELD_OUT_ROWS = 500
"""Rows that nobody trains on, to check with."""
BATCH_ROWS = 100
STEPS_PER_EPOCH = ROWS // BATCH_ROWS
ROUNDING = 1e-4
"""More than rounding can explain between two trainings of this size."""
WIDTH = 80


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What was asked for, and what follows from it."""

    workers: int = 2
    epochs: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= BATCH_ROWS:
            raise UsageError(
                f"--workers is {self.workers}, but a batch of {BATCH_ROWS} rows can be cut among "
                f"1 to {BATCH_ROWS} workers."
            )
        check_whole("--epochs", self.epochs)
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed is {self.seed}.", advice="Use a number from 0 to 2**32 - 1.")

    @property
    def other_workers(self) -> int:
        """How many continue from the checkpoint: one more, or one less if that does not divide."""
        return self.workers + 1 if self.shards > self.workers else self.workers - 1

    @property
    def shards(self) -> int:
        """So many that both numbers of workers share them evenly, if the rows suffice."""
        even = self.workers * (self.workers + 1)
        return even if even <= BATCH_ROWS else self.workers

    @property
    def checkpoint_step(self) -> int:
        """In the middle of the training, and in the middle of an epoch."""
        return self.epochs // 2 * STEPS_PER_EPOCH + STEPS_PER_EPOCH // 2

    @property
    def policy(self) -> str:
        """What becomes of the batch on several workers, and why."""
        from paceline.policy import plan_batch  # imports torch

        return plan_batch(BATCH_ROWS, self.workers, keep="global").sentence


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What came of a training on several workers, as plain data."""

    epochs: list[dict[str, float]]
    """Epoch, seconds, and loss and accuracy on the held-out rows."""
    rows_by_worker: list[int]
    is_bit_equal: bool
    """Whether all workers ended with the same parameters."""
    difference: float
    """The largest between their parameters and those of one process on whole batches."""
    resumed: dict[str, float]
    """The second half once more, by other workers: how many, from which step, how many steps,
    and the largest difference between their parameters and those of the workers before."""
    checkpoints: int
    noise: str
    """What the gradient noise scale says about more workers."""
    folder: str
    report: str

    def promises(self) -> list[tuple[str, bool]]:
        """What was checked, in a sentence each, and whether it is as promised."""
        workers, step = len(self.rows_by_worker), self.resumed["step"]
        others = count_text(int(self.resumed["workers"]), "worker")
        verdict = "equal to the last bit" if self.is_bit_equal else "NOT EQUAL"
        equal = f"The {workers} workers' parameters are {verdict}."
        return [
            (equal if workers > 1 else "One worker has nobody to differ from.", self.is_bit_equal),
            _compared("The same training in one process gives", self.difference),
            _compared(
                f"Resumed from the checkpoint of step {step} on {others}, it ends with",
                self.resumed["difference"],
            ),
        ]


def _compared(words: str, difference: float) -> tuple[str, bool]:
    is_same = difference < ROUNDING
    same = "the same" if is_same else "OTHER"
    return f"{words} {same} parameters: difference {difference:.1e}.", is_same


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline demo`."""
    parser.description = (
        f"Train a small model on {ROWS:,} generated rows with several workers on the CPU. Compare "
        "the result with one process on whole batches, and with a resume on another number of "
        "workers. Then write the report."
    )
    for name, default, words in (
        ("workers", 2, "how many processes share every batch"),
        ("epochs", 5, "how many passes over the data"),
        ("seed", 0, "generates the data, the model and the order of the rows"),
    ):
        words = f"{words} (default: {default})"
        parser.add_argument(f"--{name}", metavar="N", type=int, default=default, help=words)
    parser.add_argument("--folder", help="an empty folder for the run (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--quiet", action="store_true", help="print only what is not as promised")


def main(args: argparse.Namespace) -> int:
    """Train and print; 1 if something is not as promised."""
    options = DemoOptions(args.workers, args.epochs, args.seed)
    folder = make_folder(args.folder)
    if not (args.json or args.quiet):
        # The workers are separate processes and write past Python's buffer.
        print(introduction(options), flush=True)
    with warnings.catch_warnings():
        # torch says this on import where NumPy is missing; nothing here uses NumPy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        from paceline.demo.training import train

        outcome = train(options, folder)
    if args.json:
        print(json.dumps({**asdict(options), **asdict(outcome)}))
    elif args.quiet:
        print("".join(f"{line}\n" for line, is_kept in outcome.promises() if not is_kept), end="")
    else:
        print(conclusion(outcome))
    return 0 if all(is_kept for _, is_kept in outcome.promises()) else 1


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
        raise UsageError(f"--folder {wanted} is not empty.", advice="Name a new folder.")
    return folder


def introduction(options: DemoOptions) -> str:
    """What is about to happen, in plain words."""
    workers, epochs = count_text(options.workers, "worker"), count_text(options.epochs, "epoch")
    lines = [
        f"Training one model on {workers}, each a process on the CPU.",
        "",
        f"  data    {ROWS:,} rows of {FEATURES} features, two classes (seed {options.seed}); "
        f"{HELD_OUT_ROWS} more to check",
        f"  model   {FEATURES} -> {HIDDEN} -> {CLASSES}, a copy on each worker, equal at the start",
        f"  steps   {epochs} of {STEPS_PER_EPOCH} steps of {BATCH_ROWS} rows, each in "
        f"{count_text(options.shards, 'shard')}",
        *textwrap.wrap(f"  policy  {options.policy}", WIDTH, subsequent_indent=" " * 10),
        "",
        *_picture(options.workers),
        "",
    ]
    return "\n".join(lines)


def conclusion(outcome: DemoOutcome) -> str:
    """The table of epochs, what was checked, and where everything is."""
    lines = ["  epoch       loss   accuracy   seconds   (on the rows to check)"]
    for row in outcome.epochs:
        epoch, loss, accuracy, seconds = row.values()
        lines.append(f"{epoch:>7}   {loss:>8.4f}   {accuracy:>8.1%}   {seconds:>7.3f}")
    lines.append("")
    for sentence, _ in outcome.promises():
        lines += textwrap.wrap(sentence, WIDTH)
    lines += ["", *textwrap.wrap(outcome.noise, WIDTH), ""]
    lines.append(f"The run, with {outcome.checkpoints} checkpoints, and its report:")
    lines += [outcome.folder, outcome.report]
    return "\n".join(lines)


def _picture(workers: int) -> list[str]:
    """How a batch is cut, and where the gradients meet."""
    share, longer = divmod(BATCH_ROWS, workers)
    rows = [count_text(share + (rank < longer), "row") for rank in range(workers)]
    paths = [f"worker {rank}: {each} -> forward -> backward" for rank, each in enumerate(rows)]
    if workers > 4:
        paths = [*paths[:2], "...", paths[-1]]
    width = max(map(len, paths))
    goals = ["gradients summed,", f"divided by {BATCH_ROWS},", "same step on all"]
    lines: list[str] = []
    for path, goal in zip_longest(paths, goals, fillvalue=""):
        batch, arrow = ("  ", "  ") if lines else (f"  {BATCH_ROWS} rows -", "->")
        middle = f"+-> {path:<{width}} -+" if path else ""
        lines.append(f"{batch:<12}{middle:<{width + 7}}{arrow} {goal}".rstrip())
    return lines
