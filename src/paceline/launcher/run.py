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
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any

from paceline import env
from paceline.env import (
    FOLDER_VARIABLE,
    Placement,
    find_announced,
    loopback_interface,
    offer_command,
    read_observation,
)
from paceline.errors import UsageError
from paceline.files import OutputLog
from paceline.group import interface_towards
from paceline.islands import ISLAND_VARIABLE
from paceline.launcher.deaths import BEFORE_TRAINING, BUG, SAME_STEP, Deaths, RunResult
from paceline.launcher.flags import FLAGS, LaunchOptions, add_flags, read_options
from paceline.launcher.follower import Follower
from paceline.launcher.generations import Generations
from paceline.launcher.output import LAST_WAIT_S, Pipes, open_console
from paceline.launcher.plan import (
    STDERR,
    STDOUT,
    WORKER_FILE,
    WorkerSpec,
    count_cores,
    count_workers,
    describe_sharing,
    find_gpus,
    plan_workers,
    python_argv,
)
from paceline.launcher.process import SignalInbox, WorkerProcess, private_folder
from paceline.launcher.store import StoreServer
from paceline.launcher.supervise import Supervisor
from paceline.launcher.template import Forked, Template, TemplateError
from paceline.launcher.worker import Instructions, die_with
from paceline.launcher.workers import RESIZING


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a training script on several workers. Takes torchrun's flags and sets torchrun's "
        "variables, so a script runs unchanged under either. What follows the script goes to "
        "the script untouched."
    )
    parser.epilog = (
        "exit codes: 0 all workers succeeded; 1 a worker failed; 2 the command line is wrong; n a "
        "worker that called sys.exit(n) ended the run; "
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
    # What the parent ignores or blocks is inherited. The kernel would forget how children end, so
    # all would have succeeded; and no signal would end this process.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if parent := env.take_parent():
        die_with(parent, signal.SIGTERM)
    given = {flag.dest: getattr(args, flag.dest) for flag in FLAGS}
    options = read_options(given, os.environ, args.script, tuple(args.script_args))
    check_program(options.program, options.kind)
    note_late_workers(options, given, os.environ)
    with ExitStack() as stack:
        islands: dict[str, str] = {}
        if options.island:
            from paceline.launcher.islands import as_host, check_island, run_islands

            check_island(options)
            if options.island != "host":
                return run_islands(options, given)
            if not options.is_single_node:
                options = stack.enter_context(as_host(options, islands))
        run = LocalRun(options, stack)
        run.environ |= islands
        from paceline.launcher.nodes import run_on_machines

        return run_on_machines(run)


def check_program(name: str, kind: str) -> None:
    """Find out, before anything starts, that there is nothing to start."""
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


def note_late_workers(
    options: LaunchOptions, given: Mapping[str, str | None], environ: Mapping[str, str]
) -> None:
    """Say so if the number of workers follows the script, which is then given it as an argument."""
    workers = next(flag for flag in FLAGS if flag.dest == "nproc_per_node")
    late = [a for a in options.arguments if a.partition("=")[0] in workers.names]
    if late and workers.find(given, environ)[1] == "default":
        print(
            f"paceline: {late[0]} follows {options.program}, so it is an argument of that, and one "
            "worker starts. The launcher's own flags come before the script.",
            file=sys.stderr,
        )


class LocalRun:
    """This machine's part of a run: what stays the same when the workers are restarted."""

    def __init__(self, options: LaunchOptions, stack: ExitStack) -> None:
        self.options, self.stack = options, stack
        self.local_size = count_workers(options.nproc_per_node)
        # Machines that are given no name for the run use the same one: torchrun's.
        unnamed = secrets.token_hex(8) if options.is_single_node else "none"
        self.run_id = options.rdzv_id or unnamed
        self.folder = self.private = stack.enter_context(private_folder())
        """For error and log files; and for what no other user may reach."""
        self.console = open_console(os.environ)
        stack.callback(self.console.flush, LAST_WAIT_S)
        self.inbox = stack.enter_context(closing(SignalInbox(options.signals_to_handle, *RESIZING)))
        self.template: Template | None = None
        self.deaths = Deaths(options.survive_errors)
        is_island = bool(env.read(ISLAND_VARIABLE))  # then the launcher of all has said how
        self.environ = dict(os.environ) | ({} if is_island else offer_command(sys.argv))
        """What the workers inherit."""
        announced = self.environ[FOLDER_VARIABLE] = os.path.join(self.folder, "run_folder")
        self.console.log = OutputLog(partial(find_announced, announced))
        stack.callback(self.console.log.close)
        with open(announced, "x+") as announcement:
            print(os.getpid(), file=announcement, flush=True)
            if options.watch:
                # In a session of its own, so that it is still there when the training is not. It
                # has the file open, so that it can still be read when the folder is gone.
                command = [sys.executable, "-m", "paceline", "watch", "--beside-training"]
                subprocess.Popen(
                    command, env=self.environ, stdin=announcement, start_new_session=True
                )
        if options.writes_logs:
            self.folder = _make_log_folder(options.log_dir, self.run_id)
            self.console.tell(f"log files are in {self.folder}")

    @property
    def survives(self) -> bool:
        """Whether a training is to go on when workers die.

        A program keeps no descriptor of ours, so nobody could tell a `Run` in it of a death.
        """
        is_ours = self.options.kind != "program"
        return is_ours and not self.options.no_survive and sys.platform == "linux"

    def run_attempts(
        self, run_attempt: Callable[[int], RunResult], size: int, is_over: Callable[[], bool]
    ) -> int:
        """Run all `size` workers again while they fail and restarts are left; the exit code."""
        restarts, lost = self.options.max_restarts or 0, Counter[int]()
        for attempt in count():
            result = run_attempt(attempt)
            self.console.say(str(result))
            self.inbox.read()
            # Not after a signal, even one that came while a failure ended.
            if result.reason is None or self.inbox.seen or is_over():
                break
            if result.lost_in and self.options.max_restarts is None:
                lost[result.lost_in] += 1
                if lost[result.lost_in] == SAME_STEP:
                    self.console.tell(f"that was the third time: {BUG}.")
                    break
                if result.lost_in == BEFORE_TRAINING:
                    self.console.tell("nothing was trained yet; all start again.")
                else:
                    self.console.tell(
                        "no worker can go on; all start again, from a checkpoint if there is one."
                    )
                continue
            if attempt >= restarts:
                break
            self.console.tell(
                f"restarting all {size} workers (restart {attempt + 1} of {restarts}). "
                "What was not in a checkpoint is lost."
            )
        if result.reason is not None:
            result.reason.leave()
        return result.exit_code

    def run(
        self,
        first: Placement,
        attempt: int,
        generations: Generations | Follower,
        store: StoreServer | None,
    ) -> RunResult:
        """Start this machine's workers, from the one at `first` on, and watch them to the end."""
        is_local = first.is_on_loopback
        gpus = find_gpus(self.environ) if self.options.share_gpus else []
        if self.options.share_gpus and not attempt:
            for line in describe_sharing(gpus, first.local_size, self.environ):
                self.console.tell(line)
        if self.survives and self.is_run:
            kept = env.leave_nccl_to_us(self.environ)
            if kept and not attempt:
                settings = ", ".join(f"{name}={self.environ[name]}" for name in kept)
                self.console.tell(
                    f"{settings} is kept; over NCCL torch may then end workers whose peer has died."
                )
        plan = partial(
            plan_workers,
            self.options,
            run_id=self.run_id,
            folder=os.path.join(self.folder, f"attempt_{attempt}"),
            environ=self.environ,
            cores=count_cores(),
            interface=loopback_interface() if is_local else interface_towards(first.master_addr),
            attempt=attempt,
            gpus=gpus,
        )
        specs = plan(first)
        has_template = self.template is not None and not self.template.is_gone
        if not has_template and self._wants_template(first.size):
            with suppress(OSError):  # each is a new Python then
                self.template = Template(python_argv(os.environ), specs[0].environment)
                self.stack.callback(self.template.close)
        return Supervisor(
            specs,
            partial(self._start, generations),
            self.options,
            self.console,
            store=store,
            inbox=self.inbox,
            generations=generations,
            make_spec=lambda worker_id: plan(_with_one_more(first, worker_id))[-1],
            template=None if self.template is None or self.template.is_gone else self.template,
            announce=None if attempt else self.console.tell,
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

    @property
    def is_run(self) -> bool:
        """Whether the program trains with a `Run`, as far as its text tells."""
        return re.search(rb"paceline(?s:.*)\bRun\(", self.text) is not None

    @cached_property
    def text(self) -> bytes:
        """The script, to guess from what it will need; empty where that is not one file."""
        try:
            with open(self.options.program, "rb") as file:
                return file.read()
        except OSError:
            return b""

    def _start(
        self, generations: Generations | Follower, spec: WorkerSpec, pipes: Pipes
    ) -> WorkerProcess:
        """Start a worker as a program of its own, or ask the template for it."""
        survival: dict[str, Any] = {}
        if generations.survives and not spec.is_alone:
            line, ledger = generations.open_worker_channel(spec.rank).theirs
            pipes.theirs += [line, ledger]
            survival = {"line": line, "ledger": ledger, "is_replacement": generations.is_on}
            survival["survives_errors"] = generations.survives_errors
        instructions = Instructions(
            parent=os.getpid(),
            kind=self.options.kind,
            as_torch=self.options.as_torch,
            numa=self.options.numa_binding,
            status_fd=pipes.status_writer,
            stall_end_s=read_observation(spec.environment).stall_end_s,
            survival=survival,
        )
        on_terminal = os.isatty(0)
        leads_group = not (spec.takes_terminal and on_terminal)
        environment = {**spec.environment, **pipes.variables, **instructions.as_variable()}
        process: Forked | subprocess.Popen[bytes] | None = None
        if self.template is not None and not self.template.is_gone:
            with suppress(TemplateError):  # the supervisor hears of it too
                process = self._fork(self.template, spec, pipes, environment, leads_group)
        try:
            process = process or subprocess.Popen(
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
            return template.ask(arguments, environment, descriptors, leads_group=leads_group)


def _with_one_more(first: Placement, worker_id: int) -> Placement:
    """The place of the first worker where there is one more, with a new number."""
    local_rank = first.local_size + worker_id - first.size
    return replace(
        first, rank=worker_id - local_rank, size=worker_id + 1, local_size=local_rank + 1
    )


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
