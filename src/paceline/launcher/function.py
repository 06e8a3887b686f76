"""`paceline.launch`: run a function on several workers, from a notebook cell or a script.

Workers are forks of the calling process, so closures and functions of a notebook work as they
are. They see the environment that `paceline run` would give them; what they print comes out
labelled; what they return comes back as plain data and tensors.
"""

from __future__ import annotations

import contextvars
import ctypes
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from paceline import env
from paceline.errors import UsageError, WireError, WorkerError
from paceline.launcher import output
from paceline.launcher.ending import Ending, describe_exit
from paceline.launcher.machine import count_cores
from paceline.launcher.output import Collector, Console, Source, Stream
from paceline.launcher.process import Running
from paceline.launcher.sentinel import Sentinel
from paceline.launcher.store import StoreDoor
from paceline.launcher.watch import end_now, watch
from paceline.launcher.worker import Orders, Worker, die_with

T = TypeVar("T")
_VALUE, _REFUSED = b"v", b"r"


def launch(
    fn: Callable[..., T],
    *args: Any,
    workers: int,
    threads: int | None = None,
    label: bool = True,
    shutdown_timeout_s: float = 0.5,
) -> list[T]:
    """Call `fn(*args)` in `workers` processes and return their results, by rank.

    `fn` joins the others with `paceline.init_process_group()`. Results may be numbers, strings,
    containers and tensors; anything else comes back as None, with a warning. The first worker to
    fail ends all, and its traceback is in the `WorkerError` raised here.
    """
    _check(fn, workers, threads)
    import torch  # noqa: F401  loaded once here, not once per worker

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-"))
        door = stack.enter_context(closing(StoreDoor(os.path.join(folder, "store-claimed"))))
        sentinel = stack.enter_context(closing(Sentinel()))
        console = output.text_console(sys.stdout, sys.stderr, os.environ)
        party = _Party(fn, args, workers, threads, label, folder, door, sentinel, console)
        nursery = stack.enter_context(closing(_Nursery()))
        stack.callback(party.bury)
        try:
            running = nursery.start(party)
        except BaseException:
            party.close_ours()
            raise
        finally:
            party.close_theirs()
            door.shut()
        ending = watch(
            running,
            sentinel=sentinel,
            shutdown_timeout_s=shutdown_timeout_s,
            linger_fd=party.linger_writer,
        )
    if not ending.succeeded:
        raise _worker_error(ending, workers)
    return _results(party)


@dataclass(slots=True)
class _Seat:
    """One worker's pipes: our end and its end of each."""

    rank: int
    pairs: dict[str, tuple[int, int]]
    """(ours, its) by name: stdout, stderr, result, status; records if it may draw."""
    sources: list[Source]
    """What the launcher reads from this worker."""
    result: Collector


