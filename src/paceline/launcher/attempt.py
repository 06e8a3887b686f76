"""One attempt: start the planned workers with their pipes, watch them to the end, close all.

Everything that has an effect and belongs to a single attempt is here and in `watch`; what lasts
over restarts is a `Site`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import BinaryIO

from paceline import env
from paceline.comm.sockets import interface_towards
from paceline.errors import UsageError
from paceline.launcher import output
from paceline.launcher.ending import Ending
from paceline.launcher.machine import count_cores
from paceline.launcher.options import RunOptions
from paceline.launcher.output import Console, Source, Stream
from paceline.launcher.plan import (
    STDERR,
    STDOUT,
    Facts,
    Meeting,
    Route,
    WorkerSpec,
    plan_workers,
    writes_logs,
)
from paceline.launcher.process import Running, start_program
from paceline.launcher.sentinel import Sentinel
from paceline.launcher.store import SCRIPT_PATIENCE_S, StoreDoor
from paceline.launcher.watch import OtherMachines, SignalInbox, end_now, watch
from paceline.launcher.worker import Orders


@dataclass(slots=True)
class Site:
    """This machine's part of a run: what stays the same when the workers are restarted."""

    options: RunOptions
    local_size: int
    run_id: str
    folder: str
    """Private and temporary."""
    sentinel: Sentinel
    inbox: SignalInbox
    console: Console = field(init=False)
    log_root: str = ""

    def __post_init__(self) -> None:
        self.console = output.file_console(os.environ)
        if writes_logs(self.options):
            self.log_root = _make_log_folder(self.options.log_dir, self.run_id)

    def claim_file(self, attempt: int) -> str:
        return os.path.join(self._attempt_folder(attempt), "store-claimed")

    def run(
        self,
        meeting: Meeting,
        attempt: int,
        *,
        door: StoreDoor | None = None,
        others: OtherMachines | None = None,
    ) -> Ending:
        """Start this machine's workers and watch them to the end."""
        facts = Facts(
            run_id=self.run_id,
            folder=self._attempt_folder(attempt),
            log_folder=os.path.join(self.log_root, f"attempt_{attempt}") if self.log_root else "",
            cores=count_cores(),
            environ=os.environ,
            loopback=env.loopback_interface(),
            outward=None if meeting.is_on_loopback else interface_towards(meeting.host),
            attempt=attempt,
        )
        specs = plan_workers(self.options, meeting, facts)
        for spec in specs:
            os.makedirs(os.path.dirname(spec.error_file), mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            starter = _Starter(self, meeting, stack, facts.log_folder)
            linger_fd = starter.start(specs, door)
            return watch(
                starter.workers,
                sentinel=self.sentinel,
                shutdown_timeout_s=self.options.shutdown_timeout_s,
                signal_timeout_s=self.options.signal_timeout_s,
                inbox=self.inbox,
                door=door,
                door_patience_s=0.0 if self.options.kind == "program" else SCRIPT_PATIENCE_S,
                linger_fd=linger_fd,
                others=others,
                screen=self.console.screen,
            )

    def _attempt_folder(self, attempt: int) -> str:
        folder = os.path.join(self.folder, f"attempt_{attempt}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder


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


class _Starter:
    """Starts workers one by one; if one cannot start, ends those that did."""

    def __init__(self, site: Site, meeting: Meeting, stack: ExitStack, log_folder: str) -> None:
        self.site = site
        self.options = site.options
        self.meeting = meeting
        self.workers: list[Running] = []
        self.filters: dict[int, tuple[bytes, ...]] = {}
        self.filtered: dict[int, BinaryIO] = {}
        for number, name, words in (
            (STDOUT, "filtered_stdout.log", self.options.stdout_filters),
            (STDERR, "filtered_stderr.log", self.options.stderr_filters),
        ):
            self.filters[number] = tuple(word.encode() for word in words)
            if words:
                path = os.path.join(log_folder, name)
                file = open(path, "ab", buffering=0)  # noqa: SIM115
                self.filtered[number] = stack.enter_context(file)

    def start(self, specs: tuple[WorkerSpec, ...], door: StoreDoor | None) -> int:
        """Start them all; the descriptor that keeps the first one serving the store."""
        linger_reader, linger_writer = os.pipe()
        try:
            for spec in specs:
                served = door if spec.rank == 0 else None
                orders = Orders(
                    parent=os.getpid(),
                    kind=self.options.kind,
                    listen_fd=-1 if served is None else served.fileno(),
                    claim_file="" if served is None else served.claim_file,
                    linger_fd=-1 if served is None else linger_reader,
                    as_torch=self.options.as_torch,
                    numa=self.options.numa,
                )
                self.workers.append(self._start_one(spec, orders))
        except BaseException:
            os.close(linger_writer)
            end_now(self.workers)
            raise
        finally:
            os.close(linger_reader)
        return linger_writer

    def _start_one(self, spec: WorkerSpec, orders: Orders) -> Running:
        on_terminal = os.isatty(0)
        with ExitStack() as handed_over:
            streams: list[Source] = []
            ends: dict[int, int | None] = {}
            for number, route in ((STDOUT, spec.stdout), (STDERR, spec.stderr)):
                if spec.takes_terminal:
                    ends[number] = None
                    continue
                end, stream = self._open(spec, number, route)
                ends[number] = end
                handed_over.callback(os.close, end)
                if stream is not None:
                    streams.append(stream)
            variables: dict[str, str] = {}
            passed: list[int] = []
            if self._speaks_for_all(spec):
                if self.site.console.screen is not None:
                    records, writer = output.open_records(self.site.console.screen)
                    streams.append(records)
                    passed.append(writer)
                    handed_over.callback(os.close, writer)
                variables = env.screen_environment(
                    passed[0] if passed else -1,
                    stdout=ends[STDOUT] or STDOUT,
                    mark=self._mark(spec, STDOUT),
                )
            running = start_program(
                spec.argv,
                {**spec.environment, **variables},
                orders,
                rank=spec.rank,
                error_file=spec.error_file,
                # Many workers cannot share a keyboard: one that reads it would be stopped.
                stdin=subprocess.DEVNULL if on_terminal and not spec.takes_terminal else None,
                stdout=ends[STDOUT],
                stderr=ends[STDERR],
                leads_group=not (spec.takes_terminal and on_terminal),
                passed=passed,
            )
        running.streams = streams
        return running

    def _speaks_for_all(self, spec: WorkerSpec) -> bool:
        """Rank 0 alone says where the run is, and not if nobody wants to see what it says."""
        return spec.rank == 0 and spec.stdout.on_console

    def _mark(self, spec: WorkerSpec, number: int) -> str:
        """What sets lines of the whole run apart, where nobody but us reads them."""
        is_ours = not spec.takes_terminal and not spec.stdout.log_file
        is_apart = is_ours and number == STDOUT and self._speaks_for_all(spec)
        return self.site.console.mark if is_apart else ""

    def _open(self, spec: WorkerSpec, number: int, route: Route) -> tuple[int, Stream | None]:
        """The worker's end of one stream, and ours if we must pass on what it says."""
        filtered = self.filtered.get(number)
        if not route.on_console and filtered is None:
            path = route.log_file or os.devnull
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), None
        reader, writer = os.pipe()
        log = open(route.log_file, "wb", buffering=0) if route.log_file else None  # noqa: SIM115
        labelled = self.options.label and self.meeting.size > 1
        stream = Stream(
            reader,
            number,
            rank=spec.rank if labelled else None,
            console=self.site.console if route.on_console else None,
            log=log,
            filters=self.filters[number],
            filtered=filtered,
            patience_s=output.TERMINAL_PATIENCE_S if os.isatty(number) else output.LOG_PATIENCE_S,
            mark=self._mark(spec, number),
        )
        return writer, stream
