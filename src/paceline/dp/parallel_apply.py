"""Running replicas at the same time: a standing thread per lane, and what it is told to carry.

torch keeps much of its state per thread: whether gradients are recorded, autocast, the current
stream. A replica must not notice that it runs elsewhere, so a `Climate` is taken from the calling
thread and put around the replica in its own.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from paceline.dp.devices import Place
from paceline.dp.spinning import send_helpers_away
from paceline.errors import UsageError

Job = Callable[[], Any]

INTERRUPTIBLE_EVERY_S = 0.5
"""A Ctrl-C that comes just before a thread begins to wait is noticed when it wakes up only."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one job: its value, or the exception it ended with."""

    value: Any = None
    error: BaseException | None = None


class Crew:
    """Standing threads, one per lane, that do what they are given and wait again.

        waiting --(run)--> working --(outcome)--> waiting ... --(crew collected)--> ended

    A thread refers to its queue only. So the crew, and the model that owns it, can be collected
    while threads wait, and that ends them.
    """

    def __init__(
        self, names: Sequence[str], cpu_threads: int, *, shares_processors: bool = False
    ) -> None:
        self._shares_processors = shares_processors
        self._pid = os.getpid()
        self._inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in names]
        self._underway: list[_Errand] = []
        ready: queue.SimpleQueue[int] = queue.SimpleQueue()
        before = torch.get_num_threads()
        for name, inbox in zip(names, self._inboxes, strict=True):
            args = (inbox, ready, cpu_threads)
            threading.Thread(target=_stand_by, args=args, name=name, daemon=True).start()
        self._members = {ready.get() for _ in names}
        # The number is one per thread, but new threads start with the one that was set last.
        torch.set_num_threads(before)
        weakref.finalize(self, _dismiss, self._inboxes)

    @property
    def is_alive(self) -> bool:
        """Threads do not come along into a forked process."""
        return self._pid == os.getpid()

    @property
    def is_calling(self) -> bool:
        """Whether the code that asks runs in one of the crew's own threads."""
        return threading.get_ident() in self._members

    def run(self, jobs: Sequence[Job | None]) -> list[Outcome | None]:
        """Do one job per lane, all at once; their outcomes in the order of the lanes."""
        self.finish_interrupted()
        if self._shares_processors:
            send_helpers_away()
        errands: list[_Errand | None] = []
        for job, inbox in zip(jobs, self._inboxes, strict=True):
            errand = None if job is None else _Errand(job)
            errands.append(errand)
            if errand is not None:
                inbox.put(errand)
                self._underway.append(errand)
        outcomes = [None if errand is None else errand.wait() for errand in errands]
        self._underway.clear()
        return outcomes

    def finish_interrupted(self) -> bool:
        """Wait for what a call left undone that Ctrl-C broke off; whether there was such a one."""
        was_interrupted = bool(self._underway)
        while self._underway:
            self._underway[0].wait()
            self._underway.pop(0)
        return was_interrupted


class _Errand:
    """One job on its way: given to a thread, done there, its outcome waited for here.

    Waiting can be broken off at any point and begun again.
    """

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._context: contextvars.Context | None = contextvars.copy_context()
        self._outcome: Outcome | None = None
        self._is_done = threading.Lock()
        self._is_done.acquire()

    def do(self) -> None:
        assert self._job is not None  # an errand is done once
        assert self._context is not None
        try:
            outcome = Outcome(value=self._context.run(self._job))
        except BaseException as error:
            outcome = Outcome(error=error)
        self._job = self._context = None
        self._outcome = outcome
        self._is_done.release()

    def wait(self) -> Outcome:
        while self._outcome is None:
            self._is_done.acquire(timeout=INTERRUPTIBLE_EVERY_S)
        return self._outcome


def _stand_by(
    inbox: queue.SimpleQueue[_Errand | None], ready: queue.SimpleQueue[int], cpu_threads: int
) -> None:
    torch.set_num_threads(cpu_threads)
    torch.get_num_threads()  # the first look in a thread adopts what was set last, anywhere: ours
    ready.put(threading.get_ident())
    del ready
    while True:
        errand = inbox.get()
        if errand is None:
            return
        errand.do()
        del errand  # nothing of this batch may stay alive while the thread waits for the next


def _dismiss(inboxes: Sequence[queue.SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


class Climate:
    """What the calling thread has switched on, to be put around a replica in another thread."""

    def __init__(self, places: Sequence[Place]) -> None:
        devices = {place.device for place in places if place.device.type != "cpu"}
        types = ["cpu", *sorted({device.type for device in devices})]
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._streams = {device: torch.accelerator.current_stream(device) for device in devices}
        self._caches = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
        }

    def around(self, place: Place) -> ExitStack:
        """A context like the calling thread's, for the replica at `place`."""
        stack = ExitStack()
        # All of them, because a copy between devices uses a stream of each; its own last.
        for device in sorted(self._streams, key=lambda device: device == place.device):
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
    """Raise where derivatives are taken in a way in which other threads take no part."""
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        raise UsageError(
            "Transforms of torch.func and forward-mode differentiation do not reach the replicas' "
            "threads, and derivatives would be zero.",
            advice="Apply them to `model.module`, or use torch.autograd.grad.",
        )


def blame(error: BaseException, replica: int, places: Sequence[Place], what: str) -> None:
    """Note on the exception which replica raised it; its own traceback shows where."""
    error.add_note(
        f"Replica {replica} of {len(places)} on {places[replica].name} raised this, working on "
        f"{what}.\nThe other replicas finished or were not started; the model can be called again."
    )
