"""`paceline run`: from flags to workers, attempt by attempt.

flags -> plan -> supervise -> report
           ^                     |
           +--- restarts left ---+
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any

from paceline.comm.sockets import interface_towards
from paceline.env import WATCH_VARIABLE, Placement, loopback_interface, offer_command
from paceline.errors import UsageError
from paceline.launcher.flags import FLAGS, LaunchOptions, add_flags, read_options
from paceline.launcher.follower import Follower
from paceline.launcher.generations import BEFORE_TRAINING, Generations
from paceline.launcher.output import Pipes, open_console
from paceline.launcher.plan import (
    STDERR,
    STDOUT,
    WORKER_FILE,
    WorkerSpec,
    count_cores,
    count_workers,
    plan_workers,
    python_argv,
)
from paceline.launcher.process import Ending, WorkerProcess, private_folder
from paceline.launcher.store import StoreServer
from paceline.launcher.supervise import RESIZING, SignalInbox, Supervisor
from paceline.launcher.template import Forked, Template, TemplateError
from paceline.launcher.worker import Instructions
from paceline.survive.roster import BUG, SAME_STEP, Roster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `paceline run`."""
    parser.description = (
        "Run a training script on several workers. Takes torchrun's flags and sets torchrun's "
        "variables, so a script runs unchanged under either. What follows the script goes to "
        "the script untouched."
    )
    parser.epilog = (
        "exit codes: 0 all workers succeeded; 1 a worker failed; 2 the command line is wrong; "
        "128+n signal n ended the launcher, or the worker that failed first. SIGUSR1 and SIGUSR2 "
        "add a worker to a run and take one away"
    )
    add_flags(parser)
    parser.add_argument("script", help="the script; with -m a module, with --no-python a program")
    parser.add_argument(
        "script_args", nargs=argparse.REMAINDER, metavar="...", help="its own arguments"
    )


def main(args: argparse.Namespace) -> int:
    """Run the script; the exit code."""
    given = {flag.dest: getattr(args, flag.dest) for flag in FLAGS}
    options = read_options(given, os.environ, args.script, tuple(args.script_args))
    check_program(options)
    with ExitStack() as stack:
        run = LocalRun(options, stack)
        if options.is_single_node:
            return run.run_alone(stack)
        from paceline.launcher.nodes import run_with_others

        return run_with_others(run)


def check_program(options: LaunchOptions) -> None:
    """Find out, before anything starts, that there is nothing to start."""
    name, kind = options.program, options.kind
    if kind == "program":
        is_there = shutil.which(name) is not None
        advice = "Check the spelling, or drop --no-python if it is a Python script."
    elif kind == "module":
        top, places = name.partition(".")[0], [os.getcwd(), *sys.path]
        found = importlib.machinery.PathFinder.find_spec(top, places)
        is_there = found is not None or top in sys.builtin_module_names
        advice = "Install it, or start in the folder that holds it; drop -m for a file."
    else:
        main_file = os.path.join(name, "__main__.py")
        is_there = os.path.exists(main_file if os.path.isdir(name) else name)
        advice = (
            "Check the path; a folder needs a __main__.py. The launcher's own flags come before "
            "the script."
        )
    if not is_there:
        where = f"Looked for it in {os.getcwd()}."
        raise UsageError(f"There is no {kind} {name!r}.", where, advice)


