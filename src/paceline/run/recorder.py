"""One chosen step of a run, recorded stage by stage into its folder.

The recording is put around the step from inside, so that a script need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from paceline import record
from paceline.ddp import DistributedDataParallel
from paceline.observe.run_folder import RunFolder
from paceline.record import StepRecording


class StepRecorder:
    """Records the step of one number; the others pass.

    Invariant: a disk that is full does not fail the training.
    """

    def __init__(
        self,
        number: int,
        folder: RunFolder,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        dataset: Any,
        *,
        say: Callable[[str, str], None],
    ) -> None:
        """`dataset` is None where its samples have no numbers."""
        self._number, self._folder = number, folder
        self._model, self._optimizer, self._dataset = model, optimizer, dataset
        self._say = say

    @contextmanager
    def around(self, number: int, indices: Sequence[int]) -> Iterator[StepRecording | None]:
        """Put this around step `number`, of which this worker computes the samples `indices`."""
        if number != self._number:
            yield None
            return
        with record.record_step(
            self._model, self._optimizer, step=number, dataset=self._dataset
        ) as recording:
            if self._dataset is not None:
                recording.note_batch(indices)
            yield recording
        if recording.trace is None or self._model.process_group.rank() != 0:
            return
        path = self._folder.pipeline_of(number)
        try:
            record.write(recording.trace, path)
        except OSError as error:
            self._say(f"Step {number} cannot be recorded in {path}: {error}.", "warning")
        else:
            self._say(f"Step {number} is recorded: `paceline trace {self._folder.path}`.", "info")
