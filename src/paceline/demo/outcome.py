"""What came of a demo, as plain data, and whether it is what was promised."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = 1e-4
"""More than rounding can explain between two trainings of this size."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One row of the table: how well the held-out rows are predicted after this epoch."""

    epoch: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """The second half of the training, done once more by another number of workers."""

    workers: int
    step: int
    """The checkpoint that they began with."""
    steps: int
    """How many they took."""
    difference: float
    """The largest between their parameters and those of the workers that did not stop."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a training on several workers."""

    epochs: list[Epoch]
    rows_by_worker: list[int]
    """How many rows each worker has trained on, all epochs together."""
    parameters: int
    is_bit_equal: bool
    """Whether all workers ended with the same parameters, to the last bit."""
    difference: float
    """The largest between their parameters and those of one process on whole batches."""
    resumed: Resumed
    checkpoints: int
    """How many the run has saved."""
    noise: str
    """What the gradient noise scale says about more workers."""
    folder: str
    report: str
    """Where the report is."""

    @property
    def is_as_promised(self) -> bool:
        return self.is_bit_equal and max(self.difference, self.resumed.difference) < ROUNDING
