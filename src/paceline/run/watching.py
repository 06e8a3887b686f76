"""What a worker has watched of its run: a recorded step, when it does what, who is slow.

Nothing here fails a training: what cannot be watched is said.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline import env, record
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.files import EventWriter, RunFolder
from paceline.group import Membership
from paceline.record import StepRecording
from paceline.run.config import RunConfig
from paceline.telemetry import (
    Blame,
    Message,
    Sinks,
    Stopwatch,
    StragglerDetector,
    find_stopwatch,
    register_recorder,
    seconds_text,
    spans_are_on,
    start_spans,
    stop_spans,
)

if TYPE_CHECKING:
    from paceline.run.parts import RunProgress

EXPLAINED = 1.25
"""A worker with twice the shards of others is not slow if it takes up to 2 * 1.25 of their time."""
LOOK_PERIOD_S = 0.25
"""How often a run looks at most whether a step is to be recorded."""


class Watching:
    """One worker's part of watching a run.

        made --start_timeline--> spans are recorded --begin--> blame is reported --end--> as before

    Invariant: what was started elsewhere, by hand or by `paceline run --timeline`, is left to
    them.
    """

    def __init__(self, config: RunConfig, folder: RunFolder | None, membership: Membership) -> None:
        self.lines: list[str] = []
        """What is to be said about it when the loop begins."""
        self._asked = env.read_observation()
        if self._asked.trace_step:
            register_recorder()
        self.trace_step = config.options.trace_step or self._asked.trace_step
        """The step to be recorded stage by stage; 0 for none."""
        self.steps_to_record = {self.trace_step}
        """That one, and the one that all workers have agreed to record because a viewer asked."""
        self._look_due_s = 0.0
        self._can_record = True
        self._config, self._folder, self._membership = config, folder, membership
        self._dataset: Any = None
        self._has_timeline = False
        self._before: tuple[StragglerDetector, Any] | None = None
        self._sinks: Sinks | None = None
        self._progress: RunProgress | None = None
        self.watch: Stopwatch | None = None
        """What measures this worker's phases, if anything does."""
        self._rank = 0
        """Whose events it writes; a worker that moves on to another group keeps its file."""
        if folder is None:
            if self.trace_step:
                self._say_why_not("that needs folder= of Run")
            if config.options.timeline:
                self.lines.append("There is no timeline: that needs folder= of Run.")

    def note(self, engine: object, step: int, steps: int | None) -> None:
        """The run continues after `step` steps of all `steps`, which may leave none to record.

        Without `steps` it is a stream, whose samples have no numbers. Stages are known of one
        engine only.
        """
        self._can_record = isinstance(engine, DistributedDataParallel)
        if self.trace_step and not self._can_record:
            self._say_why_not(f"{type(engine).__name__} has no stages to record")
        self._dataset = None if steps is None else self._config.dataset
        if 0 < self.trace_step <= step:
            self._say_why_not("it is applied already")
        elif steps is not None and self.trace_step > steps:
            self._say_why_not(f"the run has {steps} steps")

    def _say_why_not(self, reason: str) -> None:
        self.lines.append(f"Step {self.trace_step} is not recorded: {reason}.")
        self.trace_step, self.steps_to_record = 0, set()

    def is_asked(self) -> bool:
        """Whether the next step is to be recorded; looks for the request now and then."""
        now_s = time.monotonic()
        if self._folder is None or not self._can_record or now_s < self._look_due_s:
            return False
        self._look_due_s = now_s + LOOK_PERIOD_S
        return os.path.lexists(self._folder.record_request)

    def record_as_asked(self, step: int) -> None:
        """All workers have agreed to record `step`; the one who asked is answered."""
        self.steps_to_record = {self.trace_step, step}
        self.forget_request()

    def forget_request(self) -> None:
        """Delete the pending record request."""
        if self._folder is not None and self._membership.leads:
            with contextlib.suppress(OSError):
                os.unlink(self._folder.record_request)

    def on_generation(self) -> None:
        """Who is new has not agreed to anything; the engine has a stopwatch for the new group."""
        self.steps_to_record = {self.trace_step}
        if self._sinks is not None:
            self._attend()

    def start_timeline(self, rank: int) -> None:
        """Record spans from now on; an engine that is alone looks only when it is made."""
        self._rank = rank
        if self._folder is None or not self._config.options.timeline or self._asked.timeline:
            return
        if spans_are_on():
            return
        try:
            start_spans(self._folder.timeline, rank)
            self._has_timeline = True
        except (OSError, UsageError) as error:
            self.lines.append(f"There is no timeline: {error}")

    def begin(self, sinks: Sinks, progress: RunProgress) -> None:
        """Let the straggler detector speak through the run, which may be drawing a bar."""
        self.forget_request()  # made when no run was there
        if self._folder is not None and self._membership.leads:
            env.announce_folder(str(self._folder.path))
        self._sinks, self._progress = sinks, progress
        self._attend()

    def _attend(self) -> None:
        """What watches a worker that was alone before is made when it joins others."""
        watch = self.watch = find_stopwatch(self._membership.group)
        if watch is not None and watch.stalls is not None and self._folder is not None:
            watch.stalls.keep = partial(_keep_stall, self._folder, self._rank)
        detector = None if watch is None else watch.detector
        if detector is not None and self._sinks is not None and self._before is None:
            self._before = detector, detector.on_blame
            detector.on_blame = self._report
            detector.cadence.on_generation()  # with the first step of this run, on every worker

    def _report(self, steps: int, blame: Blame) -> None:
        step = steps - 1  # the stopwatch has begun the next one
        size, shards = self._membership.size, self._progress.shards if self._progress else 1
        own, others = len(range(blame.rank, shards, size)), shards // size
        blame = replace(blame, rank=self._membership.numbers[blame.rank])
        text = str(blame)
        if 0 < others < own and blame.phase_s < EXPLAINED * own / others * blame.others_phase_s:
            text = (
                f"Worker {blame.rank} computes {own} of {shards} shards, others {others}. All "
                f"wait for it, {seconds_text(blame.slower_by_s)} in each of the last {blame.steps} "
                "steps. Use a number of workers that divides the number of shards."
            )
        facts = {
            "step": step,
            "slow_rank": blame.rank,
            "phase": blame.phase,
            "slower_by_s": blame.slower_by_s,
            "steps": blame.steps,
        }
        message = Message(f"Step {step}: {text}", "warning", "blame", facts)
        if self._sinks is not None:
            self._sinks.tell("message", message)

    def end(self) -> None:
        """Leave everything as it was; may be called twice."""
        self._sinks = None
        if self._before is not None:
            detector, tell = self._before
            detector.on_blame = tell
            self._before = None
        if self._has_timeline:
            self._has_timeline = False
            stop_spans()

    @contextmanager
    def recording(self, number: int, model: Any, indices: Sequence[int]) -> Iterator[StepRecording]:
        """Put this around step `number`, of which this worker computes samples `indices`."""
        folder = self._folder
        with record.record_step(
            model, self._config.optimizer, step=number, dataset=self._dataset
        ) as recording:
            recording.why_passes = "one for each shard, so any number of workers computes the same"
            if self._dataset is not None:
                recording.note_batch(indices)
            yield recording
        sinks = self._sinks
        if recording.trace is None or folder is None or sinks is None:
            return
        if model.process_group.rank() != 0:
            return
        said = Message(f"Step {number} is recorded: `paceline trace {folder.shown}`.")
        try:
            record.write(recording.trace, folder.pipeline_of(number))
        except OSError as error:  # a disk that is full does not fail the training
            said = Message(f"Step {number} cannot be recorded: {error}.", "warning")
        sinks.tell("message", said)


def _keep_stall(folder: RunFolder, rank: int, line: str) -> None:
    """Called by a thread, beside whatever the worker writes: a line is appended as a whole."""
    with EventWriter(folder, rank) as events:
        events.write("message", text=line, level="warning")
