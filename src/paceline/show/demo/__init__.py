"""`paceline demo`: trains a small model on several workers, and checks the result.

This file has the options and the output; `training` has the training. The dataset is generated, so
nothing is downloaded, and everything is written to one folder, whose path is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError, check_whole
from paceline.telemetry import count_text

if TYPE_CHECKING:
    from paceline.show.demo.survival import KillOutcome
    from paceline.show.trace.task import Task

__all__ = ["add_arguments", "main"]

PrintLines = Callable[[list[str]], None]

BATCH_ROWS, STEPS_PER_EPOCH = 100, 10
ROUNDING = 1e-4
"""The largest difference between two trainings of this size that counts as rounding."""
MOST_WORKERS_DRAWN = 4


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a demo, and what follows from them."""

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
        check_whole("--seed", self.seed, 0, most=2**32 - 1)

    @property
    def other_workers(self) -> int:
        """How many continue from the checkpoint: one more, or one less if that does not divide."""
        return self.workers + 1 if self.shards > self.workers else self.workers - 1

    @property
    def shards(self) -> int:
        """A number that both numbers of workers divide, if there are enough rows."""
        even = self.workers * (self.workers + 1)
        return even if even <= BATCH_ROWS else self.workers

    @property
    def checkpoint_step(self) -> int:
        """A step in the middle of the training, and of an epoch."""
        return self.epochs // 2 * STEPS_PER_EPOCH + STEPS_PER_EPOCH // 2

    @property
    def policy(self) -> str:
        """How the batch is divided among workers, in a sentence."""
        from paceline.policy import plan_batch  # imports torch

        return plan_batch(BATCH_ROWS, self.workers, keep="global").sentence


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """The results of a demo, as plain data."""

    epochs: list[dict[str, float]]
    """Epoch, seconds, and loss and accuracy on the held-out rows."""
    rows_by_worker: list[int]
    is_bit_equal: bool
    """Whether all workers ended with the same parameters."""
    difference: float
    """The largest difference between their parameters and those of plain torch on whole batches."""
    hashes: dict[str, str]
    """SHA-256 of the final parameters, by number of workers."""
    resumed: dict[str, float]
    """The resumed second half: the number of workers, the first step, the number of steps."""
    checkpoints: int
    noise: str
    """The advice from the gradient noise scale about more workers."""
    folder: str
    """Of the run."""
    report: str

    def checks(self) -> list[tuple[str, bool]]:
        """Each check as a sentence, and whether it has passed."""
        others = count_text(int(self.resumed["workers"]), "worker")
        resumed = f"{others} continued from the checkpoint of step {self.resumed['step']}"
        trained = f"The parameters of {', '.join(self.hashes)} ({resumed})"
        return [
            check_equal(f"The {len(self.rows_by_worker)} workers' parameters", self.is_bit_equal),
            check_same("Plain torch in one process gives", self.difference),
            check_equal(trained, len(set(self.hashes.values())) == 1),
        ]

    def conclusion(self) -> list[str]:
        """The table of epochs, the checks, and the paths."""
        lines = ["On held-out rows:", "  epoch       loss   accuracy   seconds"]
        for row in self.epochs:
            epoch, loss, accuracy, seconds = row.values()
            lines.append(f"{epoch:>7}   {loss:>8.4f}   {accuracy:>8.1%}   {seconds:>7.3f}")
        return [
            *lines,
            "",
            *(sentence for sentence, _ in self.checks()),
            *(f"  {workers:<9} SHA-256 {each[:16]}" for workers, each in self.hashes.items()),
            "",
            self.noise,
            "",
            f"The run, with {count_text(self.checkpoints, 'checkpoint')}: {self.folder}",
            f"Its report: {self.report}",
            f"One of its steps, drawn: paceline trace {self.folder}",
        ]


def check_equal(what: str, is_bit_equal: bool) -> tuple[str, bool]:
    """The sentence about several workers' parameters, and whether they are equal."""
    return f"{what} are {'equal to the last bit' if is_bit_equal else 'NOT EQUAL'}.", is_bit_equal


