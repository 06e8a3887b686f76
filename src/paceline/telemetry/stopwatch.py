"""What a rank's time goes to: a stopwatch that is always in exactly one phase, and its observer.

Whoever knows that something else begins (the wrapper, the reducer, a hook on optimizers) says
`enter(phase)`; so the phases of a step add up to the step. A step reaches from the moment the sums
of one backward have arrived to the moment those of the next have: that moment is nearly the same
on all ranks, and so a rank's own time since then can be compared with the others'.

The engine tells an `Observer` what happens, one method per event. From that come the phases of the
stopwatch, the spans of a recording, the comparison of the ranks, and what a rank that stands still
says about itself. An engine without an observer tests one attribute and continues.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline import env
from paceline.group import Membership, find_tensors, runs_ahead, tell_of_waiting
from paceline.telemetry import spans
from paceline.telemetry.phases import MEASURED, Phase
from paceline.torch_private import at_backward_end

KEPT_STEPS = 1000
"""How many steps are remembered at most; older ones have been compared long ago."""
_CPU = torch.device("cpu")
_PENDING_LIMIT = 4096
_RESOLVE_PERIOD = 64


Mark = tuple[int, Phase]
"""When a phase began, in nanoseconds, and which."""


class StepTimes(NamedTuple):
    """Where one step's time went, in nanoseconds by measured phase."""

    step: int
    ns_by_phase: dict[Phase, int]


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

    A change of phase is a mark, and marks are accounted for later: in the middle of a step noting
    one is an `append`. `phase`, `since_ns`, `step` and `awaited` say where the rank is now, for
    whoever looks from another thread. Invariant: the phases of all steps add up to the time
    between the first and the last.
    """

    pauses = True
    """Whether a change costs so little that every single collective can be told from work."""

    def __init__(self, clock: Callable[[], int] = spans.now_ns) -> None:
        self._marks: list[Mark] = [(clock(), Phase.OTHER)]
        """Changes that are not accounted for yet; the last one says where the rank is."""
        self.mark: Callable[[Mark], None] = self._marks.append
        """A phase begins, at a time by `clock`. Whoever marks often calls `enter` now and
        then, which accounts for what has gathered."""
        self.records = spans.current is not None
        """Whether spans were recorded when a phase was last accounted for."""
        self.between = Phase.DATA
        """What comes after an update: a loop that is all the user's own fetches samples, as far as
        anybody can know. A `Run` says when it does, and the rest is the user's code."""
        self.step = 0
        self.waits = False
        """Whether it is in a collective that is too short to be a phase, as on a GPU."""
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
        self.clock = clock
        self._accounted_ns = self.since_ns
        self._step_ns = dict.fromkeys(MEASURED, 0)
        self._total_ns = dict.fromkeys(MEASURED, 0)

    @property
    def phase(self) -> Phase:
        return self._marks[-1][1]

    @property
    def since_ns(self) -> int:
        return self._marks[-1][0]

    def enter(self, phase: Phase) -> None:
        """What is done from now on belongs to `phase`; what was before is accounted for."""
        self.mark((self.clock(), phase))
        self._account()

    def end_step(self, *, counts: bool = True) -> None:
        """All sums of this step have arrived, or it has failed.

        A step that does not count was no work of this rank's own.
        """
        self._marks.append((self.clock(), Phase.OTHER))
        self._account(counts)
        self.awaited = None
        self.step += 1

    def on_generation(self) -> None:
        """The ranks are in another group from now on."""
        membership = self.membership()
        if membership is not None:
            # Set before the entry is made, so that it is called after the entry is gone.
            weakref.finalize(membership.group, _ignore_optimizers)
            _watches[membership.group] = self

    def totals(self) -> dict[str, float]:
        """Seconds by phase since the beginning, up to the last change; take the difference of two.

        On an accelerator these run a little behind, because the host does not wait for it.
        """
        self._account()
        return {phase: (self._total_ns[phase] + self._step_ns[phase]) / 1e9 for phase in MEASURED}

    def _account(self, counts: bool | None = None) -> None:
        """Account for the phases that have ended; if the step did too, `counts` is not None."""
        ended = [(phase, end_ns) for (_, phase), (end_ns, _) in pairwise(self._marks)]
        del self._marks[:-1]
        self._end_phases(ended, self.step, counts)
        # A recording is complete up to the moment in which a worker is killed.
        self.records = spans.current is not None
        self.mark = self._account_for if self.records else self._marks.append

    def _account_for(self, mark: Mark) -> None:
        self._marks.append(mark)
        self._account()

    def _end_phases(
        self, ended: Sequence[tuple[Phase, int]], step: int, counts: bool | None
    ) -> None:
        """Phases have ended, each at its time; if the step did with the last, `counts` is told."""
        recorder, last = spans.current, len(ended) - 1
        for number, (phase, end_ns) in enumerate(ended):
            begin_ns, self._accounted_ns = self._accounted_ns, end_ns
            self._step_ns[phase] += end_ns - begin_ns
            ends_step = counts is not None and number == last
            if recorder is not None and (phase is not Phase.OTHER or ends_step):
                facts = {"step": step, "last": True} if ends_step else {"step": step}
                recorder.add(phase, begin_ns, end_ns, facts)
        if counts is not None:
            for each, ns in self._step_ns.items():
                self._total_ns[each] += ns
            if counts:
                self.finished.append(StepTimes(step, self._step_ns))
            self._step_ns = dict.fromkeys(MEASURED, 0)


