"""`paceline.launch`: run a function on several workers, from a notebook cell or a script.

Workers are forks of the calling process, so closures and functions of a notebook work as they
are. They see the environment that `paceline run` would give them; what they print comes out
labelled; what they return comes back as plain data and tensors.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import errno
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import paceline
from paceline import env
from paceline.errors import UsageError, WireError, WorkerError, check_whole
from paceline.launcher.flags import MAX_WORKERS, SHUTDOWN_TIMEOUT_S, LaunchOptions
from paceline.launcher.output import LAST_WAIT_S, Pipes, open_console
from paceline.launcher.plan import STDERR, STDOUT, WorkerSpec, count_cores, plan_workers
from paceline.launcher.process import WorkerProcess, private_folder
from paceline.launcher.store import StoreServer
from paceline.launcher.supervise import Supervisor
from paceline.launcher.template import MODULES
from paceline.launcher.worker import Instructions, Worker, die_with

T = TypeVar("T")
NOT_REPLACED = (
    "launch() replaces no worker, as `paceline run` does for a script. A Run with a folder "
    "continues from its newest checkpoint when launch() is called again."
)


def launch(
    fn: Callable[..., T],
    *args: Any,
    workers: int,
    threads: int | None = None,
    label: bool = True,
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
) -> Results[T]:
    """Call `fn(*args)` in `workers` processes and return their results, by rank.

    `fn` joins the others with `paceline.init_process_group()`. Results may be numbers, strings,
    containers and tensors; anything else comes back as None, with a warning. The first worker to
    fail ends all, and its traceback is in the `WorkerError` raised here. So does one that is
    killed: unlike `paceline run`, this replaces no worker. In a notebook the results of a `Run`
    with a folder show its report.
    """
    _check(fn, workers, threads)
    for name in MODULES:  # loaded once here, not once per worker
        __import__(name)

    options = LaunchOptions(
        program="", threads=threads, no_label=not label, shutdown_timeout=shutdown_timeout_s
    )
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder())
        announced = os.path.join(folder, "run_folder")
        with open(announced, "x") as file:
            print(os.getpid(), file=file)
        store = stack.enter_context(closing(StoreServer(folder)))
        forks = stack.enter_context(closing(_Forks(partial(fn, *args), store)))
        specs = plan_workers(
            options,
            store.first_place(workers),
            run_id=secrets.token_hex(8),
            folder=folder,
            environ={**os.environ, env.FOLDER_VARIABLE: announced},
            cores=count_cores(),
            interface=env.loopback_interface(),
        )
        specs = [replace(spec, takes_terminal=False) for spec in specs]
        console = open_console(os.environ)
        stack.callback(console.flush, LAST_WAIT_S)
        result = Supervisor(specs, forks.start, options, console, store=store).run()
        if (reason := result.reason) is not None and reason.signal == signal.SIGPIPE:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        if reason is not None:
            raise WorkerError(
                f"The function failed: {reason.text}.",
                where=reason.traceback.rstrip(),
                advice="" if reason.traceback else NOT_REPLACED,
                rank=reason.worker,
                traceback=reason.traceback,
            )
        found = Results(_read_results([_result_file(spec) for spec in specs]))
        found.folder = env.find_announced(announced)
        return found


class Results(list[T]):
    """What workers returned, by rank."""

    folder = ""
    """Of the run that they trained, if that has one."""

    def _repr_html_(self) -> str | None:
        return paceline.RunView(self.folder)._repr_html_() if self.folder else None


class _Forks:
    """Forks workers from a thread of its own, which lives as long as they do.

    See Note [Forking from a fresh thread]. A fork inherits every descriptor, so a worker's pipes
    are made just before it, and its ends of them closed just after.
    """

    def __init__(self, call: Callable[[], object], store: StoreServer) -> None:
        self.call = call
        self.ours = [store.socket.fileno(), store.near.fileno()]
        """What only the calling process may hold open."""
        self.processes: list[Any] = []
        self.asked: SimpleQueue[tuple[WorkerSpec, Pipes, Future[WorkerProcess]] | None]
        self.asked = SimpleQueue()
        self.thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._fork_all,), name="paceline-launch"
        )
        self.thread.start()

    def start(self, spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        forked: Future[WorkerProcess] = Future()
        self.asked.put((spec, pipes, forked))
        return forked.result()

    def close(self) -> None:
        self.asked.put(None)
        self.thread.join()
        for process in self.processes:  # multiprocessing forgets the workers
            if process.is_alive():  # an interrupt came before it was supervised
                process.kill()
            process.join()
            process.close()

    def _fork_all(self) -> None:
        while (asked := self.asked.get()) is not None:
            spec, pipes, forked = asked
            try:
                forked.set_result(self._fork(spec, pipes))
            except BaseException as error:
                forked.set_exception(error)

    def _fork(self, spec: WorkerSpec, pipes: Pipes) -> WorkerProcess:
        self.ours += pipes.ours
        process = multiprocessing.get_context("fork").Process(
            target=self._work, args=(spec, pipes, os.getpid()), name=f"rank {spec.rank}"
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of forks among threads; the Note says why this one works.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        self.processes.append(process)
        poll = partial(getattr, process, "exitcode")
        return WorkerProcess(spec.rank, process.pid or -1, poll, spec.error_file, pipes)

    def _work(self, spec: WorkerSpec, pipes: Pipes, parent: int) -> None:
        """A worker's whole life, after the fork."""
        os.setpgid(0, 0)
        for fd in self.ours:
            os.close(fd)
        _settle_in(pipes)
        die_with(parent)
        os.environ.update({**spec.environment, **pipes.variables})
        if "OMP_NUM_THREADS" in os.environ:  # torch read it when the parent imported it
            sys.modules["torch"].set_num_threads(env.read_int(os.environ, "OMP_NUM_THREADS"))
        end_s = env.read_observation(spec.environment).stall_end_s
        worker = Worker(
            Instructions(parent=parent, status_fd=pipes.status_writer, stall_end_s=end_s)
        )
        worker.prepare()
        sys.exit(worker.call(lambda: _write_result(_result_file(spec), self.call())))


