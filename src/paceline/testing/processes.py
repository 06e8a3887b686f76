"""Ranks as processes: for crashes, signals, memory and anything global to a process.

A fork server that has imported torch and this module once forks a process per rank in milliseconds.
Functions are passed by name, arguments as bytes of `files.codec`, and so are results, which each
worker writes to a file at its end. Whatever happens, no process is left.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from paceline import env
from paceline.errors import UsageError, WorkerError, summarize
from paceline.files import decode, encode
from paceline.group import has_aborted_device, settle_device
from paceline.launcher import die_with, is_secondary, signal_name
from paceline.testing.ranks import (
    await_all_connected,
    check_size,
    say_last_words,
    testing_world,
)
from paceline.torch_private import HEAVY_MODULES, FileStore

_PRELOAD = ["torch", *HEAVY_MODULES, "paceline.run", "paceline.testing"]
# How long a secondary error, which only reports a lost peer, waits for the primary one.
_SECONDARY_S = 2.0
# On this signal a worker writes its stack to a file, within so many seconds.
_STACK_SIGNAL, _STACK_S = signal.SIGUSR1, 0.5
_TRACEBACK_LIMIT_CHARS = 100_000

Argument = bytes | str
"""An encoded argument: bytes of the codec, or a function as `module:name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCall:
    """The arguments that every worker of one call gets."""

    function: str
    args: list[Argument]
    size: int
    folder: str
    timeout_s: float
    backend: str
    environ: Mapping[str, str] = field(repr=False)

    def path(self, what: str, rank: int) -> Path:
        """The file for a rank's `stack` or `message`."""
        return Path(self.folder, f"{what}{rank}")


def run_processes(
    size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    return_exceptions: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """Run `fn(world, *args)` on `size` ranks, each a fresh process, and return the results by rank.

    The group is torch's default one, of `backend`; with NCCL the ranks share the GPUs. `fn`, and
    arguments that are functions, must be importable; other arguments and results are values that
    `files.codec` supports. A rank that raises, dies or exits early ends the others and becomes a
    WorkerError; with `return_exceptions` the others run on, and errors are returned in the list.
    """
    check_size(size, timeout_s)
    call = WorkerCall(
        function=_name_of(fn, "fn"),
        args=[
            _name_of(arg, f"args[{i}]") if callable(arg) else encode(arg)
            for i, arg in enumerate(args)
        ],
        size=size,
        folder=tempfile.mkdtemp(prefix="paceline-"),  # 0700
        timeout_s=timeout_s,
        backend=backend,
        environ=dict(os.environ),
    )
    workers: list[_RankProcess] = []
    try:
        for rank in range(size):
            workers.append(_RankProcess(rank, call))
        _watch(workers, timeout_s, stop_at_first=not return_exceptions)
        failed = sorted((w for w in workers if w.error), key=lambda w: (w.is_secondary, w.ended_at))
        if failed and failed[0].error and not return_exceptions:
            raise failed[0].error
        return [worker.error or worker.result for worker in workers]
    finally:
        for worker in workers:
            worker.close()
        shutil.rmtree(call.folder, ignore_errors=True)


class _RankProcess:
    """One rank's process, seen from outside."""

    def __init__(self, rank: int, call: WorkerCall) -> None:
        self.rank = rank
        self.result: Any = None
        self.error: WorkerError | None = None
        self.is_secondary = False
        """Whether the error only reports that another rank is gone."""
        self.ended_at = math.inf
        self._call = call
        # Test modules import pytest, and importing it in every worker would take longer than the
        # rest of its start.
        preload = [*_PRELOAD, "pytest"] if "pytest" in sys.modules else _PRELOAD
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload)
        self._process: ForkServerProcess = context.Process(
            target=_work, args=(rank, call), name=f"rank {rank} of {call.size}"
        )
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self.ended_at == math.inf

    @property
    def sentinel(self) -> int:
        """The handle on which `wait` waits for the end of the process."""
        return self._process.sentinel

    def check_exit(self) -> None:
        """Record how the process ended, if it has."""
        exitcode = self._process.exitcode
        if exitcode is None:
            return
        self.ended_at = time.monotonic()
        message = None
        with suppress(FileNotFoundError):  # killed before it wrote its message
            message = decode(self._call.path("message", self.rank).read_bytes())
        if message is not None and not message["ok"]:
            self.ended_at, self.is_secondary = message["at"], message["is_secondary"]
            self._fail(f"raised {message['summary']}", message["traceback"])
        elif message is None or exitcode != 0:
            when = "before" if message is None else "after"
            how = f"exited with code {exitcode}"
            if exitcode < 0:
                how = f"was killed by {signal_name(-exitcode)}"
            self._fail(f"{how} {when} it finished.", self._written_stack())
        else:
            self.ended_at, self.result = message["at"], message["result"]

    def expire(self) -> None:
        """Record a timeout for a process that is still running, with its stack."""
        self.ended_at = time.monotonic()
        stack = self._ask_for_stack()
        has_finished = self._call.path("message", self.rank).exists()
        did = "had finished but did not end" if has_finished else "was still running"
        self._fail(f"{did} after {self._call.timeout_s:g} s and was killed.", stack)

    def _fail(self, how: str, stack: str) -> None:
        self.error = WorkerError(
            f"Rank {self.rank} {how}",
            f"Where it was:\n{stack}" if stack else "It did not say where it was.",
            rank=self.rank,
            traceback=stack,
        )

    def close(self) -> None:
        """Kill the process if it still runs, and free everything it used here."""
        if self._process.exitcode is None:
            self._process.kill()  # also ends a stopped one
        self._process.join()
        self._process.close()

    def _ask_for_stack(self) -> str:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, _STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_S
        stack, before = "", None
        while time.monotonic() < deadline and (not stack or stack != before):
            wait([self._process.sentinel], 0.01)
            stack, before = self._written_stack(), stack  # twice the same: it is complete
        return stack

    def _written_stack(self) -> str:
        """The stack that the worker's fault handler wrote, at a crash or on the signal."""
        with suppress(OSError):
            return self._call.path("stack", self.rank).read_text(errors="replace").strip()
        return ""


def _watch(workers: list[_RankProcess], timeout_s: float, *, stop_at_first: bool) -> None:
    """Wait until all workers have ended, time is up, or a primary failure ends the call."""
    deadline = time.monotonic() + timeout_s
    while running := [worker for worker in workers if worker.is_running]:
        failed = [worker for worker in workers if worker.error]
        if stop_at_first and failed:
            if not all(worker.is_secondary for worker in failed):
                return
            deadline = min(deadline, min(worker.ended_at for worker in failed) + _SECONDARY_S)
        left = deadline - time.monotonic()
        if left <= 0:
            if not (stop_at_first and failed):
                for worker in running:
                    worker.expire()
            return
        wait([worker.sentinel for worker in running], left)
        for worker in running:
            worker.check_exit()


def _name_of(function: Callable[..., Any], what: str) -> str:
    """The `module:name` by which another process can import a function."""
    name = ":".join(getattr(function, each, "") for each in ("__module__", "__qualname__"))
    with suppress(AttributeError, ImportError, ValueError):
        if resolve_name(name) is function:
            return name
    raise UsageError(
        f"{what} is {function!r}, which another process cannot import.",
        advice="Define it at the top level of a module; pass what it needs as arguments.",
    )


def _work(rank: int, call: WorkerCall) -> None:
    """Run rank `rank` of `call`, in its own process; write one message at the end."""
    # Do not scan the server's objects: that would copy their pages, which are shared.
    gc.freeze()
    _die_with_caller()
    stack_file = call.path("stack", rank).open("w")  # open until the end, for the fault handler
    faulthandler.enable(stack_file, all_threads=False)
    faulthandler.register(_STACK_SIGNAL, stack_file, all_threads=False)
    os.environ.clear()
    os.environ.update(call.environ)
    env.bind_gloo(env.loopback_interface())
    torch.set_num_threads(1)
    group = None
    try:
        store = FileStore(os.path.join(call.folder, "store"), call.size)
        timeout = timedelta(seconds=call.timeout_s)
        if "nccl" in call.backend:  # to which each rank is a host of its own
            os.environ.update(
                env.SOCKETS_OF_NCCL, NCCL_SOCKET_IFNAME=env.loopback_interface() or ""
            )
            os.environ["NCCL_HOSTID"] = f"rank {rank}"
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            call.backend, store=store, rank=rank, world_size=call.size, timeout=timeout
        )
        group = dist.group.WORLD
        await_all_connected(store, call.size, call.timeout_s)
        args = [decode(arg) if isinstance(arg, bytes) else resolve_name(arg) for arg in call.args]
        result = resolve_name(call.function)(testing_world(rank, call.size, group), *args)
        settle_device()
        message = encode({"ok": True, "at": time.monotonic(), "result": result})
        say_last_words(group)
    except BaseException as error:
        message = encode(
            {
                "ok": False,
                "at": time.monotonic(),
                "is_secondary": is_secondary(error),
                "summary": summarize(error),
                "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT_CHARS:],
            }
        )
        if group is not None:
            say_last_words(group, error)
    written = call.path("unfinished", rank)
    written.write_bytes(message)
    written.rename(call.path("message", rank))  # atomically
    if has_aborted_device():
        os._exit(0)
    if group is not None and dist.is_initialized():
        del group
        dist.destroy_process_group()


def _die_with_caller() -> None:
    """End with the process that started this worker, however it dies.

    The kernel ends a worker with the fork server, and the server ends when the caller's end of its
    `alive` pipe closes. Every worker inherits that end, and would keep the server alive by it.
    """
    die_with(os.getppid())
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