@dataclass(slots=True)
class _Party:
    """Everything made before the first fork, so that each worker can close what is not its own."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    size: int
    threads: int | None
    label: bool
    folder: str
    door: StoreDoor
    sentinel: Sentinel
    console: Console
    seats: list[_Seat] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    linger_reader: int = field(init=False)
    linger_writer: int = field(init=False)
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        self.linger_reader, self.linger_writer = os.pipe()
        for rank in range(self.size):
            pairs = {name: os.pipe() for name in ("stdout", "stderr", "result", "status")}
            result = Collector(pairs["result"][0])
            sources = self._sources(rank, pairs, result)
            if rank == 0 and self.console.screen is not None:
                records, writer = output.open_records(self.console.screen)
                pairs["records"] = records.fd, writer
                sources.append(records)
            self.seats.append(_Seat(rank, pairs, sources, result))
            os.mkdir(os.path.join(self.folder, str(rank)), 0o700)

    def error_file(self, rank: int) -> str:
        return os.path.join(self.folder, str(rank), "error.json")

    def _sources(
        self, rank: int, pairs: dict[str, tuple[int, int]], result: Collector
    ) -> list[Source]:
        shown = partial(
            Stream,
            rank=rank if self.label and self.size > 1 else None,
            console=self.console,
            patience_s=output.TERMINAL_PATIENCE_S,
            mark=self.console.mark if rank == 0 else "",
        )
        return [shown(pairs["stdout"][0], 1), shown(pairs["stderr"][0], 2), result]

    def close_theirs(self) -> None:
        os.close(self.linger_reader)
        for seat in self.seats:
            for _, its in seat.pairs.values():
                os.close(its)

    def close_ours(self) -> None:
        os.close(self.linger_writer)
        for seat in self.seats:
            for ours, _ in seat.pairs.values():
                os.close(ours)

    def bury(self) -> None:
        """Let multiprocessing forget the workers, which have ended."""
        for process in self.processes:
            process.join()
            process.close()


class _Nursery:
    """Forks the workers from a thread of its own, which lives as long as they do.

    See Note [Forking from a fresh thread].
    """

    def __init__(self) -> None:
        self.started = threading.Event()
        self.finished = threading.Event()
        self.running: list[Running] = []
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def start(self, party: _Party) -> list[Running]:
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self._fork_all, party), name="paceline-launch", daemon=True
        )
        self.thread.start()
        try:
            self.started.wait()
            if self.error is not None:
                raise self.error
        except BaseException:
            self.started.wait()
            end_now(self.running)
            raise
        return self.running

    def close(self) -> None:
        self.finished.set()
        if self.thread is not None:
            self.thread.join()

    def _fork_all(self, party: _Party) -> None:
        try:
            for seat in party.seats:
                process = multiprocessing.get_context("fork").Process(
                    target=_work, args=(party, seat, os.getpid()), name=f"rank {seat.rank}"
                )
                with warnings.catch_warnings():
                    # Python 3.12 warns of forks among threads; the Note says why this one works.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                party.processes.append(process)
                self.running.append(
                    Running(
                        rank=seat.rank,
                        pid=process.pid or -1,
                        poll=partial(getattr, process, "exitcode"),
                        error_file=party.error_file(seat.rank),
                        status_fd=seat.pairs["status"][0],
                        streams=seat.sources,
                    )
                )
        except BaseException as error:
            self.error = error
        self.started.set()
        self.finished.wait()


def _work(party: _Party, seat: _Seat, parent: int) -> None:
    """A worker's whole life, after the fork."""
    os.setpgid(0, 0)
    _settle_in(party, seat)
    die_with(parent)
    rank, size = seat.rank, party.size
    place = env.Placement(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        node=0,
        nodes=1,
        master_addr=party.door.host,
        master_port=party.door.port,
        agent_has_store=True,
        source="paceline run",
    )
    os.environ.update(
        env.worker_environment(
            place,
            run_id=party.run_id,
            error_file=party.error_file(rank),
            environ=os.environ,
            cores=count_cores(),
            threads=party.threads,
            interface=env.loopback_interface(),
        )
    )
    if rank == 0:
        _, writer = seat.pairs.get("records", (-1, -1))
        os.environ.update(env.screen_environment(writer, stdout=1, mark=party.console.mark))
    _set_threads()
    serves = rank == 0
    worker = Worker(
        Orders(
            parent=parent,
            status_fd=seat.pairs["status"][1],
            listen_fd=party.door.fileno() if serves else -1,
            claim_file=party.door.claim_file,
            linger_fd=party.linger_reader if serves else -1,
        )
    )
    worker.prepare()

    def call() -> None:
        _send(seat.pairs["result"][1], party.fn(*party.args))

    code: Any
    try:
        code = worker.call(call)
    except SystemExit as stop:
        code = stop.code
    sys.stdout.flush()
    sys.stderr.flush()
    worker.linger()
    sys.exit(code)


