"""Running replicas at the same time, each in a persistent thread with the caller's torch state.

torch keeps much of its state per thread: whether gradients are recorded, autocast, the current
stream. A replica must behave as in the calling thread, so `ThreadState` copies that thread's state
and applies it in the replica's.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from paceline.dp.batch_norm import AbsentError
from paceline.dp.devices import ReplicaDevice
from paceline.errors import UsageError
from paceline.torch_private import is_transformed

Job = Callable[[], Any]
Work = tuple[contextvars.Context, Job, threading.Event]
"""A job for a thread: its context, the function, and the event that is set when it is done."""

INTERRUPTIBLE_EVERY_S = 0.5
"""A Ctrl-C just before a wait is handled only when the wait ends, so waits end this often."""

_OMP_PAUSE_SOFT = 1  # keeps settings such as the number of threads
_MAPS, _TASKS = Path("/proc/self/maps"), Path("/proc/self/task")


class ParallelApply:
    """Does the same work on several replicas, each in its thread.

    `groups` are the numbers of the replicas that share a thread; they take turns. A single group
    needs no thread: the calling one does the work.
    """

    def __init__(
        self,
        devices: Sequence[ReplicaDevice],
        groups: Sequence[Sequence[int]],
        cpu_threads: int | None,
    ) -> None:
        self._devices, self._groups = devices, groups
        self.pool: ThreadPool | None = None
        if len(groups) > 1:
            on_cpu = sum(place.device.type == "cpu" for place in devices)
            share = max(1, torch.get_num_threads() // max(1, on_cpu))
            names = [f"paceline replica {devices[group[0]].name}" for group in groups]
            self.pool = ThreadPool(names, cpu_threads or share, shares_processors=on_cpu > 1)

    def __call__(self, replicas: Sequence[int], work: Callable[[int], Any]) -> list[Any]:
        """The results of `work` by replica; raises the first error, of a replica's own if any."""
        state = ThreadState(self._devices)
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def run_group(numbers: Sequence[int]) -> None:
            for number in numbers:
                try:
                    with state.around(self._devices[number].device):
                        results[number] = work(number)
                except BaseException as error:
                    errors[number] = error
                    return

        used = [[number for number in group if number in replicas] for group in self._groups]
        if self.pool is None:
            run_group(used[0])
        else:
            self.pool.run([partial(run_group, own) if own else None for own in used])
        if not errors:
            return [results[number] for number in replicas]
        # A replica that missed another one has failed because of that one's error.
        error = errors[min(errors, key=lambda n: (isinstance(errors[n], AbsentError), n))]
        try:
            raise error
        finally:
            errors.clear()
            del error  # its traceback refers to this frame, which keeps the whole batch alive


class ThreadPool:
    """Persistent threads, one for every name, that run jobs.

    A thread refers only to its queue. So the pool, and the model that owns it, can be collected
    while threads wait; that ends the threads.
    """

    def __init__(
        self, names: Sequence[str], cpu_threads: int, *, shares_processors: bool = False
    ) -> None:
        self._shares_processors = shares_processors
        self._pid = os.getpid()
        self._queues: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in names]
        self._unfinished: list[threading.Event] = []
        started: SimpleQueue[int] = SimpleQueue()
        before = torch.get_num_threads()
        for name, queue in zip(names, self._queues, strict=True):
            args = (queue, started, cpu_threads)
            threading.Thread(target=_serve, args=args, name=name, daemon=True).start()
        self._thread_ids = {started.get() for _ in names}
        # The number is per thread, but new threads start with the number that was set last.
        torch.set_num_threads(before)
        weakref.finalize(self, _end_threads, self._queues)

    @property
    def is_alive(self) -> bool:
        """Whether the threads exist: a forked process does not have them."""
        return self._pid == os.getpid()

    @property
    def is_calling(self) -> bool:
        """Whether the caller runs in one of the pool's threads."""
        return threading.get_ident() in self._thread_ids

    def run(self, jobs: Sequence[Job | None]) -> None:
        """Run one job per thread, all at once, and wait until all are done."""
        self.wait()
        if self._shares_processors:
            stop_idle_openmp_threads()
        for job, queue in zip(jobs, self._queues, strict=True):
            if job is not None:
                done = threading.Event()
                queue.put((contextvars.copy_context(), job, done))
                self._unfinished.append(done)
        self.wait()

    def wait(self) -> None:
        """Wait for all jobs, including those of a call that Ctrl-C interrupted."""
        while self._unfinished:
            if self._unfinished[0].wait(INTERRUPTIBLE_EVERY_S):
                self._unfinished.pop(0)


def _serve(queue: SimpleQueue[Work | None], started: SimpleQueue[int], cpu_threads: int) -> None:
    torch.set_num_threads(cpu_threads)
    # The first call in a thread adopts the number that any thread set last: call it now, while that
    # is ours.
    torch.get_num_threads()
    started.put(threading.get_ident())
    del started
    while (work := queue.get()) is not None:
        context, job, done = work
        try:
            context.run(job)
        finally:
            # Free this batch now: locals would keep it alive while the thread waits for the next.
            del work, context, job
            done.set()


def _end_threads(queues: Sequence[SimpleQueue[Work | None]]) -> None:
    for queue in queues:
        queue.put(None)


class ThreadState:
    """The calling thread's torch state, to be applied around a replica in another thread."""

    def __init__(self, replicas: Sequence[ReplicaDevice]) -> None:
        devices = {place.device for place in replicas if place.device.type != "cpu"}
        types = ["cpu", *sorted({device.type for device in devices})]
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._streams = {device: torch.accelerator.current_stream(device) for device in devices}
        self._caches = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
        }

    def around(self, own: torch.device) -> ExitStack:
        """A context with the calling thread's state, for a replica on the device `own`."""
        stack = ExitStack()
        # The streams of all devices, because a copy between two uses a stream of each; `own` last,
        # to be the current device.
        for device in sorted(self._streams, key=lambda device: device == own):
            stack.enter_context(torch.accelerator.device_index(device.index))
            stack.enter_context(self._streams[device])
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, (enabled, dtype) in self._autocast.items():
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled, cache_enabled=self._caches)
                )
        return stack


def refuse_transforms() -> None:
    """Raise inside a transform or forward-mode differentiation, which other threads do not see."""
    if is_transformed():
        raise UsageError(
            "Transforms of torch.func and forward-mode differentiation do not reach the replicas' "
            "threads, and derivatives would be zero.",
            advice="Apply them to `model.module`, or use torch.autograd.grad.",
        )


def stop_idle_openmp_threads() -> None:
    """End the calling thread's OpenMP worker threads, where the library is GNU's and allows it."""
    # After every operation they spin for some milliseconds, waiting for another one. The caller's
    # optimizer is such an operation, and the replicas start right after it: on two cores a step of
    # a small convolutional net took 37 ms instead of 31. The next large operation starts new ones,
    # in some 10 us each. A forked process has none, but its OpenMP would wait for them forever.
    functions = _openmp_pause_functions()
    if not functions or len(os.listdir(_TASKS)) <= threading.active_count():
        return  # there are only Python's threads
    for pause in functions:
        pause(_OMP_PAUSE_SOFT)  # does nothing inside a parallel region, as it should


@cache
def _openmp_pause_functions() -> list[Callable[[int], int]]:
    try:
        paths = set(re.findall(r"(/.*/libgomp\S*\.so\S*)$", _MAPS.read_text(), re.MULTILINE))
        return [ctypes.CDLL(path).omp_pause_resource_all for path in sorted(paths)]
    except (OSError, AttributeError):  # not Linux, or a libgomp older than OpenMP 5
        return []