class DeviceStopwatch(Stopwatch):
    """The same for an accelerator, whose kernels run later than the host starts them.

    Every change of phase records an event on the stream in use; its time is read when the device
    has passed it, by which time the host is elsewhere. So the host never waits for the device.
    """

    pauses = False

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._spare_events: list[Any] = []
        self._reached = self._record()
        self._reached.synchronize()  # once: ties the device's clock to the host's
        self._accounted_ns = self.clock()
        self._exact_ns = float(self._accounted_ns)
        self._pending: deque[tuple[Any, Phase, int, bool | None]] = deque()
        """Events, with what ended there."""
        self.mark = self._account_for  # the device is asked for the time of each change

    def _account(self, counts: bool | None = None) -> None:
        if len(self._marks) > 1 and len(self._pending) < _PENDING_LIMIT:
            # One at a time, because every mark comes here at once.
            self._pending.append((self._record(), self._marks[0][1], self.step, counts))
        del self._marks[:-1]
        self.records = spans.current is not None
        if counts is not None or len(self._pending) % _RESOLVE_PERIOD == 0:
            self._resolve()

    def _record(self) -> Any:
        if self._spare_events:
            event = self._spare_events.pop()
        else:
            event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def _resolve(self) -> None:
        """Account for the changes that the device has passed, in order."""
        while self._pending and self._pending[0][0].query():
            event, phase, step, counts = self._pending.popleft()
            # Differences of neighbours, because milliseconds since the start lose precision.
            self._exact_ns += self._reached.elapsed_time(event) * 1e6
            self._spare_events.append(self._reached)
            self._reached = event
            self._end_phases([(phase, round(self._exact_ns))], step, counts)


