"""One rank's process, from the inside: join the group, run the function, send what came of it.

The fork server imports this module once, so that a worker starts with everything loaded.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from paceline import env
from paceline.comm import codec
from paceline.comm.world import World
from paceline.testing.endings import is_secondary, say_last_words, summary
from paceline.testing.faults import Faults
from paceline.testing.ranks import await_all_connected

# A worker that gets this writes down where it is.
STACK_SIGNAL = signal.SIGUSR1

_TRACEBACK_LIMIT_CHARS = 100_000
_PR_SET_PDEATHSIG = 1

Name = tuple[str, str]
"""A function's module and its name there."""

Argument = bytes | Name | Faults
"""An argument on its way: `wire` bytes, a function by name, or a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What every worker of one call is told."""

    function: Name
    args: list[Argument]
    size: int
    folder: str
    timeout_s: float
    environ: Mapping[str, str] = field(repr=False)

    def stack_path(self, rank: int) -> Path:
        return Path(self.folder, f"stack{rank}")


def work(rank: int, call: Call, writer: Connection) -> None:
    """Be rank `rank` of `call`, and send one message through `writer` at the end."""
    _die_with_caller()
    stack_file = call.stack_path(rank).open("w")  # open until the end, for the fault handler
    faulthandler.enable(stack_file, all_threads=False)
    faulthandler.register(STACK_SIGNAL, stack_file, all_threads=False)
    os.environ.clear()
    os.environ.update(call.environ)
    env.keep_gloo_on_loopback()
    torch.set_num_threads(1)
    group = None
    try:
        store = FileStore(os.path.join(call.folder, "store"), call.size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=call.size,
            timeout=timedelta(seconds=call.timeout_s),
        )
        group = dist.group.WORLD
        await_all_connected(store, call.size, call.timeout_s)
        world = World(
            rank=rank,
            size=call.size,
            local_rank=rank,
            local_size=call.size,
            group=group,
            source="paceline.testing",
        )
        function, args = _find(call.function), [_unpacked(arg) for arg in call.args]
        result = function(world, *args)
        message = codec.encode({"ok": True, "at": time.monotonic(), "result": result})
        say_last_words(group)
    except BaseException as error:
        message = codec.encode(
            {
                "ok": False,
                "at": time.monotonic(),
                "echo": is_secondary(error),
                "summary": summary(error),
                "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT_CHARS:],
            }
        )
        if group is not None:
            say_last_words(group, error)
    _send(writer, message)
    if group is not None and dist.is_initialized():
        del group
        dist.destroy_process_group()


def _unpacked(arg: Argument) -> Any:
    if isinstance(arg, Faults):
        return arg
    return codec.decode(arg) if isinstance(arg, bytes) else _find(arg)


def _find(name: Name) -> Any:
    found: Any = importlib.import_module(name[0])
    for part in name[1].split("."):
        found = getattr(found, part)
    return found


def _send(writer: Connection, message: bytes) -> None:
    with writer:
        left = memoryview(message)
        while left:
            left = left[os.write(writer.fileno(), left) :]


def _die_with_caller() -> None:
    """End with the process that asked for this worker, whatever it dies of.

    The kernel ends a worker with the fork server, and the server ends when the caller's end of its
    `alive` pipe closes. Every worker inherits that end too, and would keep its own parent alive.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    elif caller := multiprocessing.parent_process():
        watch = threading.Thread(target=_kill_self_after, args=(caller.sentinel,), daemon=True)
        watch.start()


def _kill_self_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
