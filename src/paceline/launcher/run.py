"""`paceline run`: from flags to workers, attempt by attempt.

flags -> options -> meeting -> plan -> start -> watch -> report
                       ^                                   |
                       +------ while restarts are left ----+
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import secrets
import shutil
import sys
import tempfile
from contextlib import ExitStack, closing

from paceline.errors import UsageError
from paceline.launcher.attempt import Site
from paceline.launcher.ending import Ending, report
from paceline.launcher.flags import FLAGS, add_flags, read_settings
from paceline.launcher.machine import count_workers
from paceline.launcher.options import RunOptions, read_options
from paceline.launcher.output import write_all
from paceline.launcher.plan import Meeting
from paceline.launcher.sentinel import Sentinel
from paceline.launcher.store import StoreDoor
from paceline.launcher.watch import SignalInbox


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline run`."""
    parser.description = (
        "Run a training script on several workers. Takes torchrun's flags and sets torchrun's "
        "variables, so a script runs unchanged under either. What follows the script goes to "
        "the script untouched."
    )
    parser.epilog = (
        "exit codes: 0 all workers succeeded; 1 a worker failed; 2 the command line is wrong; "
        "128+n signal n ended the launcher, or the worker that failed first"
    )
    add_flags(parser)
    parser.add_argument("script", help="the script; with -m a module, with --no-python a program")
    parser.add_argument(
        "script_args", nargs=argparse.REMAINDER, metavar="...", help="its own arguments"
    )


def main(args: argparse.Namespace) -> int:
    """Run the script; the exit code."""
    given = {flag.dest: getattr(args, flag.dest) for flag in FLAGS}
    settings = read_settings(given, os.environ)
    options = read_options(settings, args.script, tuple(args.script_args))
    check_program(options)
    return run(options)


def run(options: RunOptions) -> int:
    """Start the workers, watch them, restart them as often as allowed; the exit code."""
    local_size = count_workers(options.workers)
    run_id = options.run_id or ("none" if options.max_nodes > 1 else secrets.token_hex(8))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        sentinel = stack.enter_context(closing(Sentinel()))
        inbox = stack.enter_context(SignalInbox(options.signals))
        site = Site(options, local_size, run_id, folder, sentinel, inbox)
        if site.log_root:
            say(f"paceline: log files are in {site.log_root}\n")
        if options.max_nodes == 1:
            return run_alone(site)
        from paceline.launcher.nodes import run_with_others

        return run_with_others(site)


def check_program(options: RunOptions) -> None:
    """Find out, before anything starts, that there is nothing to start."""
    name = options.program
    if options.kind == "program":
        if shutil.which(name) is None:
            raise UsageError(
                f"There is no program {name!r}.",
                advice="Check the spelling, or drop --no-python if it is a Python script.",
            )
    elif options.kind == "module":
        top = name.partition(".")[0]
        found = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
        if found is None and top not in sys.builtin_module_names:
            raise UsageError(
                f"There is no module {top!r}.",
                advice="Install it, or start in the folder that holds it; drop -m for a file.",
            )
    elif not os.path.exists(name):
        raise UsageError(
            f"There is no script {name!r}.",
            where=f"Looked for it in {os.getcwd()}.",
            advice="Check the path. The launcher's own flags come before the script.",
        )
    elif os.path.isdir(name) and not os.path.exists(os.path.join(name, "__main__.py")):
        raise UsageError(
            f"{name!r} is a folder without a __main__.py.",
            advice="Name a script in it, or use -m for a package.",
        )


def run_alone(site: Site) -> int:
    """All workers are on this machine."""
    options = site.options
    for attempt in range(options.max_restarts + 1):
        with closing(StoreDoor(site.claim_file(attempt), options.host, options.port)) as door:
            size = site.local_size
            meeting = Meeting(host=door.host, port=door.port, size=size, local_size=size)
            ending = site.run(meeting, attempt, door=door)
        say(report(ending))
        if not wants_restart(site, ending, attempt):
            break
        say(restart_line(options, attempt, site.local_size))
    return ending.exit_code


def wants_restart(site: Site, ending: Ending, attempt: int) -> bool:
    """Whether to try again: not after a signal, even one that came while a failure ended."""
    site.inbox.read()
    return not (ending.succeeded or site.inbox.seen or attempt == site.options.max_restarts)


def restart_line(options: RunOptions, attempt: int, size: int) -> str:
    return (
        f"paceline: restarting all {size} workers (restart {attempt + 1} of "
        f"{options.max_restarts}). What was not in a checkpoint is lost.\n"
    )


def say(text: str) -> None:
    """Tell the user, on stderr and at once."""
    write_all(2, text.encode("utf-8", "replace"))
