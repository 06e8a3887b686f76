"""The last witness: a process that outlives a killed launcher just long enough to clean up.

The kernel kills workers whose launcher dies, but not the processes those workers have started.
The sentinel reads the workers' process groups from a pipe that only the launcher holds open; when
the pipe ends and groups are left, it kills them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings


class Sentinel:
    """A forked process that knows every worker's process group."""

    def __init__(self) -> None:
        reader, self.writer = os.pipe()
        with warnings.catch_warnings():
            # Python warns of threads at a fork; this child touches no lock of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, signal.SIG_IGN)
                os.setpgid(0, 0)  # a signal to the launcher's group is not for us
                _close_all_but(reader)
                _stand_guard(reader)
            finally:
                os._exit(0)
        os.close(reader)

    def add(self, group: int) -> None:
        self._say(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._say(f"-{group}\n")

    def close(self) -> None:
        """Dismiss it. Groups that were not removed are killed."""
        os.close(self.writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # somebody killed it: the kernel still does its part
            os.write(self.writer, line.encode())


def _stand_guard(reader: int) -> None:
    groups: set[int] = set()
    with open(reader) as lines:
        for line in lines:
            change = groups.add if line.startswith("+") else groups.discard
            change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def _close_all_but(keep: int) -> None:
    """Let go of everything inherited, so that no pipe stays open because of us."""
    for name in os.listdir("/dev/fd"):
        if int(name) != keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