class LocalRun:
    """This machine's part of a run: what stays the same when the workers are restarted."""

    def __init__(self, options: LaunchOptions, stack: ExitStack) -> None:
        self.options, self.stack = options, stack
        self.local_size = count_workers(options.nproc_per_node)
        unnamed = secrets.token_hex(8) if options.is_single_node else "none"
        self.run_id = options.rdzv_id or unnamed
        self.folder = stack.enter_context(private_folder())
        resizing = RESIZING if self.survives and options.is_single_node else ()
        self.inbox = stack.enter_context(closing(SignalInbox(options.signals_to_handle, *resizing)))
        self.console = open_console(os.environ)
        self.template: Template | None = None
        self.environ = dict(os.environ) | offer_command(sys.argv)
        """What the workers inherit."""
        if options.watch:
            self.environ[WATCH_VARIABLE] = os.path.join(self.folder, "run_folder")
            # In a session of its own, so that it is still there when the training is not.
            command = [sys.executable, "-m", "paceline", "watch"]
            subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, start_new_session=True
            )
        if options.writes_logs:
            self.folder = _make_log_folder(options.log_dir, self.run_id)
            say(f"paceline: log files are in {self.folder}\n")

    def run_alone(self, stack: ExitStack) -> int:
        """Run workers that are all on this machine; the exit code."""
        store = stack.enter_context(closing(StoreServer(*self.options.meeting_point)))

        def run_attempt(attempt: int) -> Ending:
            store.clear()
            generations = None
            if self.survives:
                roster = self.make_roster(self.local_size)
                is_run = b"paceline" in self.text and re.search(rb"\bRun\(", self.text) is not None
                generations = Generations(
                    say=tell, roster=roster, is_run=is_run, give_up_keys=store.give_up
                )
            first = store.first_place(self.local_size)
            return self.run(first, attempt, store=store, generations=generations)

        return self.run_attempts(run_attempt, self.local_size)

    @property
    def survives(self) -> bool:
        """Whether a training is to go on when workers die."""
        return not self.options.no_survive and sys.platform == "linux"

    def make_roster(self, size: int, machine_by_seat: Mapping[int, int] | None = None) -> Roster:
        """The roster of `size` workers, of which those that are not here are on other machines."""
        least = self.options.min_workers
        if least > size:
            raise UsageError(
                f"--min-workers is {least}, but there are {size} workers.",
                advice="Use a number from 1 to that of --workers.",
            )
        return Roster(
            size=size,
            min_workers=least,
            max_replacements=self.options.max_restarts,
            machine_by_seat=machine_by_seat or {},
        )

    def run_attempts(
        self,
        run_attempt: Callable[[int], Ending],
        size: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> int:
        """Run all `size` workers again while they fail and restarts are left; the exit code."""
        restarts, lost = self.options.max_restarts or 0, Counter[int]()
        for attempt in count():
            ending = run_attempt(attempt)
            say(str(ending))
            self.inbox.read()
            # Not after a signal, even one that came while a failure ended.
            if ending.succeeded or self.inbox.seen or is_over():
                break
            if ending.lost_in and self.options.max_restarts is None:
                lost[ending.lost_in] += 1
                if lost[ending.lost_in] == SAME_STEP:
                    tell(f"that was the third time: {BUG}.")
                    break
                if ending.lost_in == BEFORE_TRAINING:
                    tell("nothing was trained yet; all start again.")
                else:
                    tell("nobody is left; starting again from the newest checkpoint.")
                continue
            if attempt >= restarts:
                break
            say(
                f"paceline: restarting all {size} workers (restart {attempt + 1} of {restarts}). "
                "What was not in a checkpoint is lost.\n"
            )
        return ending.exit_code

    def run(
        self,
        first: Placement,
        attempt: int,
        *,
        store: StoreServer | None = None,
        look_elsewhere: Callable[[], str] | None = None,
        generations: Generations | Follower | None = None,
    ) -> Ending:
        """Start this machine's workers, from the one at `first` on, and watch them to the end."""
        is_local = first.is_on_loopback
        plan = partial(
            plan_workers,
            self.options,
            run_id=self.run_id,
            folder=os.path.join(self.folder, f"attempt_{attempt}"),
            environ=self.environ,
            cores=count_cores(),
            interface=loopback_interface() if is_local else interface_towards(first.master_addr),
            attempt=attempt,
        )
        specs = plan(first)
        if self.template is None and self._wants_template(first.size):
            self.template = Template(python_argv(os.environ), specs[0].environment)
            self.stack.callback(self.template.close)
        return Supervisor(
            specs,
            partial(self._start, generations),
            self.options,
            self.console,
            store=store,
            inbox=self.inbox,
            look_elsewhere=look_elsewhere,
            generations=generations,
            make_spec=lambda seat: plan(_with_one_more(first, seat))[-1],
            template=self.template,
            announce=None if attempt else tell,
        ).run()

    def _wants_template(self, workers: int) -> bool:
        """Whether several workers will import torch, as far as the program tells."""
        options = self.options
        if options.no_template or options.kind == "program" or workers == 1:
            return False
        if sys.platform != "linux" or "PYTHON_EXEC" in os.environ:
            return False
        if options.kind == "module":
            return True
        return b"torch" in self.text or b"paceline" in self.text

    @cached_property
    def text(self) -> bytes:
        """The script, to guess from what it will need; empty where that is not one file."""
        try:
            with open(self.options.program, "rb") as file:
                return file.read()
        except OSError:
            return b""

    def _start(
        self, generations: Generations | Follower | None, spec: WorkerSpec, pipes: Pipes
    ) -> WorkerProcess:
        """Start a worker as a program of its own."""
        survival: dict[str, Any] = {}
        if generations is not None:
            line = generations.open_line(spec.rank)
            pipes.theirs += line.theirs
            survival = {
                "line_fd": line.theirs[0],
                "ledger_fd": line.theirs[1],
                "is_replacement": generations.is_on,
            }
        instructions = Instructions(
            parent=os.getpid(),
            kind=self.options.kind,
            as_torch=self.options.as_torch,
            numa=self.options.numa_binding,
            status_fd=pipes.status_writer,
            **survival,
        )
        on_terminal = os.isatty(0)
        leads_group = not (spec.takes_terminal and on_terminal)
        environment = {**spec.environment, **pipes.variables, **instructions.as_variable()}
        if self.template is not None:
            try:
                forked = self._fork(self.template, spec, pipes, environment, leads_group)
                return WorkerProcess(
                    spec.rank,
                    forked.pid,
                    forked.poll,
                    spec.error_file,
                    pipes,
                    leads_group=leads_group,
                )
            except TemplateError:
                self.template = None  # from now on each is a new Python
        try:
            process = subprocess.Popen(
                spec.argv,
                env=environment,
                pass_fds=pipes.theirs,
                # Many workers cannot share a keyboard: one that reads it would be stopped.
                stdin=subprocess.DEVNULL if on_terminal and not spec.takes_terminal else None,
                stdout=pipes.streams[STDOUT],
                stderr=pipes.streams[STDERR],
                process_group=0 if leads_group else None,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise UsageError(
                f"Cannot start {spec.argv[0]!r} for rank {spec.rank}: {error.strerror}.",
                advice="PYTHON_EXEC chooses the interpreter, if it is set.",
            ) from error
        return WorkerProcess(
            spec.rank, process.pid, process.poll, spec.error_file, pipes, leads_group=leads_group
        )

    def _fork(
        self,
        template: Template,
        spec: WorkerSpec,
        pipes: Pipes,
        environment: dict[str, str],
        leads_group: bool,
    ) -> Forked:
        """Have the template fork a worker, with the descriptors that a new Python would inherit."""
        descriptors = {fd: fd for fd in pipes.theirs}
        descriptors |= {n: n if fd is None else fd for n, fd in pipes.streams.items()}
        with open(os.devnull) as nothing:
            descriptors[0] = nothing.fileno() if os.isatty(0) else 0
            arguments = spec.argv[spec.argv.index(WORKER_FILE) + 1 :]
            return template.start(arguments, environment, descriptors, leads_group=leads_group)


def _with_one_more(first: Placement, seat: int) -> Placement:
    """The place of the first worker where there is another one, on a seat that nobody had yet."""
    local_rank = first.local_size + seat - first.size
    return replace(first, rank=seat - local_rank, size=seat + 1, local_size=local_rank + 1)


def say(text: str) -> None:
    """Tell the user, on stderr and at once."""
    sys.stderr.buffer.write(text.encode("utf-8", "replace"))
    sys.stderr.flush()


def tell(text: str) -> None:
    """Tell the user, in the launcher's name."""
    say(f"paceline: {text}\n")


def _make_log_folder(root: str, run_id: str) -> str:
    try:
        root = root or tempfile.mkdtemp(prefix="paceline-logs-")
        os.makedirs(root, exist_ok=True)
        return tempfile.mkdtemp(prefix=f"{run_id}_", dir=root)
    except OSError as error:
        raise UsageError(
            f"Cannot write log files in {root!r}: {error.strerror}.",
            advice="Pass another --log-dir.",
        ) from error
