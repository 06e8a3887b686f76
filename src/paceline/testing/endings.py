"""How a rank ends: its last words, letting go of its group, and which error is the real one.

When one rank fails, the others fail too, a moment later and with a less useful error. A test
should show the first real one.
"""

from __future__ import annotations

import gc
import re
import threading
import traceback
from typing import Any

import torch.distributed as dist

from paceline import comm
from paceline.errors import PeerError

_CONNECTION_WORDS = re.compile(
    r"gloo|connection (closed|reset|refused)|broken pipe|timed out waiting|socket timeout", re.I
)
_collecting = threading.Lock()


def is_secondary(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    return type(error) is RuntimeError and bool(_CONNECTION_WORDS.search(str(error)))


def say_last_words(group: Any, error: BaseException | None = None) -> None:
    """Tell the peers, through the group's store, how this rank ended.

    A rank that only lost its peers says nothing: what they want to know is who went first.
    """
    if error is None:
        comm.post_last_words(group, "finished and left", kind="left")
    elif not is_secondary(error):
        comm.post_last_words(group, f"raised {summary(error)}", kind="raised")


def summary(error: BaseException) -> str:
    """The error in one line: its type and the first line of its message."""
    first_line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def clear_frames(error: BaseException) -> None:
    """Drop the local variables that an error and all errors it came from keep alive.

    Gloo's sockets close when the last reference to a group goes, and frames hold groups.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def collect_garbage(generation: int = 2) -> None:
    """Free reference cycles, one thread at a time: a second collector would return at once."""
    with _collecting:
        gc.collect(generation)
