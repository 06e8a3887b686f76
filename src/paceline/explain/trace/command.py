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
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from paceline import env
from paceline.errors import UsageError, WireError
from paceline.explain.trace import card
from paceline.explain.trace.beside import draw_both
from paceline.explain.trace.drawing import WIDTH, draw, finish, paint, title_of
from paceline.observe.run_folder import RunFolder
from paceline.record import schema
from paceline.record.stages import Trace

NARROWEST, WIDEST = 40, 160
ENGINES = {"dp": "DataParallel", "ddp": "DistributedDataParallel"}
BOTH = "both"


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
        choices=[*ENGINES, BOTH],
        default="ddp",
        help="DataParallel: one process with replicas; DistributedDataParallel: a process for "
        "each worker; both, side by side (default: ddp)",
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
        ("--svg", "FILE", "also write the step as one picture of 1200 x 630, for a page or slide"),
    ):
        parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument(
        "--values",
        action=argparse.BooleanOptionalAction,
        help="keep values of data, weights and outputs; --no-values keeps shapes and statistics "
        "(default: values of the built-in model only)",
    )
    parser.add_argument(
        "--step-by-step", action="store_true", help="on a terminal, wait for Enter after each stage"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the picture")
    parser.add_argument("--ascii", action="store_true", help="draw without characters beyond ASCII")
    parser.set_defaults(rehearse=True)


def main(args: argparse.Namespace) -> int:
    """Record or read a step, and show it; 1 if it is not the same as one process."""
    screen = Screen(sys.stdout, is_plain=args.ascii, waits=args.step_by_step)
    if args.recorded:
        trace = _find(args.recorded, args.step)
    else:
        _check(args)
        if args.engine == BOTH:
            return _show_both(args, screen)
        if not args.json:  # the first line at once: importing torch takes a second, or several
            screen.show([title_of(ENGINES[args.engine])])
        trace = _record(args)
    if args.svg is not None:
        card.write(trace, Path(args.svg))
    if args.json:
        print(json.dumps(schema.to_json(trace), allow_nan=False))
    else:
        lines = draw(trace, width=screen.width, plain=screen.is_plain)
        screen.show(lines if args.recorded else lines[1:])
    return _exit_code(trace)


def _exit_code(*traces: Trace) -> int:
    """1 if a step is not the same as one process, or workers ended apart."""
    checks = [trace.check for trace in traces if trace.check is not None]
    return int(any(False in (check.is_same, check.is_equal_on_all) for check in checks))


def _show_both(args: argparse.Namespace, screen: Screen) -> int:
    # Processes first: once replicas have used CUDA here, forks cannot.
    many, one = (
        _record(argparse.Namespace(**{**vars(args), "engine": engine})) for engine in ("ddp", "dp")
    )
    if args.json:
        told = {trace.engine: schema.to_json(trace) for trace in (one, many)}
        print(json.dumps(told, allow_nan=False))
    else:
        screen.show(draw_both(one, many, width=screen.width, plain=screen.is_plain))
    return _exit_code(one, many)


class Screen:
    """Where a step is shown: as wide as a terminal, with colours there, in ASCII if need be."""

    def __init__(self, stream: IO[str], *, is_plain: bool = False, waits: bool = False) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._has_colour = self._is_terminal and env.read_terminal().has_colour
        self._waits = waits and self._is_terminal and sys.stdin.isatty()
        try:
            "┌─▼●✓".encode(getattr(stream, "encoding", None) or "ascii")
            self.is_plain = is_plain
        except (UnicodeEncodeError, LookupError):
            self.is_plain = True

    @property
    def width(self) -> int:
        """In columns, as the terminal is now."""
        columns = shutil.get_terminal_size().columns if self._is_terminal else WIDTH
        return max(NARROWEST, min(WIDEST, columns))

    def show(self, lines: Iterable[str]) -> None:
        """Print lines; an empty one ends a stage: there wait for Enter, if that was asked for."""
        for line in finish([*lines], sys.maxsize, self.is_plain):
            if not line and self._waits:
                self._waits = bool(_ask("    Enter: the next stage. "))
            else:
                print(paint(line) if self._has_colour else line, file=self._stream, flush=True)


def _ask(words: str) -> bool:
    """Wait for Enter; False where nobody is there to press it."""
    try:
        input(words)
    except EOFError:
        print()
        return False
    return True


def _check(args: argparse.Namespace) -> None:
    """Refuse what can be refused before the work; settle what depends on other flags."""
    if args.step is not None:
        raise UsageError("--step chooses among recorded steps.", advice="Name a run folder too.")
    if not 0 <= args.seed < 2**32:
        raise UsageError(f"--seed is {args.seed}.", advice="Use a number from 0 to 2**32 - 1.")
    if args.engine == BOTH and (args.folder or args.svg):
        raise UsageError(
            "--engine both records two steps, and --folder and --svg are for one.",
            advice="Choose --engine dp or ddp for them.",
        )
    if args.values is None:
        args.values = args.model is None
    if args.folder is not None:
        RunFolder(args.folder).create()


def _record(args: argparse.Namespace) -> Trace:
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
                f"It has {len(steps):,}, from {steps[0]} to {steps[-1]}." if steps else "",
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
