"""A process that has imported torch once, and forks workers: another one starts in milliseconds.

    launcher --start(program, environment, descriptors)--> template --fork, fork--> worker
        └----------------------------- its child again <----------------------------┘

The process in between ends at once, and whoever loses its parent goes to the launcher, which asked
the kernel for that. So the launcher hears of a worker's end as of any child's, the worker dies with
the launcher, and neither notices if the template dies.

The launcher runs this file by its path. It stays single-threaded and runs no operator: a thread
pool or a GPU that was in use before a fork would be unusable after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

MODULES = ("torch._dynamo", "torch.distributed", "paceline.run", "paceline.launcher.as_torch")
"""What a training imports anyway."""
REQUEST_BYTES = 2**20
START_TIMEOUT_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36


class TemplateError(Exception):
    """The template is gone, or could not do what it was asked to."""


@dataclass
class Forked:
    """A worker that the template forked: to the launcher a child like any other."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self.pid, 255 << 8
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Template:
    """The launcher's side."""

    def __init__(self, python: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it, as `python` says how Python is started; it imports while others work."""
        _adopt_orphans(True)
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(START_TIMEOUT_S)
        self._is_ready = False
        with theirs:
            self._process = subprocess.Popen(
                [*python, __file__, str(theirs.fileno()), str(os.getpid())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def fileno(self) -> int:
        return self._line.fileno()

    def look(self) -> bool:
        """Whether it has imported everything, or is gone, so that `start` answers at once."""
        if not self._is_ready:
            if not select.select([self._line], [], [], 0)[0]:
                return False
            with contextlib.suppress(OSError):
                self._line.recv(64)
            self._is_ready = True
        return True

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
        *,
        leads_group: bool,
    ) -> Forked:
        """Fork a worker that runs `arguments`, as `worker.main` takes them.

        `descriptors` of this process, by the number that the worker shall have them under.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "numbers": list(descriptors),
            "leads_group": leads_group,
        }
        try:
            data = json.dumps(request).encode()
            socket.send_fds(self._line, [data], list(descriptors.values()))
            answer = self._line.recv(64)
        except OSError as error:
            raise TemplateError(str(error)) from error
        if not answer or int(answer) < 0:
            raise TemplateError("it did not fork")
        return Forked(int(answer))

    def close(self) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait()
        _adopt_orphans(False)


def has_orphans(group: int) -> bool:
    """Whether processes of a worker that is gone are children of this one; buries the dead."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _adopt_orphans(is_wanted: bool) -> None:
    """Whether a process whose parent ends, below this one, becomes a child of this one."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted))


def main(line_fd: int, launcher: int) -> None:
    """The template's side: fork whatever is asked for, until the launcher is gone."""
    from paceline.launcher.worker import die_with

    die_with(launcher)
    line = socket.socket(fileno=line_fd)
    gc.disable()  # nearly all of what imports make stays: looking through it costs a fifth of them
    for name in MODULES:
        __import__(name)
    gc.collect()
    line.send(b"ready")
    gc.freeze()  # what was imported is not looked at again, so its pages stay shared
    gc.enable()
    while True:
        data, fds, _, _ = socket.recv_fds(line, REQUEST_BYTES, 64)
        if not data:
            return
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            worker = os.fork()
            if worker:
                os.write(writer, str(worker).encode())
                os._exit(0)
            line.close()
            os.close(reader)
            os.close(writer)
            _move(fds, json.loads(data)["numbers"])
            become_worker(json.loads(data), launcher)
        os.waitpid(between, 0)  # from now on the worker is the launcher's child
        os.close(writer)
        line.send(os.read(reader, 64) or b"-1")
        os.close(reader)
        for fd in fds:
            os.close(fd)


def become_worker(request: dict[str, Any], launcher: int) -> NoReturn:
    """Be what a new interpreter would be that runs the worker's file."""
    from paceline.launcher import worker

    code: object = 1
    try:
        while os.getppid() != launcher:  # the process in between has not ended yet
            time.sleep(0.0002)
        if request["leads_group"]:
            os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == 2 else signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environment"])
        _seed_anew()
        code = worker.main(request["arguments"])
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    worker.leave(code)


def _move(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers they are to have, whatever has those now."""
    beyond = max([*fds, *numbers]) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond) for fd in fds]
    for fd in fds:
        os.close(fd)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)


def _seed_anew() -> None:
    """Python's own generator is seeded anew in every fork; NumPy's global one would be a copy."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        # Under its real name: what it forks imports from it.
        sys.path.pop(0)
        from paceline.launcher import template

        template.main(int(sys.argv[1]), int(sys.argv[2]))
