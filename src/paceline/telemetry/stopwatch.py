"""Where a rank's time goes: a stopwatch that is always in exactly one phase, and its observer.

The code that starts something else (the wrapper, the reducer, a hook on optimizers) calls
`enter(phase)`, so the phases of a step add up to the step. A step lasts from the moment the sums of
one backward have arrived until those of the next have: that moment is nearly the same on all ranks,
so a rank's own time since then can be compared with the others'.

The engine notifies an `Observer`, one method per event. From that come the phases of the stopwatch,
the spans of a recording, the comparison of the ranks, and the report of a rank that has stalled.
An engine without an observer only tests one attribute.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline import env
from paceline.group import Membership, Waits, find_tensors, follow_waits, runs_ahead
from paceline.telemetry import spans
from paceline.telemetry.phases import MEASURED, Phase
from paceline.torch_private import at_backward_end

KEPT_STEPS = 1000
"""The most steps that are kept; older ones have been compared long ago."""
_CPU = torch.device("cpu")
_PENDING_LIMIT = 4096  # where the device passes none of them any more
_RESOLVE_PERIOD = 64


Mark = tuple[int, Phase]
"""When a phase began, in nanoseconds, and which phase."""
StepTimes = dict[Phase, int]
"""Where one step's time went, in nanoseconds by measured phase."""


class Awaited(NamedTuple):
    """The sum that a rank is waiting for."""

    describe: Callable[[int], str]
    """Names a bucket."""
    bucket: int
    reduction: Any
    """May have `missing()`: the ranks that have not contributed, where the transport knows."""


class Stopwatch:
    """The phases of one rank, and its last steps.

        data -> forward -> other -> backward -> wait --(end_step)--> other -> optimizer -> data

    A change of phase is a mark, and marks are accounted for later: in the middle of a step a mark
    costs one `append`. `phase`, `since_ns`, `step` and `awaited` say where the rank is now, and may
    be read from other threads. Invariant: the phases of all steps add up to the time between the
    first and the last.
    """

    def __init__(self, clock: Callable[[], int] = spans.now_ns) -> None:
        self._marks: list[Mark] = [(clock(), Phase.OTHER)]
        """Changes that are not accounted for yet; the last one is the current phase."""
        self.mark: Callable[[Mark], None] = self._marks.append
        """A phase begins, at a time by `clock`. A caller that marks often must call `enter` now and
        then, which accounts for the marks gathered."""
        self.records = spans.current is not None
        """Whether spans were recorded when a phase was last accounted for."""
        self.after_update = Phase.DATA
        """The phase after an update. A loop written by the user is taken to fetch samples then; a
        `Run` marks fetching itself, and sets this to OTHER."""
        self.step = 0
        self.waits = Waits(clock)
        """Collectives, and what else waits for other ranks, inside phases."""
        self.awaited: Awaited | None = None
        """Set only while waiting, because it keeps the model alive."""
        self.thread = threading.get_ident()
        """The training thread: its optimizer steps count, and its stack shows where the rank is."""
        self.membership: Callable[[], Membership | None] = lambda: None
        """The rank's current group; a weak reference, because the group keeps the stopwatch."""
        self.detector: Any = None
        """The `StragglerDetector` that compares this rank with the others, if there is one."""
        self.stalls: Any = None
        """The `StallWatch` that notices when this rank makes no progress, if there is one."""
        self.finished: deque[StepTimes] = deque(maxlen=KEPT_STEPS)
        self.clock = clock
        self._accounted_ns = self.since_ns
        self._step_ns = dict.fromkeys(MEASURED, 0)
        self._total_ns = dict.fromkeys(MEASURED, 0)

    @property
    def phase(self) -> Phase:
        return Phase.WAIT if self.waits.since_ns else self._marks[-1][1]

    @property
    def since_ns(self) -> int:
        return self.waits.since_ns or max(self._marks[-1][0], self.waits.until_ns)

    def enter(self, phase: Phase) -> None:
        """Begin `phase`, and account for the phases before."""
        self.mark((self.clock(), phase))
        self._account()

    def end_step(self, *, counts: bool = True) -> None:
        """All sums of this step have arrived, or it has failed.

        A step that does not count, such as one without rows, is not kept for comparisons.
        """
        self._marks.append((self.clock(), Phase.OTHER))
        self._account(counts)
        self.awaited = None
        self.step += 1

    def on_generation(self) -> None:
        """Move the stopwatch to the group of a new generation."""
        membership = self.membership()
        if membership is not None:
            # Callbacks of weak references run newest first: registered before the dictionary's own,
            # this one runs after the entry is gone.
            weakref.finalize(membership.group, _remove_optimizer_hooks)
            _watches[membership.group] = self
            follow_waits(membership.group, self.waits)

    def totals(self) -> dict[str, float]:
        """Seconds by phase since the beginning, up to the last change of phase.

        On an accelerator these run a little behind, because the host does not wait for it.
        """
        if self.waits.over or len(self._marks) > 1:
            self._account()
        return {phase: (self._total_ns[phase] + self._step_ns[phase]) / 1e9 for phase in MEASURED}

    def _account(self, counts: bool | None = None) -> None:
        """Account for the phases that have ended; if the step did too, `counts` is not None."""
        if self.waits.over:
            self._insert_waits()
        ended = [(phase, end_ns) for (_, phase), (end_ns, _) in pairwise(self._marks)]
        del self._marks[:-1]  # the last phase has not ended
        self._end_phases(ended, self.step, counts)
        # While recording, every mark is accounted for at once: the file of a worker that is killed
        # is then complete up to its last change of phase.
        self.records = spans.current is not None
        self.mark = self._account_for if self.records else self._marks.append

    def _insert_waits(self) -> None:
        """Put the waits that are over between the marks: the phase around one continues after."""
        marks, waits = self._marks, self.waits
        for begin_ns, end_ns in waits.over:
            before = bisect_right(marks, begin_ns, key=itemgetter(0)) or 1
            phase = marks[before - 1][1]
            if phase is not Phase.WAIT:
                marks[before:before] = (begin_ns, Phase.WAIT), (end_ns, phase)
        waits.over.clear()

    def _account_for(self, mark: Mark) -> None:
        self._marks.append(mark)
        self._account()

    def _end_phases(
        self, ended: Sequence[tuple[Phase, int]], step: int, counts: bool | None
    ) -> None:
        """Phases have ended, each at its time; `counts` is not None if the step ended with them."""
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
                self.finished.append(self._step_ns)
            self._step_ns = dict.fromkeys(MEASURED, 0)