class Observer:
    """One model's engine, observed.

    bucket_starts ..., wait_for, step_ends

    Between these the engine marks what begins on `watch` itself. A sum under way has `wait()`, and
    may have `is_completed()` and `missing()` too.
    """

    def __init__(
        self, membership: Membership, device: torch.device, wishes: env.Observation
    ) -> None:
        self.watch = of(membership, device)
        self._wishes = wishes
        self._membership = membership
        self._device = device
        self._began_ns: list[int] = []
        """When each bucket of this backward was ready, ..."""
        self._arrived = 0
        """... and how many of their sums are known to have arrived, ..."""
        self._arrived_ns = 0
        """... the last of them then."""
        self.on_generation()
        membership.follow(self.on_generation)

    def on_generation(self) -> None:
        """Compare the pace of several ranks, and notice who stands still, if that is wanted.

        Whoever was alone before, and had nothing to compare, does so from the same step on as those
        it joins.
        """
        wishes, watch = self._wishes, self.watch
        if self._membership.size == 1:
            return
        # It looks at stopwatches, so it imports this module.
        from paceline.telemetry import stragglers

        if wishes.blames and watch.detector is None:
            watch.detector = stragglers.StragglerDetector(watch, self._membership)
        if wishes.stall_s and watch.stalls is None:
            stragglers.begin_stall_watch(watch, wishes.stall_s)

    def note_samples(self, output: Any) -> None:
        """Record how many samples a forward pass had, by the length of what came out."""
        recorder = spans.current
        samples = next((len(each) for each in find_tensors(output) if each.dim()), None)
        if recorder is not None and samples is not None and torch.is_grad_enabled():
            facts = {"step": self.watch.step, "samples": samples}
            recorder.add("batch", spans.now_ns(), None, facts)

    def bucket_starts(self, number: int, in_flight: Sequence[Any], buffer: Tensor) -> None:
        """This rank's gradients of the bucket are ready; taken before the sum, which would wait."""
        recorder, now = spans.current, spans.now_ns()
        if recorder is None:
            return
        if number == 0:
            self._began_ns.clear()
            self._arrived = self._arrived_ns = 0
        facts = {"step": self.watch.step, "bucket": number, "bytes": buffer.nbytes}
        recorder.add("ready", now, None, facts)
        for reduction in in_flight[self._arrived :]:  # up to the first that has not arrived
            if not getattr(reduction, "is_completed", bool)():
                break
            self._note_arrival(recorder, now)
        self._began_ns.append(now)

    def wait_for(
        self, in_flight: Sequence[Any], describe: Callable[[int], str], *, is_shadow: bool
    ) -> bool:
        """Wait for the sums in order; this rank's own work is done, unless it had none.

        Returns whether `step_ends` has something to do.
        """
        watch, recorder = self.watch, spans.current
        watch.mark((watch.clock(), Phase.WAIT))
        try:
            for number, reduction in enumerate(in_flight):
                watch.awaited = Awaited(describe, number, reduction)
                reduction.wait()
                if recorder is not None and number == self._arrived < len(self._began_ns):
                    self._note_arrival(recorder, spans.now_ns())
        finally:
            watch.end_step(counts=not is_shadow)
        return watch.detector is not None and watch.step >= watch.detector.cadence.next_step

    def _note_arrival(self, recorder: spans.SpanRecorder, now_ns: int) -> None:
        """One lane shows all buckets, so each begins when the one before it has arrived."""
        begin = max(self._began_ns[self._arrived], self._arrived_ns)
        facts = {"step": self.watch.step, "bucket": self._arrived}
        self._arrived_ns = max(begin, now_ns)
        recorder.add(spans.IN_FLIGHT, begin, self._arrived_ns, facts)
        self._arrived += 1

    def step_ends(self) -> None:
        """Gradients are averaged: the same point on every rank, where all can compare notes."""
        watch, detector = self.watch, self.watch.detector
        if detector is not None and watch.step >= detector.cadence.next_step:
            detector.after_step(self._membership, self._device)

    def follow_alone(self, output: Any, wants_sync: bool) -> None:
        """In a world of one there is no reducer: hear of backward from the output itself."""
        watch = self.watch
        watch.mark((watch.clock(), Phase.OTHER))
        self.note_samples(output)
        step = watch.step
        ends = watch.end_step if wants_sync else lambda: watch.enter(watch.between)

        def on_output_grad(_grad: Tensor) -> None:
            if watch.step == step and watch.phase is not Phase.BACKWARD:
                watch.enter(Phase.BACKWARD)
                at_backward_end(ends)

        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output_grad)  # type: ignore[no-untyped-call]


def of(membership: Membership, device: torch.device = _CPU) -> Stopwatch:
    """The stopwatch of this rank: one for a group, however many models it trains there."""
    watch = find_stopwatch(membership.group)
    if watch is None:
        watch = DeviceStopwatch(device) if runs_ahead(device) else Stopwatch()
        _notice_waiting_and_optimizers()
    if watch.membership() is not membership:
        watch.membership = weakref.ref(membership)
        watch.on_generation()
        membership.follow(watch.on_generation)
    return watch


def find_stopwatch(group: Any) -> Stopwatch | None:
    """The stopwatch of this rank in `group`, if it has one."""
    return _watches.get(group)


