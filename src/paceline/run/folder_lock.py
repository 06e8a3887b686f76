"""One run at a time in a folder: two would mix their checkpoints, and each go on from the other's.

The lock is the kernel's and goes with the process, so a killed run leaves nothing to clean up.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from paceline.errors import UsageError
from paceline.observe.run_folder import RunFolder

FILE_NAME = ".lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Tenancy:
    """The right of this process to write into a run folder.

    A record lock and not `flock`: that one would be inherited by the processes that load data,
    which outlive a killed training by seconds, in which it may be started again. So two runs in one
    process are not told from one another.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._file: int | None = None

    def take(self) -> None:
        """Raise if another process has the folder. Where nothing can be locked, go on without."""
        if self._file is not None:
            return
        try:
            file = os.open(self._folder.path / FILE_NAME, _FLAGS, 0o600)
        except OSError:  # a read-only or a full disk: nobody else can write there either
            return
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.pread(file, 20, 0).decode("ascii", "replace").strip()
            os.close(file)
            raise UsageError(
                f"The folder {self._folder.path} is in use: process {owner or 'unknown'} trains "
                "there.",
                advice="Wait until it has ended, or choose another folder.",
            ) from None
        except OSError:  # a network drive without locks
            os.close(file)
            return
        with suppress(OSError):
            os.truncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
        self._file = file

    def give_up(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __del__(self) -> None:
        self.give_up()
