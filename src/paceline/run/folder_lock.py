"""One run at a time in a run folder, as long as its process lives."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

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
        """Raise if another process has the folder. Where nothing can be locked, train without."""
        if self._file is not None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        # A read-only or a full disk, and a network drive without locks: no process can be kept out.
        with suppress(OSError):
            file = self._file = os.open(self._folder.path / ".lock", flags, 0o600)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.truncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
            except (BlockingIOError, PermissionError):
                owner = os.pread(file, 20, 0).decode("ascii", "replace").strip()
                self.give_up()
                raise UsageError(
                    f"The folder {self._folder.path} is in use: process {owner or 'unknown'} "
                    "trains there.",
                    advice="Wait until it has ended, or choose another folder.",
                ) from None

    def give_up(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.give_up()
