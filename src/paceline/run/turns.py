"""A step of several models: turns, each of them a transaction of its own.

    with step:
        with step.turn("critic"):                  as a step of one model: batches, backward, commit
            for x in step.batches():
                step.backward(...)
        with step.turn("generator"): ...

A run is at (step, turn). A death undoes the open turn alone; turns that are applied stay, and where
the step has to be entered again, they have no batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.data import Portion, Position, Shard
from paceline.errors import PeerError, UsageError, did_you_mean
from paceline.run.models import TurnEngine, TurnUpdate
from paceline.run.parts import Outcome, RunParts
from paceline.run.step import Step
from paceline.telemetry import Phase
from paceline.update import read_rate


class TurnLost(PeerError):
    """Another worker died, and this turn cannot be dealt anew from within: the block is left."""


class StepOfTurns(Step):
    """A step whose block has turns.

    Invariant: the position moves to the next turn with each commit, and to the next step at the end
    of the block.
    """

    def __init__(self, portion: Portion, parts: RunParts, on_fail: Callable[[Step], None]) -> None:
        super().__init__(portion, parts, on_fail)
        self.portion, self.parts = portion, parts
        self.loaded: dict[int, Any] = {}
        """Batches by shard: every turn has the same."""
        self._count = 0
        self._turn: Turn | None = None

    def _begin(self) -> None:
        self.state, self._recovery.step_abandoned = Outcome.OPEN, False
        if self._note is not None:
            self._note[0] = self.number

    def turn(self, name: str) -> Turn:
        """The next turn of this step: that of the model called `name`."""
        engine: TurnEngine = self._training.engine
        if name not in engine.engines:
            raise UsageError(
                f"Step {self.number}: no model that is trained is called {name!r}."
                f"{did_you_mean(name, engine.engines)}",
                advice=f"Pass one of {', '.join(engine.engines)}.",
            )
        if self.state is not Outcome.OPEN or engine.name:
            where = (
                f"inside the turn of {engine.name!r}" if engine.name else "outside of `with step:`"
            )
            raise UsageError(
                f"Step {self.number}: step.turn({name!r}) was called {where}.",
                advice="Write turns one after the other inside `with step:`.",
            )
        self._count += 1
        self._turn = Turn(self, name, self._count)
        return self._turn

    def deal_anew(self, portion: Portion) -> None:
        """The shards of this step are others from now on."""
        self.portion, self.loaded = portion, {}
        self._deal(portion)

    def _open_turn(self, what: str) -> Turn:
        if self._turn is None or not self._turn.is_entered:
            raise UsageError(
                f"Step {self.number}: step.{what}() was called outside of a turn.",
                advice='This run has several models: write `with step.turn("name"):` around it.',
            )
        return self._turn

    def batches(self) -> Iterator[Any]:
        """This worker's shards of the global batch; every turn goes through them."""
        return self._open_turn("batches").batches()

    def joint(self, encode: Callable[[Any], Any], loss: Callable[..., Tensor]) -> None:
        """Add the gradients of one loss over the whole global batch to the open turn."""
        self._open_turn("joint").joint(encode, loss)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of one shard's loss to the open turn."""
        self._open_turn("backward").backward(*args, **kwargs)

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> bool:
        if not isinstance(error, TurnLost) or self._turn is None:
            return super().__exit__(kind, error, frames)
        self.again, self.state = self._turn.again, Outcome.UNDONE
        self._close()
        return True

    def _finish(self) -> bool:
        if self._progress.position.step >= self.number:
            self.state, self._progress.scores = Outcome.HEALED, {}
        elif not self._count:
            raise UsageError(
                f"Step {self.number} had no turn.",
                advice='This run has several models: write `with step.turn("name"):` in the block.',
            )
        else:
            self._move_on()
        return True

    def _undo(self) -> None:
        """Turns undo themselves."""


class Turn(Step):
    """One model's part of a step, from its batches to its commit."""

    def __init__(self, whole: StepOfTurns, name: str, index: int) -> None:
        super().__init__(whole.portion, whole.parts, whole._on_fail)
        self.name, self.index = name, index
        """Whose turn it is, and which one of the step it is, from 1."""
        self.is_entered = False
        self._whole, self._key = whole, (self.number, index)
        self._loss_name, self._norm_name = f"{name}_loss", f"{name}_grad_norm"
        self._is_skipped = False
        self._engine: TurnEngine = self._training.engine
        updates: TurnUpdate = self._training.update
        self._averages, update = updates.averages[name], updates.updates[name]
        self._training = replace(self._training, engine=self._engine.engines[name], update=update)

    def __enter__(self) -> Turn:
        whole = self._whole
        whole._has_told |= self._progress.count_talks() != whole._talks  # since the turn before
        self._has_told = whole._has_told
        if not self._is_passed():  # before the other models are frozen
            self._exchanges.catch_up()
        self._engine.open(self.name)
        self._aside, self.is_entered = self._metrics.put_aside(), True
        if self._is_passed():
            self._is_skipped, self.state = True, Outcome.HEALED
        else:
            super().__enter__()
        return self

    def _begin(self) -> None:
        super()._begin()
        self._metrics.turn = self.index
        self.lr = read_rate(self._training.update.parts["optimizer"])
        if self._whole.lr is None:
            self._whole.lr = self.lr

    def batches(self) -> Iterator[Any]:
        """This worker's shards; none where the turn is applied already."""
        return iter(()) if self._is_skipped else super().batches()

    def joint(self, encode: Callable[[Any], Any], loss: Callable[..., Tensor]) -> None:
        if not self._is_skipped:
            super().joint(encode, loss)

    def _load(self, shard: Shard) -> Any:
        if shard.number not in self._whole.loaded:
            self._whole.loaded[shard.number] = super()._load(shard)
        return self._whole.loaded[shard.number]

    def _deal(self, portion: Portion) -> None:
        super()._deal(portion)
        if self.state is not Outcome.NEW:
            self._whole.deal_anew(portion)

    def _regroup(self) -> Portion | None:
        self._engine.thaw()
        portion = super()._regroup()
        if self.state is Outcome.HEALED and self._progress.position.step < self.number:
            # The next turns are dealt among those who are left, too.
            dealing = self._whole.parts.dealing
            found = self._recovery.attempt(lambda: next(dealing.portions, None))
            assert found is not None
            self._whole.deal_anew(found)
        self._engine.freeze()
        return portion

    def _is_passed(self) -> bool:
        position = self._progress.position
        is_here = position.step == self.number - 1
        return position.step >= self.number or (is_here and position.turn >= self.index)

    def _move_on(self) -> None:
        for average in self._averages:
            average.update(self.number)
        super()._move_on()

    def _next_position(self) -> Position:
        return replace(self._progress.position, turn=self.index)

    def __exit__(self, kind: Any, error: BaseException | None, frames: Any) -> bool:
        try:
            is_swallowed = super().__exit__(kind, error, frames)
        finally:
            self._engine.close()
            self.is_entered = False
            self._whole._talks = self._progress.count_talks()
            is_applied = self.is_applied and not self._is_skipped
            self._metrics.end_turn(self._aside, is_applied=is_applied)
            for phase, seconds in self.phases.items():
                if phase != Phase.OTHER:
                    self._whole.phases[phase] = self._whole.phases.get(phase, 0.0) + seconds
        if self.state is Outcome.UNDONE:
            raise TurnLost(f"Step {self.number}: turn {self.index} is done again.") from error
        return is_swallowed