def _settle_in(pipes: Pipes) -> None:
    """Undo what a fork inherits: signal handlers, and the parent's standard streams."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for fd, name in ((STDOUT, "stdout"), (STDERR, "stderr")):
        pipe = pipes.streams[fd]
        assert pipe is not None
        os.dup2(pipe, fd)
        os.close(pipe)
        text = os.fdopen(fd, "w", 1, encoding="utf-8", errors="replace", closefd=False)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _result_file(spec: WorkerSpec) -> str:
    return os.path.join(os.path.dirname(spec.error_file), "result")


def _write_result(path: str, result: object) -> None:
    from paceline.files import encode

    try:
        message = encode({"value": result})
    except WireError as error:
        message = encode({"refused": error.what})
    with open(path, "wb") as file:
        file.write(message)


def _read_results(paths: list[str]) -> list[Any]:
    from paceline.files import decode

    found: list[dict[str, Any]] = [{} for _ in paths]
    for rank, path in enumerate(paths):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            found[rank] = decode(file.read())  # a worker that left with sys.exit(0) wrote none
    refused = [f"rank {n}: {one['refused']}" for n, one in enumerate(found) if "refused" in one]
    if refused:
        warnings.warn(
            "launch() returns None for what cannot be sent back.\n"
            + "\n".join(refused)
            + "\nReturn numbers, strings, tensors, or containers of them: model.state_dict() "
            "rather than the model.",
            stacklevel=3,
        )
    return [one.get("value") for one in found]


def _check(fn: object, workers: int, threads: int | None) -> None:
    if not callable(fn):
        raise UsageError(
            f"launch() got {fn!r}, which cannot be called.",
            advice="Pass the function itself: launch(train, workers=2).",
        )
    check_whole("launch(): workers", workers, most=MAX_WORKERS)
    check_whole("launch(): threads", threads, or_none=True)
    if "fork" not in multiprocessing.get_all_start_methods():
        raise UsageError(
            "launch() needs an operating system that can fork.",
            advice="Put the function in a script and start it with `paceline run`.",
        )
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
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
