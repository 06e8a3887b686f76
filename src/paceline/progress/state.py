"""What is known of a run so far: plain data that every way of drawing reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.progress.speed import Speed


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while a run goes on. What is None is not known."""

    name: str = ""
    workers: int = 1
    epochs: int | None = None
    steps: int | None = None
    """In all, those before a resume included."""
    steps_per_epoch: int | None = None
    global_batch: int | None = None
    dataset_size: int | None = None
    first_step: int = 0
    """How many steps were done before this process began."""
    lines: tuple[str, ...] = ()
    """What else to say at the start, such as the policy."""


@dataclass(slots=True)
class Row:
    """One line of the table of epochs."""

    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    samples: int | None = None


@dataclass(slots=True)
class State:
    """A run as it stands."""

    facts: Facts
    begin_s: float
    now_s: float
    step: int = 0
    epoch: int = 0
    samples: int = 0
    """Since this process began."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    speed: Speed = field(default_factory=Speed)

    @property
    def elapsed_s(self) -> float:
        return self.now_s - self.begin_s

    @property
    def steps_left(self) -> int | None:
        return None if self.facts.steps is None else max(self.facts.steps - self.step, 0)

    @property
    def share(self) -> float | None:
        """How much of the run is done, from 0 to 1."""
        if not self.facts.steps:
            return None
        return min(self.step / self.facts.steps, 1.0)

    def row(self, epoch: int) -> Row:
        """The row of this epoch, made if it is new."""
        if not self.rows or self.rows[-1].epoch != epoch:
            found = next((row for row in self.rows if row.epoch == epoch), None)
            if found is not None:
                return found
            self.rows.append(Row(epoch))
        return self.rows[-1]
