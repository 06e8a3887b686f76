"""How a rank ends: its last words, letting go of its group, and which error is the real one.

When one rank fails, the others fail too, a moment later and with a less useful error. A test
should show the first real one.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator
from types import FunctionType, TracebackType
from typing import Any

import torch

from paceline.group import post_last_words
from paceline.launcher import is_secondary

_collecting = threading.Lock()


def say_last_words(group: Any, error: BaseException | None = None) -> None:
    """Tell the peers, through the group's store, how this rank ended.

    A rank that only lost its peers says nothing: what they want to know is who went first.
    """
    if error is None:
        post_last_words(group, "finished and left", kind="left")
    elif not is_secondary(error):
        post_last_words(group, f"raised {summary(error)}", kind="raised")


def summary(error: BaseException) -> str:
    """The error in one line that is not too long: its type and how its message begins."""
    first_line, _, _ = str(error).partition("\n")
    name = type(error).__name__
    return f"{name}: {first_line[:1000]}" if first_line else name


def let_go(error: BaseException) -> None:
    """Make an error, and all errors it came from, hold nothing but what it says and where.

    Gloo's sockets close when the last reference to a group goes. A traceback holds frames, and
    frames hold variables and, even when cleared, the functions they ran with what those close over.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = _printable_copy(one.__traceback__)
        if isinstance(one, AttributeError):
            one.obj = None  # whatever lacked the attribute
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def _printable_copy(original: TracebackType | None) -> TracebackType | None:
    """A traceback with the same files, names and lines, whose frames are empty."""
    copy: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(original))):
        code = _nothing.__code__.replace(
            co_filename=frame.f_code.co_filename,
            co_name=frame.f_code.co_name,
            co_qualname=frame.f_code.co_qualname,
            co_firstlineno=frame.f_code.co_firstlineno,
        )
        names = {"__name__": frame.f_globals.get("__name__", "")}
        copy = TracebackType(copy, FunctionType(code, names)().gi_frame, -1, line)
    return copy


def _nothing() -> Iterator[None]:
    """A generator, because the frame of one that never ran knows no caller, so it holds nobody."""
    yield


def drop_unfinished_backward() -> None:
    """Free what a backward that failed left queued on this thread: its nodes hold parameters,
    those hold hooks, and those may hold a group. The next backward clears the queue."""
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def collect_garbage(generation: int = 2) -> None:
    """Free reference cycles, one thread at a time: a second collector would return at once."""
    with _collecting:
        gc.collect(generation)
