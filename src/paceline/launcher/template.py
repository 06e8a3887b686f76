"""A process that has imported torch once, and forks workers: another one starts in milliseconds.

    launcher --ask(program, environment, descriptors)--> template --fork, fork--> worker
        └---------- answer: its number; go -------- its child again <---------------┘

The process in between ends at once, and a process that loses its parent meanwhile goes to the
launcher, which asked the kernel for that. So the launcher hears of a worker's end as of any
child's, the worker dies with the launcher, and neither notices if the template dies.

The launcher never waits for an answer: a template may be stopped, killed or out of processes. A
worker begins when the launcher knows of it, so that one which was given up ends by itself.

The launcher runs this file by its path. It stays single-threaded and runs no operator: a thread
pool or a GPU that was in use before a fork would be unusable after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.torch_private import HEAVY_MODULES

MODULES = (*HEAVY_MODULES, "paceline.run.loop", "paceline.launcher.as_torch")
"""What a training imports anyway."""
REQUEST_BYTES = 2**20
_PR_SET_CHILD_SUBREAPER = 36


class TemplateError(Exception):
    """The template is gone."""


@dataclass
class Forked:
    """A worker that the template forks: to the launcher a child like any other."""

    pid: int = 0
    """0 until the template has answered."""
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code has waited for it
                pid, status = self.pid, 255 << 8
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Template:
    """The launcher's side."""

    def __init__(self, python: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it, as `python` says how Python is started; it imports while others work."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self.is_ready = False
        """Whether it has imported everything, so that it answers at once."""
        self.is_gone = False
        self._asked = 0
        self._forked = Forked()
        """What it was last asked for."""
        self._leads_group = False
        self._go = -1
        """Where the worker that it was asked for waits for a word."""
        with theirs:
            self._process = subprocess.Popen(
                [*python, __file__, str(theirs.fileno()), str(os.getpid())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
        *,
        leads_group: bool,
    ) -> Forked:
        """Ask for a worker that runs `arguments`, as `worker.main` takes them; one at a time.

        `descriptors` of this process, by the number that the worker shall have them under. One that
        was asked for before and not answered is given up.
        """
        self.give_up()
        self._asked += 1
        request = {
            "number": self._asked,
            "arguments": list(arguments),
            "environment": dict(environment),
            "numbers": list(descriptors),
        }
        waits, self._go = os.pipe()
        # Not for longer: of all that a script starts and forgets, the launcher would have to bury
        # the dead, which are init's.
        _adopt_orphans(True)
        try:
            data = json.dumps(request).encode()
            socket.send_fds(self._channel, [data], [*descriptors.values(), waits])
        except OSError as error:
            self.give_up()
            raise TemplateError(str(error)) from error
        finally:
            os.close(waits)
        self._forked, self._leads_group = Forked(), leads_group
        return self._forked

    def answer(self) -> Forked | None:
        """The worker that was asked for; None if nothing new was said of it.

        Raises OSError where it cannot be forked, and TemplateError if the template is gone.
        """
        try:
            data = self._channel.recv(64)
        except BlockingIOError:
            return None
        except OSError as error:
            raise TemplateError(str(error)) from error
        if not data:
            raise TemplateError("it has ended")
        number, pid = map(int, data.split())
        self.is_ready = True
        if number != self._asked or self._go < 0:
            return None
        if pid < 0:
            self.give_up()
            raise OSError(-pid, os.strerror(-pid))
        self._forked.pid = pid
        if self._leads_group:  # before it runs: a signal to its group would go nowhere
            with contextlib.suppress(OSError):  # it has ended already
                os.setpgid(pid, pid)
        os.write(self._go, b"!")
        self.give_up()
        return self._forked

    def give_up(self) -> None:
        """A worker that waits for a word ends now."""
        if self._go >= 0:
            os.close(self._go)
            self._go = -1
            _adopt_orphans(False)

    def close(self) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        self.give_up()
        self._channel.close()
        self._process.kill()
        self._process.wait()


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


def main(channel_fd: int, launcher: int) -> None:
    """The template's side: fork whatever is asked for, until the launcher is gone."""
    from paceline.launcher.worker import die_with

    die_with(launcher)
    channel = socket.socket(fileno=channel_fd)
    gc.disable()  # nearly all of what imports make stays: looking through it costs a fifth of them
    with warnings.catch_warnings():
        # torch warns on import where NumPy is missing; a script that needs it gets an error.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        for name in MODULES:
            __import__(name)
    gc.collect()
    channel.send(b"0 0")
    gc.freeze()  # what was imported is not looked at again, so its pages stay shared
    gc.enable()
    while True:
        data, fds, flags, _ = socket.recv_fds(channel, REQUEST_BYTES, 64)
        if not data:
            return
        request = json.loads(data)
        if flags & socket.MSG_CTRUNC:  # not all of them could be opened here
            pid = -errno.EMFILE
        else:
            pid = _fork_twice(channel, request, fds, launcher)
        channel.send(b"%d %d" % (request["number"], pid))
        for fd in fds:
            os.close(fd)


def _fork_twice(
    channel: socket.socket, request: dict[str, Any], fds: list[int], launcher: int
) -> int:
    """Fork a worker whose parent ends at once; its number, or that of an error, negative."""
    try:
        reader, writer = os.pipe()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)
    try:
        between = os.fork()
    except OSError as error:
        os.write(writer, b"%d" % -(error.errno or errno.EAGAIN))
    else:
        if between == 0:
            between = os.getpid()
            try:
                worker = os.fork()
            except OSError as error:
                worker = -(error.errno or errno.EAGAIN)
            if worker:
                os.write(writer, b"%d" % worker)
                os._exit(0)
            channel.close()
            os.close(reader)
            os.close(writer)
            become_worker(request, fds, launcher, between)
        os.waitpid(between, 0)  # from now on the worker is the launcher's child
    os.close(writer)
    with open(reader, "rb") as answer:
        return int(answer.read() or -errno.EAGAIN)


def become_worker(request: dict[str, Any], fds: list[int], launcher: int, between: int) -> NoReturn:
    """Be what a new interpreter would be that runs the worker's file, once the launcher says so.

    The parent is the process in `between`, then the launcher; any other one if that has ended.
    """
    from paceline.launcher import worker

    code: object = 1
    try:
        go = fds.pop()
        if not os.read(go, 1):
            os._exit(0)
        os.close(go)
        _move(fds, request["numbers"])
        while (parent := os.getppid()) != launcher:
            if parent != between:
                os._exit(0)
            time.sleep(0.0002)
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
        # Under its real name: what it forks imports from it. And not from this folder, whose place
        # a worker gives to its script's; taken away, that would be the first of PYTHONPATH.
        if not sys.flags.safe_path:
            sys.path[0] = __file__
        from paceline.launcher import template

        template.main(int(sys.argv[1]), int(sys.argv[2]))
