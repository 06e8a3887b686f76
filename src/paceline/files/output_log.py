"""What a run's processes print, kept in its folder as `logs/output.log`. Starts without torch."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from paceline.errors import WireError
from paceline.files.run_folder import (
    LINE_LIMIT_BYTES,
    Event,
    RunFolder,
    make_private,
    open_plain,
    open_private,
)

LOG_LIMIT_BYTES, LOG_WAITING = 2**26, 1000
"""The largest output log, and the most lines that are kept while its folder is unknown."""
_LOG_LINE = re.compile(r"(\d{1,12}\.\d{3}) (-|\d{1,6}) (.*)", re.DOTALL)
_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|_[^\x1b]*\x1b\\)")


class OutputLog:
    """The output of a run's processes, in its folder, each line with its time and worker.

        1763280000.123 2 what worker 2 has printed
        1763280000.456 - what the launcher has printed, or a worker for all

    Lines are kept until the folder is known. Nothing here raises: a disk that fails must not stop a
    training.
    """

    def __init__(self, find_folder: Callable[[], str]) -> None:
        """`find_folder` returns the path of the run folder, "" while it is unknown."""
        self._find_folder, self._find_due_s = find_folder, 0.0
        self._waiting: list[bytes] = []
        self._file = -1

    def add(self, lines: Iterable[tuple[int | None, bytes]]) -> None:
        t = time.time()
        for rank, line in lines:
            who = b"-" if rank is None else b"%d" % rank
            self._waiting.append(b"%.3f %s %s\n" % (t, who, line))
        if self._file >= 0 or time.monotonic() >= self._find_due_s:
            self.flush()
        del self._waiting[:-LOG_WAITING]

    def flush(self) -> None:
        """Write the waiting lines, if the folder is known."""
        # As long as the folder is unknown, every line would look for it.
        self._find_due_s = time.monotonic() + 1.0
        with suppress(OSError):
            if self._file < 0 and (path := self._find_folder()):
                folder = RunFolder(path)
                make_private(folder.logs)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._file = open_private(str(folder.output), flags)
            if self._file >= 0:
                if os.fstat(self._file).st_size < LOG_LIMIT_BYTES:
                    os.write(self._file, b"".join(self._waiting))
                self._waiting.clear()

    def close(self) -> None:
        self.flush()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_log(
    folder: RunFolder, most: int, *, tail_bytes: int = LOG_LIMIT_BYTES, wanted: str = ""
) -> list[Event]:
    """The last lines of the output that contain `wanted`, each with `t`, `rank` and `text`.

    The rank is None for lines of the launcher, or of a worker for all.
    """
    found, searched = deque[Event](maxlen=most), wanted.lower()
    if folder.logs.is_symlink():
        return []
    with suppress(OSError, WireError), open_plain(folder.output) as file:
        if (begin := file.seek(0, os.SEEK_END) - tail_bytes) > 0:
            file.seek(begin)
            file.readline(LINE_LIMIT_BYTES)
        else:
            file.seek(0)
        while line := file.readline(LINE_LIMIT_BYTES):
            match = _LOG_LINE.fullmatch(line.rstrip(b"\n").decode(errors="replace"))
            text = _COLOUR.sub("", match[3]) if match else ""
            if match and searched in text.lower():
                rank = None if match[2] == "-" else int(match[2])
                found.append({"t": float(match[1]), "rank": rank, "text": text})
    return list(found)
