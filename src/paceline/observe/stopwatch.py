"""What a rank's time goes to: a stopwatch that is always in exactly one phase.

Whoever knows that something else begins (the wrapper, the reducer, a hook on optimizers) says
`enter(phase)`; so the phases of a step add up to the step. A step reaches from the moment the sums
of one backward have arrived to the moment those of the next have: that moment is nearly the same
on all ranks, and so a rank's own time since then can be compared with the others'.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from paceline.observe import spans

OWN = ("data", "forward", "backward", "optimizer", "other")
"""Phases in which a rank waits for nobody."""
WAIT = "wait"
"""From the end of a rank's own work until the others' has arrived, and been summed."""
PHASES = (*OWN, WAIT)

KEPT_STEPS = 1000
"""How many steps are remembered at most; older ones have been compared long ago."""
_PENDING_LIMIT = 4096
_RESOLVE_PERIOD = 64


class StepTimes(NamedTuple):
    """Where one step's time went, in nanoseconds by phase."""

    step: int
    ns_by_phase: dict[str, int]

    @property
    def own_ns(self) -> int:
        return sum(self.ns_by_phase[phase] for phase in OWN)


class Stopwatch:
    """The phases of one rank, and its last steps.

        data -> forward -> other -> backward -> wait --(end_step)--> other -> optimizer -> data

    `phase`, `since_ns`, `step` and `bucket` say where the rank is now, for whoever looks from
    another thread. Invariant: the phases of all steps add up to the time between the first and
    the last.
    """

    pauses = True
    """Whether a change costs so little that every single collective can be told from work."""

    def __init__(self, clock: Callable[[], int] = spans.now_ns) -> None:
        self.phase = "other"
        self.since_ns = clock()
        self.step = 0
        self.bucket: int | None = None
        """The bucket whose sum this rank waits for."""
        self.waits_for: Callable[[int], str] | None = None
        """Names a bucket; there only while waiting, because it holds the model."""
        self.missing: Callable[[], list[int]] | None = None
        """Which ranks its sum lacks, where the transport knows."""
        self.thread = threading.get_ident()
        """Who trains: whose optimizer steps are meant, and whose stack tells where it is."""
        self.finished: deque[StepTimes] = deque(maxlen=KEPT_STEPS)
        self._clock = clock
        self._accounted_ns = self.since_ns
        self._step_ns = dict.fromkeys(PHASES, 0)
        self._total_ns = dict.fromkeys(PHASES, 0)

    def enter(self, phase: str) -> None:
        """What is done from now on belongs to `phase`."""
        self._change(phase, ends_step=False)

    def end_step(self, *, counts: bool = True) -> None:
        """All sums of this step have arrived, or it has failed.

        A step that does not count was no work of this rank's own.
        """
        self._change("other", ends_step=True)
        self.bucket = self.waits_for = self.missing = None
        self._close(self.step, counts)
        self.step += 1

    def on_forward(self) -> None:
        """A forward pass of a training step begins."""
        self.thread = threading.get_ident()
        self.enter("forward")

    def totals(self) -> dict[str, float]:
        """Seconds by phase since the beginning, up to the last change; take the difference of two.

        On a CUDA device these run a little behind, because the host does not wait for it.
        """
        return {phase: (self._total_ns[phase] + self._step_ns[phase]) / 1e9 for phase in PHASES}

    def _change(self, phase: str, ends_step: bool) -> None:
        now = self._clock()
        self._account(self.phase, self._accounted_ns, now, self.step, ends_step)
        self._accounted_ns = now
        self.phase = phase
        self.since_ns = now

    def _account(self, phase: str, begin_ns: int, end_ns: int, step: int, ends_step: bool) -> None:
        self._step_ns[phase] += end_ns - begin_ns
        recorder = spans.recorder()
        if recorder is not None and (phase != "other" or ends_step):
            facts = {"step": step, "last": True} if ends_step else {"step": step}
            recorder.add(phase, begin_ns, end_ns, facts)

    def _close(self, step: int, counts: bool) -> None:
        for phase, ns in self._step_ns.items():
            self._total_ns[phase] += ns
        if counts:
            self.finished.append(StepTimes(step, self._step_ns))
        self._step_ns = dict.fromkeys(PHASES, 0)


