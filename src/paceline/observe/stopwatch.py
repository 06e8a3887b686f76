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

import atexit
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline import env
from paceline.comm import tree
from paceline.comm.collectives import tell_of_waiting
from paceline.comm.membership import Membership
from paceline.observe import spans
from paceline.observe.phases import MEASURED, OWN, Phase

KEPT_STEPS = 1000
"""How many steps are remembered at most; older ones have been compared long ago."""
_CPU = torch.device("cpu")
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
        self.since_ns = self._clock()
        self._end_phase(self.since_ns, self.phase, self.step, None)
        self.phase = phase

    def end_step(self, *, counts: bool = True) -> None:
        """All sums of this step have arrived, or it has failed.

        A step that does not count was no work of this rank's own.
        """
        self.since_ns = self._clock()
        self._end_phase(self.since_ns, self.phase, self.step, counts)
        self.phase = Phase.OTHER
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

        On a CUDA device these run a little behind, because the host does not wait for it.
        """
        return {phase: (self._total_ns[phase] + self._step_ns[phase]) / 1e9 for phase in MEASURED}

    def _end_phase(self, end_ns: int, phase: Phase, step: int, counts: bool | None) -> None:
        """A phase has ended; where the step ended with it, `counts` says whether it counts."""
        begin_ns, self._accounted_ns = self._accounted_ns, end_ns
        self._step_ns[phase] += end_ns - begin_ns
        ends_step = counts is not None
        recorder = spans.current
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

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._spare_events: list[Any] = []
        self._reached = self._record()
        self._reached.synchronize()  # once: ties the device's clock to the host's
        self._accounted_ns = self._clock()
        self._exact_ns = float(self._accounted_ns)
        self._pending: deque[tuple[Any, Phase, int, bool | None]] = deque()
        """Events, with what ended there."""

    def _end_phase(self, end_ns: int, phase: Phase, step: int, counts: bool | None) -> None:
        if len(self._pending) < _PENDING_LIMIT:
            self._pending.append((self._record(), phase, step, counts))
        if counts is not None or len(self._pending) % _RESOLVE_PERIOD == 0:
            self._resolve()

    def _record(self) -> Any:
        if self._spare_events:
            event = self._spare_events.pop()
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _resolve(self) -> None:
        """Account for the changes that the device has passed, in order."""
        while self._pending and self._pending[0][0].query():
            event, phase, step, counts = self._pending.popleft()
            # Differences of neighbours, because milliseconds since the start lose precision.
            self._exact_ns += self._reached.elapsed_time(event) * 1e6
            self._spare_events.append(self._reached)
            self._reached = event
            super()._end_phase(round(self._exact_ns), phase, step, counts)


class Observer:
    """One model's engine, observed.

    forward_begins, forward_ends, backward_begins, bucket_starts ..., wait_for, step_ends

    A sum under way has `wait()`, and may have `is_completed()` and `missing()` too.
    """

    def __init__(self, membership: Membership, device: torch.device) -> None:
        self.watch = of(membership, device)
        self._membership = membership
        self._device = device
        self._began_ns: list[int] = []
        """When each bucket of this backward was ready, ..."""
        self._arrived = 0
        """... and how many of their sums are known to have arrived, ..."""
        self._arrived_ns = 0
        """... the last of them then."""

    def forward_comes(self) -> None:
        """Buffers are about to be brought up to date, which waits for the other ranks."""
        self.watch.enter(Phase.WAIT)

    def forward_begins(self) -> None:
        """In evaluation it is the user's own business."""
        trains = torch.is_grad_enabled()
        if trains:
            self.watch.thread = threading.get_ident()
        self.watch.enter(Phase.FORWARD if trains else Phase.OTHER)

    def forward_ends(self, output: Any) -> None:
        """Note how many samples it had, too, by the length of what came out."""
        self.watch.enter(Phase.OTHER)
        recorder = spans.current
        if recorder is not None and torch.is_grad_enabled():
            samples = next((len(each) for each in tree.tensors(output) if each.dim()), None)
            if samples is not None:
                facts = {"step": self.watch.step, "samples": samples}
                recorder.add("batch", spans.now_ns(), None, facts)

    def backward_begins(self) -> None:
        self.watch.enter(Phase.BACKWARD)
        self._began_ns.clear()
        self._arrived = self._arrived_ns = 0

    def local_backward_ends(self) -> None:
        """Nothing is sent: gradients accumulate, and the next thing is more data."""
        self.watch.enter(Phase.DATA)

    def bucket_starts(self, number: int, in_flight: Sequence[Any], buffer: Tensor) -> None:
        """This rank's gradients of the bucket are ready; taken before the sum, which would wait."""
        recorder = spans.current
        if recorder is None:
            return
        now = spans.now_ns()
        facts = {"step": self.watch.step, "bucket": number, "bytes": buffer.nbytes}
        recorder.add("ready", now, None, facts)
        for reduction in in_flight[self._arrived :]:  # up to the first that has not arrived
            if not getattr(reduction, "is_completed", bool)():
                break
            self._note_arrival(recorder, now)
        self._began_ns.append(now)

    def wait_for(
        self, in_flight: Sequence[Any], describe: Callable[[int], str], *, is_shadow: bool
    ) -> None:
        """Wait for the sums in order; this rank's own work is done, unless it had none."""
        watch, recorder = self.watch, spans.current
        watch.enter(Phase.WAIT)
        try:
            for number, reduction in enumerate(in_flight):
                watch.awaited = Awaited(describe, number, reduction)
                reduction.wait()
                if recorder is not None and number == self._arrived < len(self._began_ns):
                    self._note_arrival(recorder, spans.now_ns())
        finally:
            watch.end_step(counts=not is_shadow)

    def _note_arrival(self, recorder: spans.SpanRecorder, now_ns: int) -> None:
        """One lane shows all buckets, so each begins when the one before it has arrived."""
        begin = max(self._began_ns[self._arrived], self._arrived_ns)
        facts = {"step": self.watch.step, "bucket": self._arrived}
        self._arrived_ns = max(begin, now_ns)
        recorder.add(spans.IN_FLIGHT, begin, self._arrived_ns, facts)
        self._arrived += 1

    def step_ends(self) -> None:
        """Gradients are averaged: the same point on every rank, where all can compare notes."""
        detector = self.watch.detector
        if detector is not None:
            detector.steps += 1
            is_new = detector.group() is not self._membership.group
            if is_new or detector.steps >= detector.next_step:
                detector.compare(self._membership, self._device)

    def follow_alone(self, output: Any, wants_sync: bool) -> None:
        """In a world of one there is no reducer: hear of backward from the output itself."""
        self.forward_ends(output)
        watch = self.watch
        step = watch.step
        ends = watch.end_step if wants_sync else self.local_backward_ends

        def on_output_grad(_grad: Tensor) -> None:
            if watch.step == step and watch.phase is not Phase.BACKWARD:
                watch.enter(Phase.BACKWARD)
                torch.autograd.Variable._execution_engine.queue_callback(ends)

        for tensor in tree.tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output_grad)  # type: ignore[no-untyped-call]


