"""What a worker has watched of its run: a recorded step, when it does what, who is slow.

Nothing here fails a training: what cannot be watched is said.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paceline import env, record
from paceline.comm.membership import Membership
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.observe import spans, stopwatch, stragglers
from paceline.observe.run_folder import RunFolder
from paceline.observe.stragglers import Blame, StragglerDetector
from paceline.record import StepRecording
from paceline.run.config import RunConfig
from paceline.run.sinks import Message, Sinks

LOOK_PERIOD_S = 0.25
"""How often a run looks at most whether a step is to be recorded."""


class Watching:
    """One worker's part of watching a run.

        made --start_timeline--> spans are recorded --begin--> blame is reported --end--> as before

    Invariant: what somebody else has started, by hand or by `paceline run --timeline`, is left to
    them.
    """

    def __init__(self, config: RunConfig, folder: RunFolder | None) -> None:
        stopwatch.note_recorder()
        self.lines: list[str] = []
        """What is to be said about it when the loop begins."""
        self.trace_step = config.options.trace_step or env.read_observation().trace_step
        """The step to be recorded stage by stage; 0 for none."""
        self.asked_step = 0
        """The step that somebody who looks on wants recorded."""
        self._look_due_s = 0.0
        self._config, self._folder = config, folder
        self._dataset: Any = None
        self._has_timeline = False
        self._before: tuple[StragglerDetector, Any] | None = None
        if folder is None:
            if self.trace_step:
                self._say_why_not("that needs folder= of Run")
            if config.options.timeline:
                self.lines.append("There is no timeline: that needs folder= of Run.")

    def note_progress(self, step: int, steps: int | None) -> None:
        """The run continues after `step` steps of all `steps`, which may leave none to record.

        Without `steps` it is a stream, whose samples have no numbers.
        """
        self._dataset = None if steps is None else self._config.dataset
        if 0 < self.trace_step <= step:
            self._say_why_not("it is applied already")
        elif steps is not None and self.trace_step > steps:
            self._say_why_not(f"the run has {steps} steps")

    def _say_why_not(self, reason: str) -> None:
        self.lines.append(f"Step {self.trace_step} is not recorded: {reason}.")
        self.trace_step = 0

    def is_asked(self) -> bool:
        """Whether somebody wants the next step recorded; looks for the request now and then."""
        now_s = time.monotonic()
        if self._folder is None or now_s < self._look_due_s:
            return False
        self._look_due_s = now_s + LOOK_PERIOD_S
        return os.path.lexists(self._folder.record_request)

    def record_as_asked(self, step: int, membership: Membership) -> None:
        """All workers have agreed to record `step`; whoever asked is answered."""
        self.asked_step = step
        self.forget_request(membership)

    def forget_request(self, membership: Membership) -> None:
        """Nobody waits any more."""
        if self._folder is not None and membership.leads:
            with contextlib.suppress(OSError):
                os.unlink(self._folder.record_request)

    def on_generation(self) -> None:
        """Who is new has not agreed to anything."""
        self.asked_step = 0

    def start_timeline(self, rank: int) -> None:
        """Record spans from now on; an engine that is alone looks only when it is made."""
        is_taken = spans.is_on() or env.read_observation().timeline
        if self._folder is None or not self._config.options.timeline or is_taken:
            return
        try:
            spans.start(self._folder.timeline, rank)
            self._has_timeline = True
        except (OSError, UsageError) as error:
            self.lines.append(f"There is no timeline: {error}")

    def begin(self, membership: Membership, sinks: Sinks) -> None:
        """Let the straggler detector speak through the run, which may be drawing a bar."""
        self.forget_request(membership)  # of somebody who asked when nobody was there
        if self._folder is not None and membership.leads:
            env.announce_folder(str(self._folder.path))

        def report(steps: int, blame: Blame) -> None:
            step = steps - 1  # the stopwatch has begun the next one
            facts = {
                "step": step,
                "slow_rank": blame.rank,
                "phase": blame.phase,
                "slower_by_s": blame.slower_by_s,
                "steps": blame.steps,
            }
            sinks.tell("message", Message(f"Step {step}: {blame}", "warning", "blame", facts))

        detector = stragglers.find(membership.group)
        if detector is not None:
            self._before = detector, detector.tell
            detector.tell = report

    def end(self) -> None:
        """Leave everything as it was; may be called twice."""
        if self._before is not None:
            detector, tell = self._before
            detector.tell = tell
            self._before = None
        if self._has_timeline:
            self._has_timeline = False
            spans.stop()

    @contextmanager
    def recording(
        self, number: int, model: DistributedDataParallel, indices: Sequence[int], sinks: Sinks
    ) -> Iterator[StepRecording]:
        """Put this around step `number`, of which this worker computes samples `indices`."""
        folder = self._folder
        with record.record_step(
            model, self._config.optimizer, step=number, dataset=self._dataset
        ) as recording:
            recording.why_passes = "one for each shard, so any number of workers computes the same"
            if self._dataset is not None:
                recording.note_batch(indices)
            yield recording
        if recording.trace is None or folder is None or model.process_group.rank() != 0:
            return
        said = Message(f"Step {number} is recorded: `paceline trace {folder.path}`.")
        try:
            record.write(recording.trace, folder.pipeline_of(number))
        except OSError as error:  # a disk that is full does not fail the training
            said = Message(f"Step {number} cannot be recorded: {error}.", "warning")
        sinks.tell("message", said)
