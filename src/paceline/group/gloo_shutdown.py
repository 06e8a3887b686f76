"""How a process ends: when torch's threads have let go of the last collective's tensors.

Gloo's threads need the interpreter for that. One that is waiting for it at the moment Python begins
to take the interpreter apart is ended by force, inside code that may not be left that way: the
process aborts ("terminate called without an active exception"), and its exit code is lost. A
thread that comes later finds the interpreter gone and continues without it. So all that is needed
is a moment before, in which Python gives way until those threads stand still.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_THREAD_NAME = "pt_gloo_runloop"
_LOOK_S = 0.001
_PATIENCE_S = 1.0
"""A collective that nobody waits for may still be computing; it is left to itself then."""
_BLIND_WAIT_S = 0.02
"""Where the kernel does not tell what threads do."""


def give_way_at_exit() -> None:
    """Let torch's threads finish before Python takes the interpreter apart, once per process."""
    pid = os.getpid()
    if pid not in _registered:  # a forked child has its parent's
        _registered.add(pid)
        atexit.register(_give_way, pid)


_registered: set[int] = set()


def _give_way(pid: int) -> None:
    if os.getpid() != pid:
        return  # threads do not survive a fork
    with contextlib.suppress(KeyboardInterrupt):
        wait_for_rest()


def wait_for_rest() -> bool:
    """Give way until all of Gloo's threads stand still; False if some do not within a second."""
    if not _TASKS.is_dir():
        time.sleep(_BLIND_WAIT_S)
        return True
    deadline = time.monotonic() + _PATIENCE_S
    before = _look()
    while before:
        time.sleep(_LOOK_S)  # whoever waits for the interpreter gets it now
        now = _look()
        if now == before and all(state == "S" for state, _ in now.values()):
            return True
        if time.monotonic() > deadline:
            return False
        before = now
    return True


def _look() -> dict[str, tuple[str, str]]:
    """State, and how often it went to sleep, of each of Gloo's threads by its id."""
    found: dict[str, tuple[str, str]] = {}
    for task in os.listdir(_TASKS):
        try:
            text = (_TASKS / task / "status").read_text()
        except OSError:
            continue  # it has ended
        lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if lines["Name"].strip() == _THREAD_NAME:
            sleeps = lines.get("voluntary_ctxt_switches", "").strip()
            found[task] = lines["State"].split()[0], sleeps
    return found
