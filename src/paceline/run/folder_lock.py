"""One run at a time in a run folder, as long as its process lives."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from paceline import env
from paceline.errors import UsageError
from paceline.files import RunFolder


class FolderLock:
    """One run at a time in a folder: two would mix their checkpoints."""

    # The lock is the kernel's and goes with the process, so a killed run leaves nothing to clean
    # up. A record lock and not `flock`: that one would be inherited by the processes that load
    # data, which outlive a killed training by seconds, in which it may be started again. So two
    # runs in one process are not told from one another.

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._file: int | None = None

    def take(self) -> None:
        """Raise if another process has the folder. Where nothing can be locked, train without.

        Wait for one of the same launcher: in a script with several runs, who does the rest of a
        lost worker's comes to the next run while the others train in it, or before they do.
        """
        if self._file is not None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        # A read-only or a full disk, and a network drive without locks: no process can be kept out.
        with suppress(OSError):
            file = self._file = os.open(self._folder.path / ".lock", flags, 0o600)
            try:
                self._lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.pread(file, 20, 0).decode("ascii", "replace").strip()
                if _is_colleague(owner):
                    self._lock(file, fcntl.LOCK_EX)
                    return
                self.give_up()
                raise UsageError(
                    f"The folder {self._folder.path} is in use: process {owner or 'unknown'} "
                    "trains there.",
                    advice="Wait until it has ended, or choose another folder.",
                ) from None

    def _lock(self, file: int, how: int) -> None:
        fcntl.lockf(file, how)
        os.truncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)

    def give_up(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.give_up()


def _is_colleague(owner: str) -> bool:
    """Whether a process is a worker of the launcher that has started this one."""
    try:
        stat = Path(f"/proc/{int(owner)}/stat").read_text()
    except (OSError, ValueError):
        return False
    parent = int(stat.rpartition(")")[2].split()[1])
    return env.read_launched().hears_of_failures and parent == os.getppid()
