"""A running worker, seen from the launcher: its process, its group, its pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import UsageError
from paceline.launcher.output import Source
from paceline.launcher.worker import Orders

_TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}


@dataclass(slots=True)
class Running:
    """One worker process. `poll` returns its exit code, or None while it runs."""

    rank: int
    pid: int
    poll: Callable[[], int | None]
    error_file: str
    status_fd: int
    """The launcher's end of the pipe a worker says one-byte words on."""
    streams: list[Source] = field(default_factory=list)
    leads_group: bool = True
    """False for a worker that shares the launcher's terminal, and so its process group."""
    noticed_ns: int = 0
    """When the launcher learned that it failed; 0 while it has not."""

    def send(self, number: int) -> None:
        """Signal the worker and everything it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.leads_group:
                os.killpg(self.pid, number)
            elif number not in _TERMINAL_SIGNALS:  # the terminal has sent those itself
                os.kill(self.pid, number)

    def has_leftovers(self) -> bool:
        """Whether processes the worker started are still there, after it has ended itself."""
        if not self.leads_group:
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True


def start_program(
    argv: Sequence[str],
    environment: Mapping[str, str],
    orders: Orders,
    *,
    rank: int,
    error_file: str,
    stdin: int | None,
    stdout: int | None,
    stderr: int | None,
    leads_group: bool,
    passed: Sequence[int] = (),
) -> Running:
    """Start a worker as a program of its own; None inherits the launcher's stream.

    Of the launcher's descriptors it also gets those in `passed`, and those its orders name.
    """
    status_reader, status_writer = os.pipe()
    orders = replace(orders, status_fd=status_writer)
    named = [fd for fd in (orders.status_fd, orders.listen_fd, orders.linger_fd) if fd >= 0]
    try:
        process = subprocess.Popen(
            argv,
            env={**environment, **orders.as_variable()},
            pass_fds=[*named, *passed],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            process_group=0 if leads_group else None,
        )
    except OSError as error:
        os.close(status_reader)
        raise UsageError(
            f"Cannot start {argv[0]!r} for rank {rank}: {error.strerror}.",
            advice="PYTHON_EXEC chooses the interpreter, if it is set.",
        ) from error
    finally:
        os.close(status_writer)
    return Running(rank, process.pid, process.poll, error_file, status_reader, [], leads_group)