class DeviceStopwatch(Stopwatch):
    """The same for a CUDA device, whose kernels run later than the host starts them.

    Every change of phase records an event on the stream in use; its time is read when the device
    has passed it, by which time the host is elsewhere. So the host never waits for the device.
    """

    pauses = False

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._cuda: Any = sys.modules["torch"].cuda
        self._device = device
        self._spare_events: list[Any] = []
        self._reached = self._record()
        self._reached.synchronize()  # once: ties the device's clock to the host's
        self._accounted_ns = self._clock()
        self._exact_ns = float(self._accounted_ns)
        self._pending: deque[tuple[Any, str, int, bool | None]] = deque()
        """Events with what ended there; and where a step did, whether it counts."""

    def enter(self, phase: str) -> None:
        self._follow(counts=None)
        self.phase = phase
        self.since_ns = self._clock()

    def end_step(self, *, counts: bool = True) -> None:
        self._follow(counts)
        self.phase = "other"
        self.since_ns = self._clock()
        self.bucket = self.waits_for = self.missing = None
        self.step += 1
        self._resolve()

    def _follow(self, counts: bool | None) -> None:
        if len(self._pending) < _PENDING_LIMIT:
            self._pending.append((self._record(), self.phase, self.step, counts))
        if len(self._pending) % _RESOLVE_PERIOD == 0:
            self._resolve()

    def _record(self) -> Any:
        spares = self._spare_events
        event = spares.pop() if spares else self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def _resolve(self) -> None:
        """Account for the changes that the device has passed, in order."""
        while self._pending and self._pending[0][0].query():
            event, phase, step, counts = self._pending.popleft()
            # Differences of neighbours, because milliseconds since the start lose precision.
            self._exact_ns += self._reached.elapsed_time(event) * 1e6
            self._spare_events.append(self._reached)
            self._reached = event
            now = round(self._exact_ns)
            self._account(phase, self._accounted_ns, now, step, counts is not None)
            self._accounted_ns = now
            if counts is not None:
                self._close(step, counts)


def of(group: Any, device: Any = None) -> Stopwatch:
    """The stopwatch of this rank in `group`: one, however many models it trains there."""
    watch = _watches.get(group)
    if watch is None:
        is_cuda = device is not None and device.type == "cuda"
        # Set before the entry is made, so that it is called after the entry is gone.
        weakref.finalize(group, _ignore_optimizers)
        watch = _watches[group] = DeviceStopwatch(device) if is_cuda else Stopwatch()
        _notice_optimizers()
    return watch


def find(group: Any) -> Stopwatch | None:
    """The stopwatch of this rank in `group`, if it has one."""
    return _watches.get(group)


@contextmanager
def waiting(group: Any) -> Iterator[None]:
    """Inside, this rank waits for the others, whatever phase it was and will be in."""
    watch = _watches.get(group)
    if watch is None or watch.phase == WAIT or not watch.pauses:
        yield
        return
    phase = watch.phase
    watch.enter(WAIT)
    try:
        yield
    finally:
        watch.enter(phase)


_watches: weakref.WeakKeyDictionary[Any, Stopwatch] = weakref.WeakKeyDictionary()
_handles: list[Any] = []


def _notice_optimizers() -> None:
    """Hear of every optimizer's steps; torch has hooks for that, which cost nothing until set."""
    if _handles:
        return
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    _handles.append(register_optimizer_step_pre_hook(_before_optimizer))
    _handles.append(register_optimizer_step_post_hook(_after_optimizer))


def _ignore_optimizers() -> None:
    """Let go of the hooks when the last group is gone."""
    if not _watches:
        while _handles:
            _handles.pop().remove()


def _before_optimizer(*_: object) -> None:
    _enter_on_this_thread("optimizer")


def _after_optimizer(*_: object) -> None:
    _enter_on_this_thread("data")


def _enter_on_this_thread(phase: str) -> None:
    if sys.modules["torch"].compiler.is_compiling():
        return
    thread = threading.get_ident()
    for watch in list(_watches.values()):
        if watch.thread == thread:
            watch.enter(phase)