def _settle_in(party: _Party, seat: _Seat) -> None:
    """Undo what a fork inherits: other workers' pipes, signal handlers, the parent's streams."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.close(party.sentinel.writer)
    os.close(party.linger_writer)
    for other in party.seats:
        for ours, its in other.pairs.values():
            os.close(ours)
            if other is not seat:
                os.close(its)
    if seat.rank != 0:
        os.close(party.linger_reader)
        party.door.shut()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        pipe = seat.pairs[name][1]
        os.dup2(pipe, fd)
        os.close(pipe)
        text = os.fdopen(fd, "w", 1, encoding="utf-8", errors="replace", closefd=False)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _set_threads() -> None:
    """Tell torch, which read the variable when the parent imported it."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(env.read_int(os.environ, "OMP_NUM_THREADS"))


def _send(fd: int, result: object) -> None:
    from paceline.comm.codec import encode

    try:
        message = _VALUE + encode(result)
    except WireError as error:
        message = _REFUSED + error.what.encode()
    output.write_all(fd, message)
    os.close(fd)


def _results(party: _Party) -> list[Any]:
    from paceline.comm.codec import decode

    results: list[Any] = []
    refused: list[str] = []
    for seat in party.seats:
        kind, payload = seat.result.data[:1], bytes(seat.result.data[1:])
        results.append(decode(payload) if kind == _VALUE else None)
        if kind == _REFUSED:
            refused.append(f"rank {seat.rank}: {payload.decode()}")
    if refused:
        warnings.warn(
            "launch() returns None for what cannot be sent back.\n"
            + "\n".join(refused)
            + "\nReturn numbers, strings, tensors, or containers of them: model.state_dict() "
            "rather than the model.",
            stacklevel=3,
        )
    return results


def _worker_error(ending: Ending, size: int) -> WorkerError:
    first = ending.first_failure
    assert first is not None  # nothing else ends a run without a signal inbox
    traceback = first.record.traceback if first.record is not None else ""
    return WorkerError(
        f"rank {first.rank} of {size} failed: {describe_exit(first)}",
        where=traceback.rstrip(),
        rank=first.rank,
        traceback=traceback,
    )


def _check(fn: object, workers: int, threads: int | None) -> None:
    if not callable(fn):
        raise UsageError(
            f"launch() got {fn!r}, which cannot be called.",
            advice="Pass the function itself: launch(train, workers=2).",
        )
    for name, value in (("workers", workers), ("threads", 1 if threads is None else threads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(
                f"{name}={value!r} was passed to launch(), but a run needs at least one.",
                advice="Pass a whole number from 1 up.",
            )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UsageError(
            "launch() needs an operating system that can fork.",
            advice="Put the function in a script and start it with `paceline run`.",
        )
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        raise UsageError(
            "This process already belongs to a process group, which its forks would share.",
            advice="Call launch() before init_process_group(), or after "
            "torch.distributed.destroy_process_group().",
        )
    if cuda_is_initialised():
        raise UsageError(
            "CUDA is already initialised in this process, and cannot be used in forks of it.",
            advice="Restart the kernel and call launch() before anything touches the GPU, "
            "torch.cuda.is_available() included (PYTORCH_NVML_BASED_CUDA_CHECK=1 makes that one "
            "harmless); or put the function in a script and start it with `paceline run`.",
        )


def cuda_is_initialised() -> bool:
    """Whether this process has talked to the CUDA driver, after which forks of it cannot."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # not loaded, or not Linux
        return False
    # Before cuInit() every call fails, this one without side effects.
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == 0


# Note [Forking from a fresh thread]
#
# GNU OpenMP keeps a pool of threads per thread that has run a parallel region. In a fork the pool
# is still listed but its threads are gone, so the next parallel region waits for them forever:
# measured with torch 2.13, any operation on two threads hangs in a fork of a process that had run
# one before. A thread that has never run one has no pool, and after a fork the forking thread is
# the child's main thread. So the workers are forked from a new thread, and build pools of their
# own. The thread must live on, because the kernel takes the end of the thread that forked for the
# death of the parent (PR_SET_PDEATHSIG).
