"""`paceline trace`: the command line.

Without arguments it records one step of a built-in model. With a file or run folder it draws a step
that was recorded before, and needs no torch for that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import IO

from paceline import env
from paceline.errors import UsageError, WireError
from paceline.explain.trace.drawing import WIDTH, draw, paint
from paceline.observe.run_folder import RunFolder
from paceline.observe.units import list_text
from paceline.record import schema
from paceline.record.stages import Trace

NARROWEST, WIDEST = 40, 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline trace`."""
    parser.description = (
        "Follow one real batch through a training step, stage by stage, and compare the step with "
        "one process on the whole batch."
    )
    parser.add_argument(
        "recorded",
        nargs="?",
        metavar="RUN",
        help="draw a step that was recorded before: a run folder or a file of its pipeline/ "
        "(default: record one now)",
    )
    parser.add_argument(
        "--engine",
        choices=["dp", "ddp"],
        default="ddp",
        help="DataParallel: one process with replicas; DistributedDataParallel: a process for "
        "each worker (default: ddp)",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where to train (default: cpu)"
    )
    for flag, metavar, default, text in (
        ("--workers", "N", 2, "how many workers or replicas share the batch"),
        ("--batch", "N", 100, "rows of the batch, all workers together"),
        ("--seed", "N", 0, "generates the data, the model and the order of the rows"),
        ("--epochs", "N", 0, "also train so many epochs, and say what the numbers mean"),
        ("--sample", "I", None, "the row to follow (default: the batch's first)"),
        ("--predict", "I", None, "also show row I on its way through every layer"),
        ("--step", "N", None, "which recorded step of RUN to draw"),
    ):
        told = text if default is None else f"{text} (default: {default})"
        parser.add_argument(flag, metavar=metavar, type=int, default=default, help=told)
    for flag, metavar, text in (
        ("--model", "FILE:FUNCTION", "your own function: it returns (model, dataset, loss_fn)"),
        ("--weight", "NAME[I,J]", 'the weight to follow, such as "0.weight[3,1]"'),
        ("--folder", "RUN", "also write pipeline/step{n}.json into this run folder"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument(
        "--values",
        action=argparse.BooleanOptionalAction,
        help="keep values of data, weights and outputs; --no-values keeps shapes and statistics "
        "(default: values of the built-in model only)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the picture")
    parser.add_argument("--ascii", action="store_true", help="draw without characters beyond ASCII")


def main(args: argparse.Namespace) -> int:
    """Record or read a step, and show it; 1 if it is not the same as one process."""
    trace = _find(args.recorded, args.step) if args.recorded else _record(args)
    if args.json:
        print(json.dumps(schema.to_json(trace), allow_nan=False))
    else:
        show(trace, sys.stdout, is_plain=args.ascii)
    check = trace.check
    return 1 if check is not None and False in (check.is_same, check.is_equal_on_all) else 0


def show(trace: Trace, stream: IO[str], *, is_plain: bool = False) -> None:
    """Draw a step: as wide as a terminal, with colours there, in ASCII where it has no lines."""
    width, is_terminal = WIDTH, stream.isatty()
    if is_terminal:
        width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size().columns))
    try:
        "┌─▼●✓".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        is_plain = True
    has_colour = is_terminal and env.read_terminal().has_colour
    for line in draw(trace, width=width, plain=is_plain):
        print(paint(line) if has_colour else line, file=stream)


def _record(args: argparse.Namespace) -> Trace:
    if args.step is not None:
        raise UsageError("--step chooses among recorded steps.", advice="Name a run folder too.")
    if not 0 <= args.seed < 2**32:
        raise UsageError(f"--seed is {args.seed}.", advice="Use a number from 0 to 2**32 - 1.")
    if args.values is None:
        args.values = args.model is None
    if args.folder is not None:
        RunFolder(args.folder).create()  # a name that is refused is refused before the work
    with warnings.catch_warnings():
        # torch without NumPy says so once; nothing here needs it.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        from paceline.explain.trace import task
        from paceline.explain.trace.training import trace_task

        made = task.load(args.model, args.seed) if args.model else task.built_in(args.seed)
        trace = trace_task(made, args)
    if args.folder is not None:
        schema.write(trace, RunFolder(args.folder).pipeline_of(trace.step))
    return trace


def _find(place: str, step: int | None) -> Trace:
    """The recorded step in a file, or the one of a run folder that was asked for, or its last."""
    path = Path(place)
    if path.is_dir():
        folder = RunFolder(path)
        steps = folder.pipeline_steps()
        if not steps or (step is not None and step not in steps):
            raise UsageError(
                f"{place} has no recorded step{'' if step is None else f' {step}'}.",
                f"It has {list_text(steps)}." if steps else "",
                f"Record one with paceline run --trace-step N, or paceline trace --folder {place}.",
            )
        path = folder.pipeline_of(steps[-1] if step is None else step)
    try:
        return schema.read(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            advice="Name a run folder, or a file of its pipeline/ folder.",
        ) from error
    except WireError as error:
        raise UsageError(f"{path} is not a recorded step.", error.what, error.advice) from error