def of(membership: Membership, device: torch.device = _CPU) -> Stopwatch:
    """The stopwatch of this rank: one for a group, however many models it trains there."""
    watch = find(membership.group)
    if watch is None:
        watch = DeviceStopwatch(device) if device.type == "cuda" else Stopwatch()
        _notice_waiting_and_optimizers()
    if watch.membership() is not membership:
        watch.membership = weakref.ref(membership)
        watch.on_generation()
        membership.follow(watch.on_generation)
    return watch


def find(group: Any) -> Stopwatch | None:
    """The stopwatch of this rank in `group`, if it has one."""
    return _watches.get(group)


def begin(membership: Membership, device: torch.device) -> Observer | None:
    """Observe a model of this rank, as far as anybody wants to know."""
    wishes = env.read_observation()
    rank, size = membership.rank, membership.size
    if wishes.trace_step and rank == 0:
        atexit.unregister(_say_what_was_not_recorded)
        atexit.register(_say_what_was_not_recorded, wishes.trace_step)
    if wishes.timeline and not spans.is_on():
        place = env.read_placement()
        spans.start(wishes.timeline, rank if place is None else place.rank)
    recorder = spans.current
    compares = wishes.blames and size > 1
    looks = wishes.stall_s and size > 1
    if recorder is None and not compares and not looks:
        return None
    # These two look at stopwatches, so they import this module.
    from paceline.observe import stall, stragglers

    observer = Observer(membership, device)
    if compares and observer.watch.detector is None:
        observer.watch.detector = stragglers.StragglerDetector(observer.watch)
    if recorder is not None:
        threads = torch.get_num_threads()
        recorder.tell({"size": size, "device": str(device), "threads": threads})
    if looks:
        stall.begin(observer.watch, wishes.stall_s)
    return observer


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


def _notice_waiting_and_optimizers() -> None:
    """Hear of collectives that are waited for, and of every optimizer's steps."""
    tell_of_waiting(waiting)
    if not _handles:
        before = register_optimizer_step_pre_hook(partial(_enter_here, Phase.OPTIMIZER))
        after = register_optimizer_step_post_hook(partial(_enter_here, Phase.DATA))
        _handles.extend((before, after))


def _ignore_optimizers() -> None:
    """Let go of the hooks when the last group is gone."""
    if not _watches:
        while _handles:
            _handles.pop().remove()


def _enter_here(phase: Phase, *_: object) -> None:
    """All stopwatches of this thread change their phase."""
    if torch.compiler.is_compiling():
        return
    thread = threading.get_ident()
    for reference in _watches.keyrefs():  # taken at once: other threads may add theirs meanwhile
        group = reference()
        watch = None if group is None else _watches.get(group)
        if watch is not None and watch.thread == thread:
            watch.enter(phase)


def note_recorder() -> None:
    """Somebody here records steps: a run, or the script itself."""
    _recorders.append(True)


_recorders: list[bool] = []


def _say_what_was_not_recorded(step: int) -> None:
    """Nobody records a step of a loop that is all the script's own; it must not be silent."""
    if not _recorders:
        print(
            f"paceline: Step {step} was not recorded: --trace-step is for scripts with "
            f"paceline.Run. Here, put paceline.record_step(model, optimizer, step={step}, "
            "folder=...) around a step.",
            file=sys.stderr,
        )