def check_same(words: str, difference: float) -> tuple[str, bool]:
    """The sentence about the parameters of two trainings, and whether they are the same."""
    is_small = difference < ROUNDING
    which = "the same" if is_small else "DIFFERENT"
    return f"{words} {which} parameters: difference {difference:.1e}.", is_small


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a small model on generated rows with several workers on the CPU. Compare the "
        "result with plain torch in one process, with one worker, and with a resume on another "
        "number of workers: to the last bit. Then write the report."
    )
    help = "kill one of the workers during training instead, and check that nothing is lost"
    parser.add_argument("--kill", action="store_true", help=help)
    for name, words in (
        ("workers", "how many processes share every batch (default: 2, with --kill 3)"),
        ("epochs", "how many passes over the data (default: 5, with --kill 7)"),
        ("seed", "generates the data, the model and the order of the rows (default: 0)"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=int, help=words)
    parser.add_argument("--folder", help="an empty folder for the run (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--quiet", action="store_true", help="print only failed checks")


def main(args: argparse.Namespace) -> int:
    """Train and print; returns 1 if a check fails."""
    given = {name: getattr(args, name) for name in ("workers", "epochs", "seed")}
    defaults = {"workers": 3, "epochs": 7} if args.kill else {}
    wanted = defaults | {name: value for name, value in given.items() if value is not None}
    options = DemoOptions(**wanted)
    if args.kill and options.workers < 2:
        raise UsageError(
            f"--workers is {options.workers}: no worker would be left after the kill.",
            advice="Use 2 or more with --kill.",
        )
    folder = make_folder(args.folder)
    is_printed = not (args.json or args.quiet)
    show = print_lines if is_printed else lambda lines: None
    outcome = _show(options, folder, show, kills=args.kill)
    if is_printed:
        print_lines(outcome.conclusion())
    elif args.json:
        print(json.dumps({**asdict(options), **asdict(outcome)}))
    else:
        print_lines([line for line, has_passed in outcome.checks() if not has_passed])
    return 0 if all(has_passed for _, has_passed in outcome.checks()) else 1


def _show(
    options: DemoOptions, folder: Path, print_lines: PrintLines, *, kills: bool
) -> DemoOutcome | KillOutcome:
    if kills:
        from paceline.show.demo import survival

        return survival.show(options, folder, print_lines)
    print_lines([f"Training one model on {count_text(options.workers, 'worker')}, each a process."])
    from paceline.show.demo.training import train  # imports torch, which takes seconds
    from paceline.show.trace.task import built_in

    task = built_in(options.seed)
    print_lines(introduction(task, options))
    return train(task, options, folder)


def make_folder(wanted: str | None) -> Path:
    """The folder of the demo: a new temporary one, or `wanted` if that is empty."""
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


def print_lines(lines: list[str]) -> None:
    """Print lines, wrapped to the terminal's width; indented lines have a hanging indent."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 80
    for line in lines:
        indent = " " * (12 if line.startswith("  ") else 0)
        wrapped = textwrap.wrap(
            line,
            max(20, min(80, columns)),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        # Flushed, because the workers are separate processes that write to the same terminal.
        print("\n".join(wrapped), flush=True)


def introduction(task: Task, options: DemoOptions) -> list[str]:
    """What the demo is about to do, as lines of text."""
    share, longer = divmod(BATCH_ROWS, options.workers)
    rows = [count_text(share + (rank < longer), "row") for rank in range(options.workers)]
    paths = [
        f"  {f'worker {rank}':<9} {each} -> forward -> backward -> gradients"
        for rank, each in enumerate(rows)
    ]
    if options.workers > MOST_WORKERS_DRAWN:
        paths = [*paths[:2], "  ...", paths[-1]]
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    return [
        "",
        f"  data      {len(task.dataset):,} generated rows of 10 features, yes or no for each; "
        f"{len(task.evaluation):,} more held out",
        f"  model     {parameters} weights, a copy on each worker, equal at the start",
        f"  steps     {count_text(options.epochs, 'epoch')} of {STEPS_PER_EPOCH} steps of "
        f"{BATCH_ROWS} rows",
        f"  shards    {options.shards} in each step: {options.workers} workers share them evenly, "
        f"and so will {options.other_workers} after a restart",
        f"  policy    {options.policy}",
        "",
        *paths,
        f"  together  gradients summed, divided by {BATCH_ROWS} -> the same step on all",
        "",
    ]
