"""What the engine tells while it works, and who listens.

The wrapper and the reducer call one method per event: a forward pass begins, a bucket is ready, the
sums have arrived. From that come the phases of the stopwatch, the spans of a recording, the
comparison of the ranks, and what a rank that stands still says about itself. An engine without
an observer tests one attribute and continues.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline import env
from paceline.comm import tree
from paceline.comm.membership import Membership
from paceline.observe import spans, stall, stopwatch, stragglers
from paceline.observe.phases import Phase
from paceline.observe.stopwatch import Awaited


class Awaitable(Protocol):
    """A sum under way. It may have `is_completed()` and `missing()` too."""

    def wait(self) -> None: ...


class Observer:
    """One model's engine, observed.

    forward_begins, forward_ends, backward_begins, bucket_starts ..., wait_for, step_ends
    """

    def __init__(self, membership: Membership, device: torch.device, compares: bool) -> None:
        self.watch = stopwatch.of(membership, device)
        self.detector = stragglers.of(membership, device) if compares else None
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
        if torch.is_grad_enabled():
            self.watch.on_forward()
        else:
            self.watch.enter(Phase.OTHER)

    def forward_ends(self, output: Any) -> None:
        """Note how many samples it had, too, by the length of what came out."""
        self.watch.enter(Phase.OTHER)
        recorder = spans.recorder()
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

    def bucket_starts(self, number: int, in_flight: Sequence[Awaitable], buffer: Tensor) -> None:
        """This rank's gradients of the bucket are ready; taken before the sum, which would wait."""
        recorder = spans.recorder()
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
        self, in_flight: Sequence[Awaitable], describe: Callable[[int], str], *, is_shadow: bool
    ) -> None:
        """Wait for the sums in order; this rank's own work is done, unless it had none."""
        watch, recorder = self.watch, spans.recorder()
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
        """One lane shows all transfers, so each begins when the one before it has ended."""
        begin = max(self._began_ns[self._arrived], self._arrived_ns)
        facts = {"step": self.watch.step, "bucket": self._arrived}
        self._arrived_ns = max(begin, now_ns)
        recorder.add(Phase.TRANSFER, begin, self._arrived_ns, facts)
        self._arrived += 1

    def step_ends(self) -> None:
        """Gradients are averaged: the same point on every rank, where all can compare notes."""
        if self.detector is not None:
            self.detector.on_step(self._membership, self._device)

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


def begin(membership: Membership, device: torch.device) -> Observer | None:
    """Observe a model of this rank, as far as anybody wants to know."""
    wishes = env.read_observation()
    rank, size = membership.rank, membership.size
    if wishes.trace_step and rank == 0 and not _asked_in_vain:
        _asked_in_vain.append(True)
        atexit.register(_say_what_was_not_recorded, wishes.trace_step)
    if wishes.timeline and not spans.is_on():
        place = env.read_placement()
        spans.start(wishes.timeline, rank if place is None else place.rank)
    recorder = spans.recorder()
    compares = wishes.blames and size > 1
    looks = wishes.stall_s and size > 1
    if recorder is None and not compares and not looks:
        return None
    observer = Observer(membership, device, compares)
    if recorder is not None:
        threads = torch.get_num_threads()
        recorder.tell({"size": size, "device": str(device), "threads": threads})
    if looks:
        stall.begin(observer.watch, wishes.stall_s)
    return observer


_asked_in_vain: list[bool] = []


def _say_what_was_not_recorded(step: int) -> None:
    """Nobody records a step of a loop that is all the script's own; it must not be silent."""
    if not {"paceline.run", "paceline.record.step"} & set(sys.modules):
        print(
            f"paceline: Step {step} was not recorded: --trace-step is for scripts with "
            f"paceline.Run. Here, put paceline.record_step(model, optimizer, step={step}, "
            "folder=...) around a step.",
            file=sys.stderr,
        )
