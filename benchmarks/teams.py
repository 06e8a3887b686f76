"""Persistent processes: a team for each contestant, of which one works at a time.

Libraries change settings of the whole process: how freed memory is kept, threads, environment.
With separate processes, each contestant is measured as in a script that uses it alone. An idle team
waits for its next request, stopped completely if the system supports that: otherwise Gloo's threads
would poll a hundred times a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from paceline import World
from paceline.testing import run_processes

STARTING = 2
"""So many teams start at the same time: more would only wait for cores and memory."""
LIFE_S = 3600.0
"""No team lives longer, whatever it hangs in."""
CONNECT_S = 120.0
LEAVE_S = 30.0
_LOOK_S = 0.1
# On other systems a stopped process would outlive this one.
_CAN_STOP = sys.platform == "linux" and hasattr(os, "pidfd_open")


class Team:
    """The ranks of one contestant, each in a separate process, as seen by the parent.

        starting --(await_ready)--> stopped --(ask)--> working --(all answered)--> stopped
                                       `--(close)--> gone

    Every rank calls `make(world, *args)` once; `ask` then calls a method of its result. Ranks exit
    at the end of their input. None outlives this process, however it ends: the kernel kills them
    with the fork server, stopped or not.
    """

    def __init__(self, name: str, size: int, make: Callable[..., Any], *args: Any) -> None:
        self.name = name
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-team-")  # 0700
        self._listener = socket.socket(socket.AF_UNIX)
        self._lines: list[Any] = []
        self._handles: list[int] = []
        self._error: Exception | None = None
        path = str(Path(self._folder.name, "line"))
        self._listener.bind(path)
        self._listener.listen(size)
        self._thread = threading.Thread(
            target=self._live, args=(path, make, *args), name=f"team of {name}", daemon=True
        )
        self._thread.start()

    def await_ready(self) -> None:
        """Return when every rank has called `make`."""
        if self._lines:
            return
        line_by_rank: dict[int, Any] = {}
        while len(line_by_rank) < self._size:
            with self._accept() as connection:
                line = connection.makefile("rw")  # keeps it open
            self._lines.append(line)  # closed with the others in any case
            rank, pid = self._read(line)
            line_by_rank[rank] = line
            if _CAN_STOP:
                self._handles.append(os.pidfd_open(pid))
        self._lines = [line_by_rank[rank] for rank in range(self._size)]
        self._stop_listening()
        self._signal(signal.SIGSTOP)

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method on all ranks at the same time; return their answers, by rank."""
        self._signal(signal.SIGCONT)
        with suppress(OSError):  # the error of a dead rank is reported below
            for line in self._lines:
                line.write(json.dumps([method, arguments]) + "\n")
                line.flush()
        answers = [self._read(line) for line in self._lines]
        self._signal(signal.SIGSTOP)
        return answers

    def close(self) -> None:
        """End the ranks, and wait until they have exited."""
        self._signal(signal.SIGCONT)
        self._stop_listening()
        for line in self._lines:
            with suppress(OSError):  # requests that it did not read
                line.close()
        self._thread.join(LEAVE_S)
        for handle in self._handles:
            os.close(handle)

    def _live(self, path: str, make: Callable[..., Any], *args: Any) -> None:
        try:
            run_processes(self._size, serve, path, make, *args, timeout_s=LIFE_S)
        except Exception as error:  # raised again when an answer is requested
            self._error = error

    def _stop_listening(self) -> None:
        self._listener.close()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        for handle in self._handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)

    def _accept(self) -> socket.socket:
        self._listener.settimeout(_LOOK_S)
        deadline = time.monotonic() + CONNECT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(TimeoutError):
                connection = self._listener.accept()[0]
                connection.settimeout(None)
                return connection
        raise self._failure()

    def _read(self, line: Any) -> Any:
        text = ""
        with suppress(OSError):
            text = line.readline()
        if not text.endswith("\n"):
            raise self._failure()
        return json.loads(text)

    def _failure(self) -> Exception:
        """Why there is no answer: the cause of death of the ranks."""
        self._thread.join(LEAVE_S)
        error = self._error or RuntimeError("A process of a team does not answer.")
        error.add_note(f"It was in the team of {self.name!r}.")
        return error


@contextmanager
def standing(
    size: int, names: Iterable[str], make: Callable[..., Any], *args: Any
) -> Iterator[dict[str, Team]]:
    """A team for each name, ready for requests, until the end of the block.

    Each is made by `make(world, *args, name)`; one after the other, as a start uses all cores.
    """
    start_fork_server()
    teams: list[Team] = []
    try:
        for name in names:
            if len(teams) >= STARTING:
                teams[-STARTING].await_ready()
            teams.append(Team(name, size, make, *args, name))
        for team in teams:
            team.await_ready()
        yield {team.name: team for team in teams}
    finally:
        for team in teams:
            team.close()


def start_fork_server() -> None:
    """Import once what every rank would import for its optimizer, which takes seconds each.

    A server that already runs is kept, which costs only time.
    """
    preload = ["torch", "torch.distributed", "torch._dynamo", "paceline.testing", __name__]
    if "pytest" in sys.modules:  # so later tests use the same server
        preload.append("pytest")
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    forkserver.ensure_running()


def serve(world: World, path: str, make: Callable[..., Any], *args: Any) -> None:
    """Serve as one rank of a team until the input ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw") as line:
            member = make(world, *args)
            world.barrier()
            _write(line, [world.rank, os.getpid()])
            for text in line:
                method, arguments = json.loads(text)
                _write(line, getattr(member, method)(**arguments))


def _write(line: Any, answer: Any) -> None:
    line.write(json.dumps(answer) + "\n")
    line.flush()
