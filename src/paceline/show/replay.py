"""`paceline replay RUN --step N`: computes a recorded step again on one worker, and compares.

The script runs again from the newest checkpoint before the step, or from the beginning, in a
separate folder, and ends after the step. With `RunOptions(same_bits=True)` it computes the same
bits as any number of workers, unless something was wrong then, or is now.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.checkpoint import list_entries
from paceline.env import REPLAY_VARIABLE, RUNS_VARIABLE
from paceline.errors import PacelineError, SettingError, UsageError
from paceline.files import RunFolder, read_info
from paceline.launcher import check_program
from paceline.show import compare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compute a step of a run with RunOptions(same_bits=True) again, on one worker: start the "
        "script from the newest checkpoint before it, end after it, and compare the hashes. "
        "Nothing is written to the run's folder, but the script has its other effects. Exits with "
        "1 if bits differ."
    )
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--step", type=int, metavar="N", required=True, help="a step with hashes")
    parser.add_argument(
        "--script", metavar="LINE", help='the script and its arguments, "train.py --lr 0.1"'
    )


def main(args: argparse.Namespace) -> int:
    """Replay and print the comparison; returns 1 where bits differ."""
    run = Path(os.path.realpath(args.run))
    recorded = compare.read_hashes(run)
    if args.step not in recorded:
        steps = ", ".join(map(str, sorted(recorded)[:10]))
        raise UsageError(
            f"Step {args.step} of {str(run)!r} has no hashes.",
            f"Those that have are {steps}{', ...' if len(recorded) > 10 else ''}.",
            "Hashes are written every 100 steps and after the last.",
        )
    try:
        script = shlex.split(args.script or "")
    except ValueError as error:
        raise SettingError(
            f"--script is {args.script!r}: {error}.", advice="Quote it as in a shell."
        ) from None
    if not script:
        info = read_info(RunFolder(run))
        known = f" It was started with: {info.command}" if info and info.command else ""
        raise UsageError(
            f"The script that trained {str(run)!r} is not given.{known}",
            advice='Pass --script "train.py ...", from the folder where it was started.',
        )
    if not script[0].startswith("-"):
        check_program(script[0], "script")
    with tempfile.TemporaryDirectory(prefix="paceline-replay-") as folder:
        again = Path(folder) / run.name
        start = copy_checkpoint(run, again, args.step)
        print(f"Steps {start + 1} to {args.step}, on one worker.", flush=True)
        environ = {**os.environ, RUNS_VARIABLE: folder, REPLAY_VARIABLE: str(args.step)}
        code = subprocess.run([sys.executable, *script], env=environ, check=False).returncode
        if code or not again.is_dir():
            why = f"The script ended with {code}." if code else f"It did not train {run.name!r}."
            raise PacelineError(
                f"Step {args.step} could not be computed again. {why}",
                advice="Start it as the run was: same arguments, data, torch and processor.",
            )
        found = compare.compare(
            {args.step: recorded[args.step]},
            {step: h for step, h in compare.read_hashes(again).items() if step == args.step},
        )
        found["settings"] = compare.compare_settings(*map(compare.describe, (run, again)))
    print("\n".join(compare.lines_of(found)))
    return 1 if found["step"] is not None else 0


def copy_checkpoint(run: Path, to: Path, step: int) -> int:
    """Copy the newest checkpoint before a step into a new run folder; returns its step, or 0."""
    source = RunFolder(run).checkpoints
    before = [entry for entry in list_entries(source) if entry.step < step]
    if not before:
        return 0
    entry = max(before, key=lambda each: (each.step, each.serial))
    shutil.copytree(entry.path, RunFolder(to).checkpoints / entry.name)
    return entry.step
