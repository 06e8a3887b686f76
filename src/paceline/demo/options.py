"""What the demo trains, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError

ROWS, FEATURES, HIDDEN, CLASSES = 1_000, 10, 32, 2
HELD_OUT_ROWS = 500
"""Rows that nobody trains on, to check with."""
BATCH_ROWS = 100
STEPS_PER_EPOCH = ROWS // BATCH_ROWS
LEARNING_RATE = 0.3
RECORDED_STEP = 3
"""The step that is followed stage by stage, for the report."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for, and what follows from it."""

    workers: int = 2
    epochs: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= BATCH_ROWS:
            raise UsageError(
                f"--workers is {self.workers}, but a batch of {BATCH_ROWS} rows can be cut among "
                f"1 to {BATCH_ROWS} workers."
            )
        if self.epochs < 1:
            raise UsageError(f"--epochs is {self.epochs}.", advice="Train for at least one.")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed is {self.seed}.", advice="Use a number from 0 to 2**32 - 1.")

    @property
    def other_workers(self) -> int:
        """How many go on from the checkpoint: one more, or one less where that does not divide."""
        return self.workers + 1 if self.shards > self.workers else self.workers - 1

    @property
    def shards(self) -> int:
        """So many that both numbers of workers share them evenly, if the rows suffice."""
        even = self.workers * (self.workers + 1)
        return even if even <= BATCH_ROWS else self.workers

    @property
    def checkpoint_step(self) -> int:
        """In the middle of the training, and in the middle of an epoch."""
        return self.epochs // 2 * STEPS_PER_EPOCH + STEPS_PER_EPOCH // 2
