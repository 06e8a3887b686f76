"""The end of a process: last words for the others, and a moment for torch's threads to end."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from paceline.errors import PeerError, message_of
from paceline.group.collectives import has_aborted_device, post_last_words, settle_device


def announce_exit() -> None:
    """Leave last words in the default group when this process ends."""
    give_way_at_exit()  # registered first, so it comes last
    if not _announced:
        _announced.append(True)
        atexit.register(_say_goodbye, os.getpid())


_announced: list[bool] = []


def _say_goodbye(pid: int) -> None:
    if os.getpid() != pid or not dist.is_initialized():
        return  # a forked child must not speak on its parent's connection
    # Python sets it where an exception ends the program.
    error = getattr(sys, "last_value", None)
    if error is None:
        try:
            settle_device()
        except PeerError as lost:
            # The parameters are not a result, and only the exit code can still say so.
            print(f"PeerError: {lost}", file=sys.stderr)
    text = f"raised {type(error).__name__}: {message_of(error)}" if error else "ended its program"
    post_last_words(dist.group.WORLD, text, kind="raised" if error else "left")
    if has_aborted_device():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


_TASKS = Path("/proc/self/task")
_THREAD_NAME = "pt_gloo_runloop"
_REST_LOOK_S = 0.001
_REST_PATIENCE_S = 1.0
"""A collective that is not waited for may still be computing; it is left to itself then."""
_BLIND_WAIT_S = 0.02
"""Where the kernel does not tell what threads do."""


def give_way_at_exit() -> None:
    """Let torch's threads finish before Python takes the interpreter apart, once per process."""
    # Gloo's threads need the interpreter to let go of the last collective's tensors. One that waits
    # for it at the moment Python begins to take the interpreter apart is ended by force, inside
    # code that may not be left that way: the process aborts ("terminate called without an active
    # exception"), and its exit code is lost. A thread that comes later finds the interpreter gone
    # and continues without it. So all that is needed is a moment before, in which Python gives way
    # until those threads stand still.
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
    deadline = time.monotonic() + _REST_PATIENCE_S
    before = _look()
    while before:
        time.sleep(_REST_LOOK_S)  # a thread that waits for the interpreter gets it now
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
