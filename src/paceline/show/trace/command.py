"""`paceline trace`: the command line.

Without arguments it records one step of a built-in model. With a file or run folder it draws a step
that was recorded before, which needs no torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from paceline.errors import UsageError, WireError, check_whole
from paceline.files import RunFolder, write_output
from paceline.record import Trace, read, to_json, write
from paceline.show.trace.card import draw_card
from paceline.show.trace.drawing import WIDTH, draw, paint, title_of, to_ascii
from paceline.telemetry import read_terminal

NARROWEST, WIDEST = 40, 160
ENGINES = {"dp": "DataParallel", "ddp": "DistributedDataParallel"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Follow one real batch through a training step, stage by stage, and compare the step with "
        "one process on the whole batch."
    )
    add = parser.add_argument
    help = (
        "draw a step that was recorded before: a run folder or a file of its pipeline/ (default: "
        "record one now)"
    )
    add("recorded", nargs="?", metavar="RUN", help=help)
    help = (
        "DataParallel: one process with replicas; DistributedDataParallel: a process for each "
        "worker (default: ddp)"
    )
    add("--engine", choices=[*ENGINES], default="ddp", help=help)
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (default: cpu)")
    for flag, metavar, default, text in (
        ("--workers", "N", 2, "how many workers or replicas share the batch"),
        ("--batch", "N", 100, "rows of the batch, all workers together"),
        ("--seed", "N", 0, "generates the data, the model and the order of the rows"),
        ("--epochs", "N", 0, "also train this many epochs, and comment on the numbers"),
        ("--sample", "I", None, "the row to follow (default: the batch's first)"),
        ("--predict", "I", None, "also follow row I through every layer"),
        ("--step", "N", None, "which recorded step of RUN to draw"),
    ):
        text += "" if default is None else f" (default: {default})"
        add(flag, metavar=metavar, type=int, default=default, help=text)
    for flag, metavar, text in (
        ("--model", "FILE:FUNCTION", "a function that returns (model, dataset, loss_fn)"),
        ("--weight", "NAME[I,J]", 'the weight to follow, such as "0.weight[3,1]"'),
        ("--folder", "RUN", "also write pipeline/step{n}.json into this run folder"),
        ("--svg", "FILE", "also write the step as one picture of 1200 x 630, for a page or slide"),
    ):
        add(flag, metavar=metavar, help=text)
    help = (
        "keep values of data, weights and outputs; --no-values keeps shapes and statistics "
        "(default: values of the built-in model only)"
    )
    add("--values", action=argparse.BooleanOptionalAction, help=help)
    help = "on a terminal, wait for Enter after each stage"
    add("--step-by-step", action="store_true", help=help)
    add("--json", action="store_true", help="print JSON instead of the picture")
    add("--ascii", action="store_true", help="draw without characters beyond ASCII")
    parser.set_defaults(rehearse=True)


def main(args: argparse.Namespace) -> int:
    """Record or read a step, and show it; returns 1 if its check has failed."""
    screen = Printer(sys.stdout, is_plain=args.ascii, waits=args.step_by_step)
    if args.recorded:
        trace = _find(args.recorded, args.step)
    else:
        _check(args)
        if not args.json:  # show the first line at once: importing torch takes seconds
            screen.show([title_of(ENGINES[args.engine])])
        trace = _record(args)
    if args.svg is not None:
        write_output(Path(args.svg), [draw_card(trace)])
    if args.json:
        print(json.dumps(to_json(trace), allow_nan=False))
    else:
        lines = draw(trace, width=screen.width)
        screen.show(lines if args.recorded else lines[1:])
    check = trace.check
    return int(check is not None and False in (check.is_same, check.is_equal_on_all))


class Printer:
    """Prints a step: as wide as the terminal, with colours there, in ASCII if needed."""

    def __init__(self, stream: IO[str], *, is_plain: bool = False, waits: bool = False) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_colour = self._is_terminal and read_terminal().has_colour
        self._waits = waits and self._is_terminal and sys.stdin.isatty()
        try:
            "┌─▼●✓".encode(getattr(stream, "encoding", None) or "ascii")
            self.is_plain = is_plain
        except (UnicodeEncodeError, LookupError):
            self.is_plain = True

    @property
    def width(self) -> int:
        """The terminal's current width in columns, within limits."""
        columns = shutil.get_terminal_size().columns if self._is_terminal else WIDTH
        return max(NARROWEST, min(WIDEST, columns))

    def show(self, lines: Iterable[str]) -> None:
        """Print lines; with `--step-by-step`, wait for Enter at empty lines, which end a stage."""
        for line in lines:
            line = (to_ascii(line) if self.is_plain else line).rstrip()
            if not line and self._waits:
                try:
                    input("    Enter: the next stage. ")
                except EOFError:
                    self._waits = False
                    print()
            else:
                print(paint(line) if self._has_colour else line, file=self._stream, flush=True)


def _check(args: argparse.Namespace) -> None:
    """Check flags before the work; set those that depend on others."""
    if args.step is not None:
        raise UsageError("--step chooses among recorded steps.", advice="Name a run folder too.")
    check_whole("--seed", args.seed, 0, most=2**32 - 1)
    if args.values is None:
        args.values = args.model is None
    if args.folder is not None:
        RunFolder(args.folder).create_for_output()


def _record(args: argparse.Namespace) -> Trace:
    from paceline.show.trace import task
    from paceline.show.trace.training import trace_task

    made = task.load(args.model, args.seed) if args.model else task.built_in(args.seed)
    trace = trace_task(made, args)
    if args.folder is not None:
        write(trace, RunFolder(args.folder).pipeline_of(trace.step))
    return trace


def _find(place: str, step: int | None) -> Trace:
    """The recorded step in a file; or of a run folder, the one with this number, or the last."""
    path = Path(place)
    if path.is_dir():
        folder = RunFolder(path)
        steps = folder.pipeline_steps()
        if not steps or (step is not None and step not in steps):
            raise UsageError(
                f"{place} has no recorded step{'' if step is None else f' {step}'}.",
                f"It has {len(steps):,}, from {steps[0]} to {steps[-1]}." if steps else "",
                f"Record one with paceline run --trace-step N, or paceline trace --folder {place}.",
            )
        path = folder.pipeline_of(steps[-1] if step is None else step)
    try:
        return read(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}.",
            advice="Name a run folder, or a file of its pipeline/ folder.",
        ) from error
    except WireError as error:
        raise UsageError(f"{path} is not a recorded step.", error.what, error.advice) from error