class DeviceStopwatch(Stopwatch):
    """The same for an accelerator, whose kernels run later than the host starts them.

    Every change of phase records an event on the stream in use; its time is read when the device
    has passed it, by which time the host is elsewhere. So the host never waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._module: Any = torch.get_device_module(device)
        # Events are reused: creating one takes longer than recording it.
        self._spare_events: list[Any] = []
        self._reached = self._record()
        self._reached.synchronize()  # once, to relate the device's clock to the host's
        self._accounted_ns = self.clock()
        self._exact_ns = float(self._accounted_ns)
        self._pending: deque[tuple[Any, Phase, int, bool | None]] = deque()
        """Recorded events that the device has not passed yet, with what ended at each."""
        self.mark = self._account_for  # each change needs an event on the device, at once

    def _account(self, counts: bool | None = None) -> None:
        if len(self._marks) > 1 and len(self._pending) < _PENDING_LIMIT:
            # There is exactly one phase to end, because `_account_for` handles each mark at once.
            self._pending.append((self._record(), self._marks[0][1], self.step, counts))
        del self._marks[:-1]
        # The host does not wait there: the device may be anywhere.
        self.waits.over.clear()
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
            # Sum differences of neighbours: milliseconds since the start, as a float32, lose
            # precision.
            self._exact_ns += self._reached.elapsed_time(event) * 1e6
            self._spare_events.append(self._reached)
            self._reached = event
            self._end_phases([(phase, round(self._exact_ns))], step, counts)


class Observer:
    """Receives the events of one model's engine.

    bucket_starts ..., wait_for, step_ends

    Between these the engine marks phases on `watch` directly. A sum in flight has `wait()`, and may
    have `is_completed()` and `missing()`.
    """

    def __init__(
        self, membership: Membership, device: torch.device, settings: env.Observation
    ) -> None:
        self.watch = get_stopwatch(membership, device)
        self._settings = settings
        self._membership = membership
        self._device = device
        self._began_ns: list[int] = []
        """When each bucket of this backward was ready."""
        self._arrived = 0
        """How many of their sums are known to have arrived."""
        self._arrived_ns = 0
        """When the last of these arrived."""
        self.on_generation()
        membership.follow(self.on_generation)

    def on_generation(self) -> None:
        """Start comparing ranks and watching for stalls, where the settings ask for it.

        A rank that was alone before, and had nothing to compare, starts in the same step as the
        ranks that join it.
        """
        settings, watch = self._settings, self.watch
        if self._membership.size == 1:
            return
        # Imported here because `stragglers` imports this module.
        from paceline.telemetry import stragglers

        if settings.blames and watch.detector is None:
            watch.detector = stragglers.StragglerDetector(watch, self._membership)
        if settings.stall_s and watch.stalls is None:
            watch.stalls = stragglers.StallWatch(watch, settings.stall_s)
            watch.stalls.start()

    def note_samples(self, output: Any) -> None:
        """Record how many samples a forward pass had: the length of its first output tensor."""
        recorder = spans.current
        samples = next((len(each) for each in find_tensors(output) if each.dim()), None)
        if recorder is not None and samples is not None and torch.is_grad_enabled():
            facts = {"step": self.watch.step, "samples": samples}
            recorder.add("batch", spans.now_ns(), None, facts)

    def bucket_starts(self, number: int, in_flight: Sequence[Any], buffer: Tensor) -> None:
        """This rank's gradients of the bucket are ready; called before its sum starts."""
        recorder, now = spans.current, spans.now_ns()
        if recorder is None:
            return
        if number == 0:
            self._began_ns.clear()
            self._arrived = self._arrived_ns = 0
        facts = {"step": self.watch.step, "bucket": number, "bytes": buffer.nbytes}
        recorder.add("ready", now, None, facts)
        # In order, up to the first that has not arrived.
        for reduction in in_flight[self._arrived :]:
            if not getattr(reduction, "is_completed", bool)():
                break
            self._note_arrival(recorder, now)
        self._began_ns.append(now)

    def wait_for(
        self, in_flight: Sequence[Any], describe: Callable[[int], str], *, is_shadow: bool
    ) -> bool:
        """Wait for the sums in order; `is_shadow`: this rank had no rows in this step.

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
        """Record a bucket's flight. All share one lane, so each begins where the previous ends."""
        begin = max(self._began_ns[self._arrived], self._arrived_ns)
        facts = {"step": self.watch.step, "bucket": self._arrived}
        self._arrived_ns = max(begin, now_ns)
        recorder.add(spans.IN_FLIGHT, begin, self._arrived_ns, facts)
        self._arrived += 1

    def step_ends(self) -> None:
        """Gradients are averaged: all ranks reach this point, so they may exchange their times."""
        if self.watch.detector is not None:
            self.watch.detector.after_step(self._membership, self._device)

    def observe_alone(self, output: Any, wants_sync: bool) -> None:
        """In a world of one there is no reducer: observe backward by hooks on the output."""
        watch = self.watch
        watch.mark((watch.clock(), Phase.OTHER))
        self.note_samples(output)
        step = watch.step
        ends = watch.end_step if wants_sync else lambda: watch.enter(watch.after_update)

        def on_output_grad(_grad: Tensor) -> None:
            if watch.step == step and watch.phase is not Phase.BACKWARD:
                watch.enter(Phase.BACKWARD)
                at_backward_end(ends)

        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output_grad)  # type: ignore[no-untyped-call]


