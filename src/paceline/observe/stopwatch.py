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

from paceline.comm.membership import Membership
from paceline.observe import spans
from paceline.observe.phases import MEASURED, OWN, Phase

KEPT_STEPS = 1000
"""How many steps are remembered at most; older ones have been compared long ago."""
_PENDING_LIMIT = 4096
_RESOLVE_PERIOD = 64


class StepTimes(NamedTuple):
    """Where one step's time went, in nanoseconds by measured phase."""

    step: int
    ns_by_phase: dict[Phase, int]

    @property
    def own_ns(self) -> int:
        return sum(self.ns_by_phase[phase] for phase in OWN)


class Awaited(NamedTuple):
    """The sum that a rank waits for."""

    describe: Callable[[int], str]
    """Names a bucket."""
    bucket: int
    reduction: Any
    """May have `missing()`: the ranks that the sum lacks, where the transport knows."""


class Stopwatch:
    """The phases of one rank, and its last steps.

        data -> forward -> other -> backward -> wait --(end_step)--> other -> optimizer -> data

    `phase`, `since_ns`, `step` and `awaited` say where the rank is now, for whoever looks from
    another thread. Invariant: the phases of all steps add up to the time between the first and
    the last.
    """

    pauses = True
    """Whether a change costs so little that every single collective can be told from work."""

    def __init__(self, clock: Callable[[], int] = spans.now_ns) -> None:
        self.phase = Phase.OTHER
        self.since_ns = clock()
        self.step = 0
        self.awaited: Awaited | None = None
        """There only while waiting, because it holds the model."""
        self.thread = threading.get_ident()
        """Who trains: whose optimizer steps are meant, and whose stack tells where it is."""
        self.membership: Callable[[], Membership | None] = lambda: None
        """In which group it is now; a weak reference, because the group keeps the stopwatch."""
        self.detector: Any = None
        """The `StragglerDetector` that compares it with the other ranks', if there is one, ..."""
        self.stalls: Any = None
        """... and the `StallWatch` that notices when it stands still."""
        self.finished: deque[StepTimes] = deque(maxlen=KEPT_STEPS)
        self._clock = clock
        self._accounted_ns = self.since_ns
        self._step_ns = dict.fromkeys(MEASURED, 0)
        self._total_ns = dict.fromkeys(MEASURED, 0)

    def enter(self, phase: Phase) -> None:
        """What is done from now on belongs to `phase`."""
        self._leave(None)
        self.phase = phase

    def end_step(self, *, counts: bool = True) -> None:
        """All sums of this step have arrived, or it has failed.

        A step that does not count was no work of this rank's own.
        """
        self._leave(counts)
        self.phase = Phase.OTHER
        self.awaited = None
        self.step += 1

    def on_forward(self) -> None:
        """A forward pass of a training step begins."""
        self.thread = threading.get_ident()
        self.enter(Phase.FORWARD)

    def on_generation(self) -> None:
        """The ranks are in another group from now on."""
        membership = self.membership()
        if membership is not None:
            # Set before the entry is made, so that it is called after the entry is gone.
            weakref.finalize(membership.group, _ignore_optimizers)
            _watches[membership.group] = self

    def totals(self) -> dict[str, float]:
        """Seconds by phase since the beginning, up to the last change; take the difference of two.

        On a CUDA device these run a little behind, because the host does not wait for it.
        """
        return {phase: (self._total_ns[phase] + self._step_ns[phase]) / 1e9 for phase in MEASURED}

    def _leave(self, counts: bool | None) -> None:
        """The phase ends; where the step ends with it, `counts` says whether it counts."""
        self.since_ns = self._clock()
        self._account(self.since_ns, self.phase, self.step, counts)

    def _account(self, end_ns: int, phase: Phase, step: int, counts: bool | None) -> None:
        begin_ns, self._accounted_ns = self._accounted_ns, end_ns
        self._step_ns[phase] += end_ns - begin_ns
        ends_step = counts is not None
        recorder = spans.recorder()
        if recorder is not None and (phase is not Phase.OTHER or ends_step):
            facts = {"step": step, "last": True} if ends_step else {"step": step}
            recorder.add(phase, begin_ns, end_ns, facts)
        if ends_step:
            for each, ns in self._step_ns.items():
                self._total_ns[each] += ns
            if counts:
                self.finished.append(StepTimes(step, self._step_ns))
            self._step_ns = dict.fromkeys(MEASURED, 0)


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
        self._pending: deque[tuple[Any, Phase, int, bool | None]] = deque()
        """Events, with what ended there."""

    def _leave(self, counts: bool | None) -> None:
        self.since_ns = self._clock()
        if len(self._pending) < _PENDING_LIMIT:
            self._pending.append((self._record(), self.phase, self.step, counts))
        if counts is not None or len(self._pending) % _RESOLVE_PERIOD == 0:
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
            self._account(round(self._exact_ns), phase, step, counts)


def of(membership: Membership, device: Any = None) -> Stopwatch:
    """The stopwatch of this rank: one for a group, however many models it trains there."""
    watch = find(membership.group)
    if watch is None:
        is_cuda = device is not None and device.type == "cuda"
        watch = DeviceStopwatch(device) if is_cuda else Stopwatch()
        _notice_optimizers()
    if watch.membership() is not membership:
        watch.membership = weakref.ref(membership)
        watch.on_generation()
        membership.follow(watch.on_generation)
        _notice_collectives()
    return watch


def find(group: Any) -> Stopwatch | None:
    """The stopwatch of this rank in `group`, if it has one."""
    return _watches.get(group)


@contextmanager
def waiting(group: Any) -> Iterator[None]:
    """Inside, this rank waits for the others, whatever phase it was and will be in."""
    watch = find(group)
    if watch is None or watch.phase is Phase.WAIT or not watch.pauses:
        yield
        return
    phase = watch.phase
    watch.enter(Phase.WAIT)
    try:
        yield
    finally:
        watch.enter(phase)


_watches: weakref.WeakKeyDictionary[Any, Stopwatch] = weakref.WeakKeyDictionary()
"""By group, and as long as the group: models come and go at other times on every rank."""
_handles: list[Any] = []


def _all() -> set[Stopwatch]:
    # The references are taken at once: other threads may add theirs meanwhile.
    groups = [reference() for reference in _watches.keyrefs()]
    return {_watches[group] for group in groups if group is not None}


def _notice_optimizers() -> None:
    """Hear of every optimizer's steps; torch has hooks for that, which cost nothing until set."""
    if _handles:
        return
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    before = register_optimizer_step_pre_hook(lambda *_: _enter_here(Phase.OPTIMIZER))
    after = register_optimizer_step_post_hook(lambda *_: _enter_here(Phase.DATA))
    _handles.extend((before, after))


def _notice_collectives() -> None:
    """Have every collective that is waited for count as waiting."""
    from paceline.comm.collectives import tell_of_waiting  # with torch, which readers lack

    tell_of_waiting(waiting)


def _ignore_optimizers() -> None:
    """Let go of the hooks when the last group is gone."""
    if not _watches:
        while _handles:
            _handles.pop().remove()


def _enter_here(phase: Phase) -> None:
    """All stopwatches of this thread change their phase."""
    if sys.modules["torch"].compiler.is_compiling():
        return
    thread = threading.get_ident()
    for watch in _all():
        if watch.thread == thread:
            watch.enter(phase)
