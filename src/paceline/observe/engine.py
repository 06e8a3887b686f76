"""What the engine tells while it works, and who listens.

The wrapper and the reducer call one method per event: a forward pass begins, a bucket is ready, the
sums have arrived. From that come the phases of the stopwatch, the spans of a recording, the
comparison of the ranks, and what a rank that stands still says about itself. An engine without
an observer tests one attribute and goes on.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline import env
from paceline.comm import Group, tree
from paceline.gradients.backward import Reduction
from paceline.observe import pace, spans, stall, stopwatch
from paceline.observe.pace import Comparison
from paceline.observe.stopwatch import WAIT


class Observer:
    """One model's engine, observed.

    forward_begins, forward_ends, backward_begins, bucket_starts ..., wait_for, step_ends
    """

    def __init__(self, group: Group, device: torch.device, compares: bool) -> None:
        self.watch = stopwatch.of(group, device)
        self.comparison: Comparison | None = pace.of(group, device) if compares else None
        self._group = group
        self._device = device
        self._transfers = _Transfers()

    def forward_comes(self) -> None:
        """Buffers are about to be brought up to date, which waits for the other ranks."""
        self.watch.enter(WAIT)

    def forward_begins(self) -> None:
        """In evaluation it is the user's own business."""
        if torch.is_grad_enabled():
            self.watch.on_forward()
        else:
            self.watch.enter("other")

    def forward_ends(self, output: Any) -> None:
        self.watch.enter("other")
        self._note_batch(output)

    def backward_begins(self) -> None:
        self.watch.enter("backward")
        self._transfers.clear()

    def local_backward_ends(self) -> None:
        """Nothing is sent: gradients accumulate, and the next thing is more data."""
        self.watch.enter("data")

    def bucket_starts(self, number: int, in_flight: Sequence[Reduction], buffer: Tensor) -> None:
        """This rank's gradients of the bucket are ready; taken before the sum, which would wait."""
        recorder = spans.recorder()
        if recorder is not None:
            now = spans.now_ns()
            facts = {"step": self.watch.step, "bucket": number, "bytes": buffer.nbytes}
            recorder.add("ready", now, None, facts)
            self._transfers.look(in_flight, now)
            self._transfers.began.append(now)

    def wait_for(
        self, in_flight: Sequence[Reduction], describe: Callable[[int], str], *, is_shadow: bool
    ) -> None:
        """Wait for the sums in order; this rank's own work is done, unless it had none."""
        watch, is_recording = self.watch, spans.is_on()
        watch.enter(WAIT)
        watch.waits_for = describe
        try:
            for number, reduction in enumerate(in_flight):
                watch.bucket = number
                watch.missing = getattr(reduction, "missing", None)
                reduction.wait()
                if is_recording:
                    self._transfers.arrived(number, spans.now_ns())
        finally:
            step = watch.step
            watch.end_step(counts=not is_shadow)
        recorder = spans.recorder()
        if recorder is not None:
            self._transfers.write(recorder, step)

    def step_ends(self) -> None:
        """Gradients are averaged: the same point on every rank, where all can compare notes."""
        if self.comparison is not None:
            self.comparison.on_step(self._group, self._device)

    def follow_alone(self, output: Any, wants_sync: bool) -> None:
        """In a world of one there is no reducer: hear of backward from the output itself."""
        self.forward_ends(output)
        watch = self.watch
        step = watch.step
        ends = watch.end_step if wants_sync else self.local_backward_ends

        def on_output_grad(_grad: Tensor) -> None:
            if watch.step == step and watch.phase != "backward":
                watch.enter("backward")
                torch.autograd.Variable._execution_engine.queue_callback(ends)

        for tensor in tree.tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output_grad)  # type: ignore[no-untyped-call]

    def _note_batch(self, output: Any) -> None:
        """How many samples a forward pass had, by the length of what came out."""
        recorder = spans.recorder()
        if recorder is not None and torch.is_grad_enabled():
            lengths = (len(tensor) for tensor in tree.tensors(output) if tensor.dim())
            samples = next(lengths, None)
            if samples is not None:
                facts = {"step": self.watch.step, "samples": samples}
                recorder.add("batch", spans.now_ns(), None, facts)


class _Transfers:
    """When each bucket of a step was on its way, as far as this rank can tell.

    One lane shows them, so each begins when the one before it has ended.
    """

    def __init__(self) -> None:
        self.began: list[int] = []
        self._ended: list[int] = []
        """Of the first buckets, as far as they are known to have arrived."""

    def clear(self) -> None:
        self.began.clear()
        self._ended.clear()

    def look(self, in_flight: Sequence[Reduction], now_ns: int) -> None:
        """Notice which earlier sums have arrived meanwhile, up to the first that has not."""
        for reduction in in_flight[len(self._ended) :]:
            if not getattr(reduction, "is_completed", _never)():
                return
            self._ended.append(now_ns)

    def arrived(self, number: int, now_ns: int) -> None:
        if number == len(self._ended):
            self._ended.append(now_ns)

    def write(self, recorder: spans.Recorder, step: int) -> None:
        before = 0
        for number, began in enumerate(self.began):
            ended = max(before, self._ended[number] if number < len(self._ended) else began)
            facts = {"step": step, "bucket": number}
            recorder.add("transfer", max(before, began), ended, facts)
            before = ended
        self.clear()


def _never() -> bool:
    return False


def begin(group: Group, device: torch.device) -> Observer | None:
    """Observe a model of this rank in `group`, as far as anybody wants to know."""
    wishes = env.read_observation()
    if wishes.trace_step and group.rank() == 0 and not _asked_in_vain:
        _asked_in_vain.append(True)
        atexit.register(_say_what_was_not_recorded, wishes.trace_step)
    if wishes.timeline and not spans.is_on():
        place = env.read_placement()
        spans.start(wishes.timeline, group.rank() if place is None else place.rank)
    is_alone = group.size() == 1
    compares = wishes.blames and not is_alone
    if not (compares or wishes.stall_s or spans.is_on()) or (is_alone and not spans.is_on()):
        return None
    observer = Observer(group, device, compares)
    recorder = spans.recorder()
    if recorder is not None:
        threads = torch.get_num_threads()
        recorder.tell({"size": group.size(), "device": str(device), "threads": threads})
    if wishes.stall_s and not is_alone:
        stall.begin(group, observer.watch, wishes.stall_s)
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