def get_stopwatch(membership: Membership, device: torch.device = _CPU) -> Stopwatch:
    """The stopwatch of this rank, made on first use: one per group, whatever number of models."""
    watch = find_stopwatch(membership.group)
    if watch is None:
        watch = DeviceStopwatch(device) if runs_ahead(device) else Stopwatch()
        _install_hooks()
    if watch.membership() is not membership:
        watch.membership = weakref.ref(membership)
        watch.on_generation()
        membership.follow(watch.on_generation)
    return watch


def find_stopwatch(group: Any) -> Stopwatch | None:
    """The stopwatch of this rank in `group`, if it has one."""
    return _watches.get(group)


def begin_observing(membership: Membership, device: torch.device) -> Observer | None:
    """Observe a model of this rank, as far as environment and settings ask for it."""
    settings = env.read_observation()
    rank, size = membership.rank, membership.size
    if settings.trace_step and rank == 0:
        spans.expect_recording(settings.trace_step)
    if settings.timeline and not spans.spans_are_on():
        place = env.read_placement()
        spans.start_spans(settings.timeline, rank if place is None else place.rank)
    recorder = spans.current
    if recorder is None and (size == 1 or not (settings.blames or settings.stall_s)):
        return None
    observer = Observer(membership, device, settings)
    if recorder is not None:
        threads = torch.get_num_threads()
        recorder.describe_rank({"size": size, "device": str(device), "threads": threads})
    return observer


