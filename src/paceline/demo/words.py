"""How a demo is told: what is about to happen, the table of epochs, and what was checked."""

from __future__ import annotations

import textwrap
from itertools import zip_longest

from paceline.demo.options import (
    BATCH_ROWS,
    CLASSES,
    FEATURES,
    HELD_OUT_ROWS,
    HIDDEN,
    ROWS,
    STEPS_PER_EPOCH,
    Options,
)
from paceline.demo.outcome import ROUNDING, Outcome

WIDTH = 78


def introduction(options: Options) -> str:
    """What is about to happen, in plain words."""
    lines = [
        f"Training one model on {_count(options.workers, 'worker')}, each a process on the CPU.",
        "",
        f"  data    {ROWS:,} rows of {FEATURES} features, two classes (seed {options.seed}); "
        f"{HELD_OUT_ROWS} more to check",
        f"  model   {FEATURES} -> {HIDDEN} -> {CLASSES}, a copy on each worker, equal at the start",
        f"  steps   {_count(options.epochs, 'epoch')} of {STEPS_PER_EPOCH} steps of "
        f"{BATCH_ROWS} rows, each in {_count(options.shards, 'shard')}",
        *_column("policy", policy(options)),
        "",
        *_picture(options.workers),
        "",
    ]
    return "\n".join(lines)


def policy(options: Options) -> str:
    """What becomes of the batch on several workers, and why."""
    from paceline.policy import plan_batch  # imports torch

    return plan_batch(BATCH_ROWS, options.workers, keep="global").sentence


def report(outcome: Outcome) -> list[str]:
    """The table of epochs, what was checked, and where everything is."""
    table = [
        f"{row.epoch:>7}   {row.loss:>8.4f}   {row.accuracy:>8.1%}   {row.seconds:>7.3f}"
        for row in outcome.epochs
    ]
    return [
        f"{'epoch':>7}   {'loss':>8}   {'accuracy':>8}   {'seconds':>7}   (on the rows to check)",
        *table,
        "",
        _equality(outcome),
        _reference(outcome),
        *textwrap.wrap(_resume(outcome), WIDTH),
        "",
        *(textwrap.wrap(outcome.noise, WIDTH)),
        "",
        f"The run, with {_count(outcome.checkpoints, 'checkpoint')}, and its report:",
        outcome.folder,
        outcome.report,
    ]


def complaints(outcome: Outcome) -> list[str]:
    """Only what is not as promised."""
    lines = []
    if not outcome.is_bit_equal:
        lines.append(_equality(outcome))
    if outcome.difference >= ROUNDING:
        lines.append(_reference(outcome))
    if outcome.resumed.difference >= ROUNDING:
        lines.append(_resume(outcome))
    return lines


def _equality(outcome: Outcome) -> str:
    workers = len(outcome.rows_by_worker)
    if workers == 1:
        return "One worker has nobody to differ from."
    verdict = "equal to the last bit" if outcome.is_bit_equal else "NOT EQUAL"
    return f"The {workers} workers' parameters are {verdict}."


def _reference(outcome: Outcome) -> str:
    same = "the same" if outcome.difference < ROUNDING else "OTHER"
    return (
        f"The same training in one process gives {same} parameters: "
        f"difference {outcome.difference:.1e}."
    )


def _resume(outcome: Outcome) -> str:
    resumed = outcome.resumed
    same = "the same" if resumed.difference < ROUNDING else "OTHER"
    return (
        f"Resumed from the checkpoint of step {resumed.step} on "
        f"{_count(resumed.workers, 'worker')}, it ends with {same} parameters: "
        f"difference {resumed.difference:.1e}."
    )


def _picture(workers: int) -> list[str]:
    """How a batch is cut, and where the gradients meet."""
    share, longer = divmod(BATCH_ROWS, workers)
    paths = [
        f"worker {rank}: {_count(share + (rank < longer), 'row')} -> forward -> backward"
        for rank in range(workers)
    ]
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


def _column(title: str, text: str) -> list[str]:
    """A paragraph behind its title."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {title:<8}", subsequent_indent=" " * 10)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
