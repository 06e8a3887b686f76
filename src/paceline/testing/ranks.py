"""Ranks as threads: a whole world in one process, in milliseconds; and ending a rank cleanly.

Every thread has its own real process group, Gloo over loopback sockets, so collectives, their order
and their failures are real. Threads share the process: torch's global random state, default dtype
and environment. A crash needs `run_processes`.

When one rank fails, the others fail a moment later with a less useful error. A test should show the
primary one.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FunctionType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from paceline import env
from paceline.errors import UsageError, WorkerError, check_whole, summarize
from paceline.group import World, post_last_words
from paceline.launcher import is_secondary
from paceline.torch_private import HashStore, Store, unregistered_gloo_group

_collecting = threading.Lock()


def say_last_words(group: Any, error: BaseException | None = None) -> None:
    """Report to the peers, through the group's store, how this rank ended.

    A rank that only lost a peer reports nothing: the peers need the rank that failed first.
    """
    if error is None:
        post_last_words(group, "finished and left", kind="left")
    elif not is_secondary(error):
        post_last_words(group, f"raised {summarize(error)}", kind="raised")


def strip_references(error: BaseException) -> None:
    """Remove all references from an error, and from all its causes, but messages and locations.

    Gloo's sockets close when the last reference to a group is dropped. A traceback refers to
    frames, and frames to variables and, even when cleared, to their functions and their closures.
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
    """A generator: the frame of one that never ran refers to no caller, so it keeps none alive."""
    yield


def drop_unfinished_backward() -> None:
    """Free the graph that a failed backward left queued on this thread: it refers to parameters,
    their hooks, and so to a group. The next backward clears the queue."""
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def collect_garbage(generation: int = 2) -> None:
    """Free reference cycles, one thread at a time: a second collector would return at once."""
    with _collecting:
        gc.collect(generation)


# A rank that waits in a collective gets its own timeout error first, however late it began to wait
# on a busy machine, and then time to end.
_GRACE_S = 10.0


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run `body(world, *args)` on `size` ranks, each a thread, and return the results by rank.

    A collective waits for `timeout_s`; a rank is given up 10 s later.

    When a rank raises, the first primary error is raised here, with a note that names the rank.
    With `return_exceptions`, errors are returned in the list instead.
    """
    check_size(size, timeout_s)
    store = HashStore()
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}  # in the order in which they happened

    def run_rank(rank: int) -> None:
        try:
            group = gloo_group(store, rank, size, timeout_s)
            await_all_connected(store, size, timeout_s)
        except BaseException as error:
            strip_references(error)
            errors[rank] = error
            return
        try:
            results[rank] = body(testing_world(rank, size, group), *args)
            say_last_words(group)
        except BaseException as error:
            errors[rank] = error
            say_last_words(group, error)
            strip_references(error)
            drop_unfinished_backward()
        # Peers that wait for this rank fail at once when its sockets close. They close with the
        # last reference to the group, which may be in a cycle (a module and its hooks).
        reference = weakref.ref(group)
        del group  # by name, because the error's traceback keeps this frame
        for generation in range(3):
            if reference() is None:
                break
            collect_garbage(generation)

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank} of {size}", daemon=True)
        for rank in range(size)
    ]
    limit_s = timeout_s + _GRACE_S
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            errors.setdefault(rank, _still_running(rank, thread, limit_s))
    if not errors or return_exceptions:
        return [errors[rank] if rank in errors else results[rank] for rank in range(size)]
    error = _primary_error(errors)
    try:
        raise error
    finally:
        errors.clear()
        results.clear()
        del error  # the traceback keeps this frame


def check_size(size: int, timeout_s: float) -> None:
    """Refuse a world without ranks and a timeout that is not positive."""
    check_whole("size", size)
    if not timeout_s > 0:
        raise UsageError(f"timeout_s is {timeout_s!r}.", advice="Pass a number above 0.")


def testing_world(rank: int, size: int, group: Any) -> World:
    """The `World` that a rank of a test gets."""
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        group=group,
        source="paceline.testing",
    )


def gloo_group(store: Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """A process group over loopback, in no registry of torch's."""
    name = env.loopback_interface()
    where = {"interface": name} if name else {"hostname": env.LOOPBACK}
    device = dist.ProcessGroupGloo.create_device(**where)
    return unregistered_gloo_group(store, rank, size, timeout_s, device, threads=2)


def await_all_connected(store: Store, size: int, timeout_s: float) -> None:
    """Wait until every rank has built its group: a peer that left earlier would block the rest.

    Through the store and not with a barrier, which would fail on a rank that is slow to leave it.
    """
    if store.add("connected", 1) == size:
        store.set("all connected", "yes")
    store.wait(["all connected"], timedelta(seconds=timeout_s))


def _primary_error(errors: dict[int, BaseException]) -> BaseException:
    ranks = sorted(errors, key=lambda rank: is_secondary(errors[rank]))  # stable: keeps the order
    error = errors[ranks[0]]
    error.add_note(f"rank {ranks[0]} raised this")
    for rank in ranks[1:]:
        error.add_note(f"rank {rank} then raised {summarize(errors[rank])}")
    return error


def _still_running(rank: int, thread: threading.Thread, limit_s: float) -> WorkerError:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
    where = stack.strip().rpartition('  File "')[2]
    return WorkerError(
        f"Rank {rank} is still running after {limit_s:g} s.",
        f'It is at "{where}' if where else "",
        "A thread cannot be ended from outside: it stays until it returns.",
        rank=rank,
        traceback=stack,
    )