def note_waits(membership: Membership, device: torch.device) -> None:
    """Measure when this rank waits for others, for an engine without an `Observer`: the launcher
    needs it to tell a worker that hangs from those that wait for it."""
    if env.read_observation().stall_s:
        get_stopwatch(membership, device)


def _all_watches(*, of_thread: bool = False) -> list[Stopwatch]:
    """Those of this process, or of this thread; none while torch.compile traces."""
    if torch.compiler.is_compiling():
        return []
    thread = threading.get_ident()
    return [
        watch
        for key in _watches.keyrefs()  # a copy: other threads may add theirs meanwhile
        if (group := key()) is not None and (watch := _watches.get(group)) is not None
        if not of_thread or watch.thread == thread
    ]


_watches: weakref.WeakKeyDictionary[Any, Stopwatch] = weakref.WeakKeyDictionary()
"""By group, with its lifetime: models are made and freed at different times on each rank."""
_unhooks: list[Callable[[], None]] = []
"""What removes the hooks on optimizers."""


def last_change() -> tuple[int, bool] | None:
    """When this process last changed its phase, and whether it has waited for others since; None
    where nothing is measured, and where it waits for a process outside the group."""
    watches = _all_watches()
    if not watches or any(watch.waits.is_elsewhere for watch in watches):
        return None
    waits = any(watch.phase is Phase.WAIT for watch in watches)
    return max(watch.since_ns for watch in watches), waits


def _install_hooks() -> None:
    """Observe every optimizer's steps."""
    if not _unhooks:
        _unhooks.append(follow_optimizers(_on_update))
        _unhooks.append(follow_optimizers(_on_updated, after=True))


def _remove_optimizer_hooks() -> None:
    """Stop observing optimizers when the last group is gone."""
    while _unhooks and not _watches:
        _unhooks.pop()()


def _on_update(_optimizer: object) -> None:
    for watch in _all_watches(of_thread=True):
        watch.mark((watch.clock(), Phase.OPTIMIZER))


def _on_updated(_optimizer: object) -> None:
    for watch in _all_watches(of_thread=True):
        watch.enter(watch.after_update)


Follower = Callable[[Any], None]
"""Is called with the optimizer."""
_followers: dict[bool, tuple[Follower, ...]] = {False: (), True: ()}
"""Called before every optimizer step (False) and after it (True)."""
_changing = threading.Lock()


def follow_optimizers(follower: Follower, *, after: bool = False) -> Callable[[], None]:
    """Call `follower` before, or after, every step of any optimizer; returns what ends that.

    torch gets one hook for all followers, which is never removed: removing it while another thread
    iterates over torch's list of hooks would raise there.
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
    def notify(after: bool, optimizer: Any, *_: Any) -> None:
        for follower in _followers[after]:
            follower(optimizer)

    register_optimizer_step_pre_hook(partial(notify, False))
    register_optimizer_step_post_hook(partial(notify, True))
