"""The plan of a run on this machine: what to start, with which environment, writing where.

A plan is plain data computed from the flags and a few facts, so a test can check it without
starting anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.env import (
    Placement,
    is_loopback,
    observation_environment,
    progress_environment,
    worker_environment,
)
from paceline.launcher.options import RunOptions

WORKER_FILE = str(Path(__file__).with_name("worker.py"))
STDOUT, STDERR = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the workers of one attempt meet, and which of them this machine starts."""

    host: str
    port: int
    size: int
    local_size: int
    first_rank: int = 0
    node: int = 0
    nodes: int = 1

    @property
    def is_single_node(self) -> bool:
        return self.nodes == 1

    @property
    def is_on_loopback(self) -> bool:
        return self.is_single_node or is_loopback(self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a plan needs to know of this machine and this attempt."""

    run_id: str
    folder: str
    """A private folder of this attempt."""
    cores: int
    environ: Mapping[str, str]
    loopback: str | None = None
    outward: str | None = None
    """The interface that leads to other machines, where Gloo would not find it by itself."""
    attempt: int = 0
    log_folder: str = ""
    """Where this attempt's log files go, if any are written."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where one stream of a worker goes."""

    on_console: bool = True
    log_file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker to be started."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    error_file: str
    stdout: Route
    stderr: Route
    takes_terminal: bool
    """Alone on the console, it inherits the launcher's streams as they are."""


def plan_workers(options: RunOptions, meeting: Meeting, facts: Facts) -> tuple[WorkerSpec, ...]:
    """One spec for each worker of this machine, by local rank."""
    return tuple(_plan_worker(options, meeting, facts, i) for i in range(meeting.local_size))


def writes_logs(options: RunOptions) -> bool:
    """Whether anything goes to log files, so that their folder must exist."""
    wanted = [*options.redirects.values(), *options.tee.values()]
    filters = options.stdout_filters or options.stderr_filters
    return bool(options.log_dir or any(wanted) or filters)


def program_argv(options: RunOptions, environ: Mapping[str, str]) -> tuple[str, ...]:
    """How every worker is started: by Python and our worker file, unbuffered as under torchrun."""
    python = environ.get("PYTHON_EXEC", sys.executable)
    # -X, -W, -O and the like hold for the workers as they do for the launcher.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return (python, "-u", *flags, WORKER_FILE, options.program, *options.arguments)


def _plan_worker(
    options: RunOptions, meeting: Meeting, facts: Facts, local_rank: int
) -> WorkerSpec:
    place = Placement(
        rank=meeting.first_rank + local_rank,
        size=meeting.size,
        local_rank=local_rank,
        local_size=meeting.local_size,
        node=meeting.node,
        nodes=meeting.nodes,
        master_addr=meeting.host,
        master_port=meeting.port,
        agent_has_store=True,
        source="paceline run",
    )
    folder = os.path.join(facts.log_folder or facts.folder, str(local_rank))
    error_file = os.path.join(folder, "error.json")
    ours = worker_environment(
        place,
        run_id=facts.run_id,
        error_file=error_file,
        environ=facts.environ,
        role=options.role,
        restart_count=facts.attempt,
        max_restarts=options.max_restarts,
        cores=facts.cores,
        threads=options.threads,
        interface=facts.loopback if meeting.is_on_loopback else facts.outward,
        virtual_local_rank=options.virtual_local_rank,
    )
    ours |= observation_environment(
        timeline=options.timeline,
        stall_s=options.stall_after_s,
        trace_step=options.trace_step,
        environ=facts.environ,
    )
    ours |= progress_environment(options.progress)
    stdout = _route(options, local_rank, STDOUT, os.path.join(folder, "stdout.log"))
    stderr = _route(options, local_rank, STDERR, os.path.join(folder, "stderr.log"))
    plain = Route()
    filters = options.stdout_filters or options.stderr_filters
    return WorkerSpec(
        rank=place.rank,
        local_rank=local_rank,
        argv=program_argv(options, facts.environ),
        environment={**facts.environ, **ours},
        error_file=error_file,
        stdout=stdout,
        stderr=stderr,
        takes_terminal=meeting.size == 1 and stdout == stderr == plain and not filters,
    )


def _route(options: RunOptions, local_rank: int, stream: int, log_file: str) -> Route:
    redirected = _streams_of(options.redirects, local_rank) & stream
    teed = _streams_of(options.tee, local_rank) & stream
    shown = options.shown_local_ranks is None or local_rank in options.shown_local_ranks
    # As under torchrun, what is both redirected and teed is teed.
    return Route(
        on_console=shown and bool(teed or not redirected),
        log_file=log_file if redirected or teed else "",
    )


def _streams_of(by_rank: Mapping[int, int], local_rank: int) -> int:
    return by_rank.get(local_rank, by_rank.get(-1, 0))