def begin_observing(membership: Membership, device: torch.device) -> Observer | None:
    """Observe a model of this rank, as far as anybody wants to know."""
    wishes = env.read_observation()
    rank, size = membership.rank, membership.size
    if wishes.trace_step and rank == 0:
        spans.expect_recorder(wishes.trace_step)
    if wishes.timeline and not spans.spans_are_on():
        place = env.read_placement()
        spans.start_spans(wishes.timeline, rank if place is None else place.rank)
    recorder = spans.current
    if recorder is None and (size == 1 or not (wishes.blames or wishes.stall_s)):
        return None
    observer = Observer(membership, device, wishes)
    if recorder is not None:
        threads = torch.get_num_threads()
        recorder.tell({"size": size, "device": str(device), "threads": threads})
    return observer


def note_waits(membership: Membership, device: torch.device) -> None:
    """Know when this rank waits for others, for a launcher that ends workers which hang: for
    engines that observe nothing themselves."""
    if env.read_observation().stall_s:
        of(membership, device)


@contextmanager
def waiting(group: Any) -> Iterator[None]:
    """Inside, this rank waits for the others, whatever phase it was and will be in."""
    watch = find_stopwatch(group)
    if watch is None or watch.phase is Phase.WAIT:
        yield
        return
    phase = watch.phase
    watch.waits = True
    if watch.pauses:
        watch.enter(Phase.WAIT)
    try:
        yield
    finally:
        watch.waits = False
        if watch.pauses:
            watch.enter(phase)


def where() -> tuple[int, bool] | None:
    """When this process last changed a phase, and whether it waits for others since; None where
    nothing is measured."""
    watches = _all_watches()
    if not watches:
        return None
    waits = any(watch.waits or watch.phase is Phase.WAIT for watch in watches)
    return max(watch.since_ns for watch in watches), waits


def _all_watches(*, of_thread: bool = False) -> list[Stopwatch]:
    """Those of this process, or of this thread; none inside a graph of the compiler's."""
    if torch.compiler.is_compiling():
        return []
    thread = threading.get_ident()
    return [
        watch
        for key in _watches.keyrefs()  # all at once: other threads may add theirs
        if (group := key()) is not None and (watch := _watches.get(group)) is not None
        if not of_thread or watch.thread == thread
    ]


_watches: weakref.WeakKeyDictionary[Any, Stopwatch] = weakref.WeakKeyDictionary()
"""By group, and as long as the group: models come and go at other times on every rank."""
_stops: list[Callable[[], None]] = []


def _notice_waiting_and_optimizers() -> None:
    """Hear of collectives that are waited for, and of every optimizer's steps."""
    tell_of_waiting(waiting)
    if not _stops:
        _stops.append(follow_optimizers(_on_update))
        _stops.append(follow_optimizers(_on_updated, after=True))


def _ignore_optimizers() -> None:
    """Hear no more of optimizers when the last group is gone."""
    while _stops and not _watches:
        _stops.pop()()


def _on_update(_optimizer: object) -> None:
    for watch in _all_watches(of_thread=True):
        watch.mark((watch.clock(), Phase.OPTIMIZER))


def _on_updated(_optimizer: object) -> None:
    for watch in _all_watches(of_thread=True):
        watch.enter(watch.between)


Follower = Callable[[Any], None]
"""Is given the optimizer."""
_followers: dict[bool, tuple[Follower, ...]] = {False: (), True: ()}
"""Who hears of optimizers before their steps and, under True, after them."""
_changing = threading.Lock()


def follow_optimizers(follower: Follower, *, after: bool = False) -> Callable[[], None]:
    """Call this before, or after, every step of any optimizer; what is returned ends that.

    torch has one hook for all of them, for good: another thread may be going through its list.
    """
    _hook_optimizers()
    with _changing:
        _followers[after] = (*_followers[after], follower)

    def stop() -> None:
        with _changing:
            _followers[after] = tuple(each for each in _followers[after] if each is not follower)

    return stop


@cache
def _hook_optimizers() -> None:
    def tell(after: bool, optimizer: Any, *_: Any) -> None:
        for follower in _followers[after]:
            follower(optimizer)

    register_optimizer_step_pre_hook(partial(tell, False))
    register_optimizer_step_post_hook(partial(tell, True))
