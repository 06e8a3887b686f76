"""The end of a run, written into its folder by a process that outlives the run."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Literal

from paceline.files.run_folder import (
    INFO_LIMIT_BYTES,
    EventWriter,
    RunFolder,
    find_info,
    last_recorded_step,
    open_private,
    write_info,
)


def record_end(
    folder: RunFolder,
    status: Literal["stopped", "failed"],
    reason: str,
    *,
    worker: int = -1,
    step: int = 0,
    traceback: str = "",
) -> None:
    """Record in a run's folder why it ended, for a run that could not do so itself.

    A "stopped" does not replace the end of a run that has ended by itself.
    """
    info = find_info(folder)
    if info is None or (status == "stopped" and info.status != "running"):
        return
    is_new = (info.status, info.reason) != (status, reason)
    if is_new:
        applied = max(info.step, last_recorded_step(folder))
        info = replace(info, status=status, reason=reason, step=applied, updated=time.time())
    if worker >= 0:
        info = replace(info, failed_worker=worker, failed_step=step or None)
    # `run.json` first: replacing it works on a full disk too.
    write_info(folder, replace(info, traceback=folder.errors.name if traceback else ""))
    if traceback:
        keep_traceback(folder, reason, traceback)
    if is_new:
        with EventWriter(folder, max(worker, 0)) as events:
            events.write("stop", step=info.step, reason=reason)


def keep_traceback(folder: RunFolder, reason: str, text: str) -> None:
    """Append a traceback to `errors.txt`, unless that file has reached its limit."""
    file = open_private(str(folder.errors), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        if os.fstat(file).st_size < INFO_LIMIT_BYTES:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(file, f"{when} {reason}\n{text.rstrip()}\n\n".encode("utf-8", "replace"))
    finally:
        os.close(file)
