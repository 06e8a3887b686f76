"""What a worker has watched of its run: a recorded step, when it does what, who is slow.

Nothing here fails a training: what cannot be watched is said in the opening lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from paceline import env, record
from paceline.comm.membership import Membership
from paceline.ddp import DistributedDataParallel
from paceline.errors import UsageError
from paceline.observe import spans, stragglers
from paceline.observe.run_folder import RunFolder
from paceline.observe.stragglers import Blame, StragglerDetector
from paceline.record import StepRecording
from paceline.run.config import RunOptions
from paceline.run.sinks import Message, Sinks

Listener = Callable[[int, Blame], None]


class Watching:
    """One worker's part of watching a run.

        made --start_timeline--> spans are recorded --begin--> blame is reported --end--> as before

    Invariant: what somebody else has started, by hand or by `paceline run --timeline`, is left to
    them.
    """

    def __init__(self, options: RunOptions, folder: RunFolder | None, rank: int) -> None:
        self.lines: list[str] = []
        """What is to be said about it when the loop begins."""
        self._folder, self._rank = folder, rank
        self._wants_timeline = options.timeline
        self._has_timeline = False
        self._before: tuple[StragglerDetector, Listener] | None = None
        asked = options.trace_step or env.read_observation().trace_step
        self.trace_step = 0 if folder is None else asked
        """The step to be recorded stage by stage; 0 for none."""
        if folder is None and asked:
            self.lines.append(f"Step {asked} is not recorded: that needs folder= of Run.")
        if folder is None and options.timeline:
            self.lines.append("There is no timeline: that needs folder= of Run.")

    def note_progress(self, step: int, steps: int | None) -> None:
        """The run continues after `step` steps of all `steps`, which may leave none to record."""
        wanted = self.trace_step
        if 0 < wanted <= step:
            self.lines.append(f"Step {wanted} is not recorded: it is applied already.")
        elif steps is not None and wanted > steps:
            self.lines.append(f"Step {wanted} is not recorded: the run has {steps} steps.")

    def start_timeline(self) -> None:
        """Record spans from now on; an engine that is alone looks only when it is made."""
        is_taken = spans.is_on() or env.read_observation().timeline
        if self._folder is None or not self._wants_timeline or is_taken:
            return
        try:
            spans.start(self._folder.timeline, self._rank)
        except (OSError, UsageError) as error:
            self.lines.append(f"There is no timeline: {error}")
        else:
            self._has_timeline = True

    def begin(self, membership: Membership, sinks: Sinks, step: Callable[[], int]) -> None:
        """Let the straggler detector speak through the run, which may be drawing a bar."""

        def report(_step: int, blame: Blame) -> None:
            number = step() + 1
            facts = {
                "step": number,
                "slow_rank": blame.rank,
                "phase": blame.phase,
                "slower_by_s": blame.slower_by_s,
                "steps": blame.steps,
            }
            sinks.tell("message", Message(f"Step {number}: {blame}", "warning", "blame", facts))

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


class StepRecorder:
    """Records one step of a run into its folder, from inside: a script need not know of it.

    Invariant: a disk that is full does not fail the training.
    """

    def __init__(
        self,
        number: int,
        folder: RunFolder,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        dataset: Any,
        sinks: Sinks,
    ) -> None:
        """`dataset` is None where its samples have no numbers."""
        self.number = number
        self._folder, self._sinks = folder, sinks
        self._model, self._optimizer, self._dataset = model, optimizer, dataset

    @contextmanager
    def recording(self, indices: Sequence[int]) -> Iterator[StepRecording]:
        """Put this around the step, of which this worker computes the samples `indices`."""
        with record.record_step(
            self._model, self._optimizer, step=self.number, dataset=self._dataset
        ) as recording:
            if self._dataset is not None:
                recording.note_batch(indices)
            yield recording
        if recording.trace is None or self._model.process_group.rank() != 0:
            return
        path = self._folder.pipeline_of(self.number)
        said = Message(f"Step {self.number} is recorded: `paceline trace {self._folder.path}`.")
        try:
            record.write(recording.trace, path)
        except OSError as error:
            said = Message(f"Step {self.number} cannot be recorded in {path}: {error}.", "warning")
        self._sinks.tell("message", said)
