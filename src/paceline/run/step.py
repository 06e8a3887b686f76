"""One step as a transaction: it is applied as a whole, or nothing has happened.

with step:                                   begin: gradients cleared, state remembered
    for x, y in step.batches():              shard by shard, each with its own random numbers
        step.backward(loss)                  the last backward also sums over the workers
                                             end: checked, then committed; or all put back
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.data import Portion, Position, Shard
from paceline.errors import PeerError, UsageError
from paceline.record import StepRecording
from paceline.run import losses
from paceline.run.joint import JointLoss, say_not_recorded
from paceline.run.parts import Outcome, RunParts
from paceline.telemetry import Message, Phase
from paceline.transport import mean_factor
from paceline.update import Loss, read_rate


class Step:
    """One step of a run, on one worker.

        new --with--> open --> summed --(end of the block)--> applied
                      ^  ├─(an error)────> failed: all is as before
                      │  └─(a worker died)─> lost ─> healed, and applied with the others
                      │                       │ └──> undone: it is done again, or one before it
                      └───(dealt anew)────────┘

    Invariant: parameters, buffers, optimizer, scheduler and scaler change at the end of the block,
    all of them or none.
    """

    def __init__(self, portion: Portion, parts: RunParts, on_fail: Callable[[Step], None]) -> None:
        """`on_fail` is called where an error leaves the block, when all is as before."""
        self.number = portion.step
        """Counts from 1: the number of steps applied when this one is."""
        self.epoch = portion.epoch
        """Counts from 0."""
        self.ends_epoch = portion.ends_epoch
        """Whether this is the last step of its epoch."""
        self.samples = portion.samples
        """How many samples the global batch has, on all workers together."""
        self.state = Outcome.NEW
        self.seconds = 0.0
        """How long the block took."""
        self.lr: float | None = None
        """What the optimizer's first group learns with in this step, where it is a plain number."""
        self.phases: dict[str, float] = {}
        """Where that went, as far as the host sees it: of a GPU the loading of data only."""
        self._config, self._place, self._training = parts.config, parts.place, parts.training
        self._feed, self._outlets, self._metrics = parts.feed, parts.outlets, parts.outlets.metrics
        self._progress, self._recovery, self._vote = parts.progress, parts.recovery, parts.vote
        self._exchanges, self._stop, self._note = parts.exchanges, parts.stop, parts.step_note
        self._dealing, self._around, self._on_fail = parts.dealing, ExitStack(), on_fail
        self._audit, self._fit, self._cut = parts.training.audit, parts.training.fit, parts.cut
        self._recording: StepRecording | None = None
        self._objects, self._has_told = parts.training.objects, False
        kept = None if self._objects is None else self._objects.keep()
        # Not at the block's begin: the loop's lines before it run again with a step that is lost.
        self.before = parts.training.generators.state(), kept
        self._begin_s = self._clock_s = 0.0
        self._key: tuple[int, ...] = (self.number,)
        self._loss_name, self._norm_name = "loss", "grad_norm"
        self._passes: Generator[Any] | None = None
        self.again: Portion | None = None
        """This worker's part of it, where it was lost at the end of the block: still to be done."""
        self._deal(portion)

    @property
    def is_applied(self) -> bool:
        """Whether the model is as it is after this step, by this worker's work or another's."""
        return self.state in (Outcome.APPLIED, Outcome.HEALED)

    @property
    def is_open(self) -> bool:
        """Whether the block is entered and not left."""
        return self.state in (Outcome.OPEN, Outcome.SUMMED, Outcome.LOST)

    def _deal(self, portion: Portion) -> None:
        """These shards of the batch are this worker's; none of them is computed yet."""
        self._busy = portion.busy or min(self._progress.shards, portion.samples)
        self._shards = portion.shards if self._fit.size is None else self._fit.cut(portion)
        self._audited, self._last = portion.audited, self._shards[-1] if self._shards else None
        if self._audit.share:
            self._audit.keep(self.number, self._training.module.parameters(), self._progress.size)
        # What the loop logs of the last shard is then in the ledger before others apply the step.
        self._sums_at_end = bool(self._config.options.same_bits) or not portion.shards
        self.local_samples = sum([len(shard.indices) for shard in portion.shards])
        """How many of the samples this worker computes."""
        self._shard: Shard | None = None
        self._computed: Shard | None = None
        self._losses: list[Loss] = []
        self._has_items: bool | None = None
        self._is_weighted, self._items, self._scale, self._talks = False, 0.0, 1.0, 0

    def __enter__(self) -> Step:
        if self.state is not Outcome.NEW:
            raise UsageError(
                f"Step {self.number} is {self.state} and cannot be run again.",
                advice="Take steps from the run: `for step in run: with step: ...`.",
            )
        self._begin_s = time.perf_counter()
        self._begin()
        self._talks = self._progress.count_talks()
        return self

    def _begin(self) -> None:
        """Clear the gradients, and remember what has to be put back if this fails."""
        training, number = self._training, self.number
        if self._exchanges.level is not None:
            self._exchanges.catch_up()
        if number in self._outlets.watching.steps_to_record:
            indices = [index for shard in self._shards for index in shard.indices]
            recording = self._outlets.watching.recording(number, training.engine, indices)
            self._recording = self._around.enter_context(recording)
        training.update.begin(number)
        self.lr = read_rate(self._config.optimizer)
        training.engine.begin_step(number)
        if self._note is not None:
            self._note[0] = number
        self.state, self._recovery.step_abandoned, self._metrics.step = Outcome.OPEN, False, number
        if training.buffers is not None:
            training.buffers.begin(self._busy, self._feed.loader.first_rank)
        self._scale = self._progress.size / self.samples
        if training.precision.is_short or self._config.options.same_bits:
            self._scale, self._is_weighted = 1 / self.samples, True
        if training.noise is not None and training.noise.begin(number):
            self._scale, self._is_weighted = 1.0, True

    def _drop_recording(self, cause: BaseException) -> None:
        """End it without putting the picture together, for which all workers would have to meet."""
        self._recording = None
        self._around.__exit__(type(cause), cause, cause.__traceback__)

    def batches(self) -> Iterator[Any]:
        """This worker's shards of the global batch, on the model's device.

        Empty on a worker that a short batch leaves without any; it takes part all the same.
        """
        self._refuse_second_loop("batches")
        while True:
            shards, load = [*self._audited, *self._shards], self._fit.load
            batches = (map if self._fit.size is None else load)(self._load, shards)
            self._passes = passes = self._batches(shards, batches)
            yield from passes
            if self._sum_up() or not self._recover():
                return

    def joint(self, encode: Callable[[Any], Any], loss: Callable[..., Tensor]) -> None:
        """Add the gradients of one loss over the whole global batch, such as a contrastive one.

        `encode(batch)` gives the embeddings of a shard: a tensor with a row per sample, or a tuple
        or dictionary of such. `loss` is called with those of all shards of all workers, in the
        order of the batch; a tuple becomes arguments, a dictionary named ones. Every shard is
        encoded twice, first without a graph, and memory is that of one shard. Takes the place of
        the loop over `batches()`.
        """
        self._refuse_second_loop("joint")
        while True:
            if self._recording is not None:  # begun again where the step is dealt anew
                self._drop_recording(say_not_recorded(self._outlets.sinks, self.number))
            whole, fit = JointLoss(loss, self._place, self._training), self._fit
            batches, key = fit.load(self._load, self._shards), (self._config.seed, *self._key)
            loaded = whole.encode(encode, self._shards, batches, key, self._cut)
            self.state = Outcome.LOST  # until the exchange has held
            if self._recovery.holds(partial(whole.exchange, self.number)) and not fit.is_short:
                self.state = Outcome.OPEN
                whole.compute(self._config.seed, self.number)
                self._passes = passes = self._batches(self._shards, loaded)
                for batch, shard in zip(passes, self._shards, strict=False):  # ends early if lost
                    part, count = whole.part_of(shard, encode(batch)), len(shard.indices)
                    self._add(part * self.samples, count, whole.value * count, is_mean=False)
            if self._sum_up() or not self._recover():
                return

    def turn(self, name: str) -> Step:
        """The next turn of this step, that of the model called `name`, where there are several."""
        losses.refuse_turn(self.number, name)

    def _refuse_second_loop(self, what: str) -> None:
        if self.state is not Outcome.OPEN or self._shard is not None or self._computed is not None:
            losses.refuse_loop(self.number, what, is_entered=self.state is not Outcome.NEW)
        self._has_told |= self._progress.count_talks() != self._talks
        self._at_loop = None if self._objects is None else self._objects.keep()
        self._metrics.begin_loop()

    def _load(self, shard: Shard) -> Any:
        place, watch = self._place, self._outlets.watching.watch
        self._clock_s = time.perf_counter()
        if watch is not None:
            watch.after_update = Phase.OTHER  # what comes after an update is the user's code
            watch.mark((watch.clock(), Phase.DATA))
        try:
            batch = self._feed.loader.load(shard)
            if place.device.type != "cpu":
                batch = place.to_device(batch)
        finally:
            if watch is not None:
                watch.mark((watch.clock(), Phase.OTHER))
        self._lap(Phase.DATA)
        return batch

    def _batches(self, shards: list[Shard], loaded: Iterable[Any]) -> Generator[Any]:
        training, self._talks = self._training, self._progress.count_talks()
        with ExitStack() as before_last:
            if shards and shards[0] is not self._last:
                before_last.enter_context(training.engine.no_sync())
            for shard, batch in zip(shards, loaded, strict=True):
                training.generators.seed(self._config.seed, "model", *self._key, *shard.key)
                if training.buffers is not None:
                    training.buffers.begin_shard()
                self._shard = shard
                if shard is self._last:
                    before_last.close()
                with ExitStack() as inside:
                    inside.enter_context(training.precision.forward)
                    if shard.is_second:  # what it logs is logged by the other worker
                        inside.callback(self._metrics.take_back, self._metrics.put_aside())
                    yield batch
                if self.state is Outcome.LOST:
                    return
                self._end_shard()

    def _sum_up(self) -> bool:
        """Do what all workers do together when their shards are computed; False if one died."""
        if self.state is Outcome.LOST:
            return False
        votes = self._progress.size > 1 and self.number >= self._vote.cadence.next_step
        has_buffers = self._training.buffers is not None
        meets = votes or self._sums_at_end or has_buffers or self._cut.is_open
        meet = partial(self._meet, votes)
        holds = not meets or self._recovery.holds(meet, completes=self._sums_at_end)
        self.state = Outcome.SUMMED if holds else Outcome.LOST
        is_repeated = self._audit.is_disputed or self._cut.is_repeated or self._fit.is_short
        return holds and not is_repeated

    def _meet(self, votes: bool) -> None:
        training = self._training
        if self._sums_at_end:
            self._clock_s = time.perf_counter()
            self._fit.take_part(training)
            self._lap(Phase.BACKWARD)
            if self._audit.is_disputed or self._fit.is_short:
                return
        if self._cut.is_open:
            self._cut.decide(self.number, self._metrics.so_far())
            if self._cut.is_repeated:
                return
        if votes:
            self._vote.start(self.number)
        if training.buffers is not None:
            training.buffers.settle(self.number, has_news=training.engine.has_news)

    def _recover(self) -> bool:
        """Go on without a worker that has died; whether there are shards to compute, dealt anew."""
        if self._has_told and self.state is Outcome.LOST and not self._fit.is_short:
            losses.leave_block(self.number)
        if (portion := self._regroup()) is None:
            return False
        self._deal(portion)
        self._begin()
        if self._objects is not None:
            self._objects.put_back(self._at_loop or {}, self.number)
        self._metrics.begin_again()
        return True

    def _regroup(self) -> Portion | None:
        """This worker's part of the step among those who are left; None if the step is over: then
        it is healed, where others had all of the sum when it was lost here, or undone, where the
        dead took a part of the state along."""
        # Those who have applied the step give their picture up, too, when they regroup; a worker
        # that is healed must not wait for them. Where it is dealt anew, recording begins anew.
        if self._recording is not None:
            self._drop_recording(PeerError(f"Step {self.number} is dealt anew."))
        # All may have agreed to compute it once more, though no worker died.
        is_repeated, self._cut.is_repeated = self._audit.is_disputed or self._cut.is_repeated, False
        self._undo()
        if self._fit.is_short:
            agree = partial(self._fit.shrink, self.number, self.samples, self._busy)
            is_repeated = self._recovery.holds(agree)
        deal = partial(self._recovery.redeal_after_failure, self.number, self._is_passed)
        portion = self._recovery.attempt(self._dealing.again) if is_repeated else deal()
        if portion is None and self._is_passed():
            self.state, self._progress.scores = Outcome.HEALED, {}
        elif portion is None:
            self.state = Outcome.UNDONE
        return portion

    def _is_passed(self) -> bool:
        """Whether the run is further than before this step."""
        return self._progress.position.step >= self.number

    def _end_shard(self) -> None:
        """The loop continues with the next batch, or is over."""
        shard, self._shard = self._shard, None
        if shard is None:
            return
        if self._computed is not shard:
            losses.refuse_no_loss(self.number, shard.number)
        self._refuse_talks()
        if self._training.buffers is not None and (shard.is_second or shard.key[1:] > (0,)):
            self._training.buffers.restore()
        elif self._training.buffers is not None:
            self._training.buffers.end_shard(shard.number)

    def backward(
        self, loss: Tensor, items: float | Tensor | None = None, reduction: str = "mean", **old: Any
    ) -> None:
        """Add the gradients of one shard's loss: the mean over `items`, or, with "sum", their sum.

        Gradients become those of the sum over all shards, divided by the number of all items.
        Without `items` these are the shard's samples. A tensor is read from its device.
        """
        shard, is_mean = self._shard, reduction == "mean"
        if old or reduction not in ("mean", "sum"):
            losses.refuse_arguments(old, reduction)
        if shard is None or self._computed is shard:
            losses.refuse_backward(self.number, is_entered=self.state is not Outcome.NEW)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            losses.refuse_loss(self.number, loss)
        if self._cut.is_open:
            self._cut.look(*self._key, *shard.key)
        if shard is self._last:
            self._refuse_talks()  # before the engine's own, which are in this backward
        self._lap(Phase.FORWARD)
        count: Any = len(shard.indices) if items is None else items
        if type(count) is not int or count < 0:
            count = losses.read_items(self.number, count)
        if self._has_items not in (None, items is not None):
            losses.refuse_some_items(self.number)
        self._has_items = items is not None
        self._is_weighted |= self._has_items
        if is_mean and not count:  # a mean over nothing, which torch's losses make NaN
            loss = torch.nan_to_num(loss)
        if self._recording is not None and not shard.is_second:
            self._recording.note_loss(loss * count if is_mean else loss, weight=count)
        self._add(loss, count, loss.detach(), is_mean=is_mean)

    def _add(self, loss: Tensor, count: float, value: Tensor, *, is_mean: bool) -> None:
        """Add the gradients of a loss over `count` items of the open shard, told as `value`."""
        training, shard = self._training, self._shard
        assert shard is not None
        factor = count * self._scale if is_mean else self._scale
        if shard.is_second:
            training.engine.weigh_again(shard.number, count * self._scale)
        elif self._is_weighted or self._busy < self._progress.size:  # with a worker that is idle
            # See Note [Weights] in losses.
            weight = self._progress.size if self._shards[0].number == 0 else 0.0
            if self._is_weighted:
                weight = (self._items + count) * self._scale
            training.engine.weigh(weight, shard.number, count * self._scale)
        (self._metrics.add if is_mean else self._metrics.add_sum)(self._loss_name, value, count)
        if shard is self._last and training.buffers is not None:
            training.engine.has_news = training.buffers.has_news(shard.number)
        with training.precision.backward:
            try:
                backward = partial(training.update.backward, loss, factor)
                if shard is not self._last:  # no worker is waited for
                    backward()
                elif not self._recovery.holds(backward, completes=not self._sums_at_end):
                    self.state = Outcome.LOST
                    return
            except RuntimeError as error:
                self._fit.hear(error, loss)
                self.state = Outcome.LOST
                return
        self._computed = shard
        if not shard.is_second:
            self._losses.append(Loss(value, shard.number, shard.indices))
            self._items += count
        if shard is self._last:
            self._talks = self._progress.count_talks()  # the engine's own are not the script's
        if training.noise is not None:
            training.noise.add(count)
        self._lap(Phase.BACKWARD)

    def __exit__(self, _kind: Any, error: BaseException | None, _frames: Any) -> bool:
        if self._passes is not None:
            self._passes.close()  # ends autocast, if the script still holds the batches
        is_lost = error is not None and self._recovery.explains(error)
        try:
            if not is_lost and self.state is Outcome.OPEN and self._computed is not self._last:
                is_lost = self._fit.run_short(error, self._training, self._recovery)
            if error is None:
                is_lost = not self._finish()
            if is_lost:
                # What follows the block runs now, so it is to know what has become of the step.
                # Where that is dealt anew, it comes with the next turn of the loop.
                self.again = self._regroup()
                if self.again is not None:
                    self.state, self._exchanges.level = Outcome.UNDONE, self._training.state.keep()
            elif error is not None:
                losses.note_step(error, self.number)
                if (meaning := self._training.precision.explain(error)) is not None:
                    raise meaning from error
        finally:
            self._close()
            if self._recording is not None and not self.is_applied:
                self._drop_recording(error or PeerError(f"Step {self.number} is not applied."))
        if self._recording is not None and self.is_applied:
            # Recorded is what was applied. If a worker dies now, the picture is lost and no more.
            self._recovery.attempt(self._around.close, instead=None)
        return is_lost

    def _close(self) -> None:
        """Leave all as it was before the step, unless it is applied; and stop the clock."""
        if not self.is_applied:
            self._recovery.step_abandoned = self.state is Outcome.UNDONE
            if self.state is not Outcome.UNDONE:
                self.state = Outcome.FAILED
                self._undo()
            self._metrics.forget()
            self._training.put_back(self.before, self.number)
        if self.state is Outcome.FAILED:
            self._on_fail(self)
            self._stop.ignore()  # the error may end the program, which is not ours then
        if (found := self._audit.finding) is not None:
            told, self._audit.finding = Message(found.text, "warning", "audit", found.facts), None
            self._outlets.sinks.tell("message", told)
        if self._exchanges.asked and (self.is_applied or self.state is Outcome.FAILED):
            self._exchanges.begin_step()
        self.seconds = time.perf_counter() - self._begin_s
        self.phases[Phase.OTHER] = max(0.0, self.seconds - sum(self.phases.values()))
        if self._place.device.type != "cpu":
            self.phases = {Phase.DATA: self.phases.get(Phase.DATA, 0.0)}

    def _finish(self) -> bool:
        """The block is over without an error: apply the step; False if a worker died before."""
        if self.state in (Outcome.HEALED, Outcome.UNDONE):
            return True
        if self.state is Outcome.LOST:  # the loop over batches was left before it could continue
            return False
        shards, training = self._shards, self._training
        if len(self._losses) != len(shards):
            losses.refuse_missing(self.number, len(self._losses), len(shards))
        self._end_shard()  # the loop may have been left by `break` after the last batch
        if self.state is Outcome.OPEN and not self._sum_up():
            return False
        divides = self._config.options.same_bits  # the engine does, also alone
        if self._progress.size == 1 and self._is_weighted and not divides:
            total = self._items * self._scale
            if not math.isclose(total, 1.0, rel_tol=1e-15):  # which costs a pass over gradients
                training.update.multiply_grads(mean_factor(1, total))
        if training.noise is not None and training.noise.is_measuring:
            training.noise.end(scale=training.update.loss_scale)
        self._clock_s = time.perf_counter()
        # An update that is shared out may have been applied by some workers, or by none.
        return self._recovery.holds(self._apply)

    def _apply(self) -> None:
        norm = self._training.update.commit(self._losses)
        if norm is not None:
            self._metrics.add_common(self._norm_name, norm)
        self._move_on()
        self._lap(Phase.OPTIMIZER)

    def _move_on(self) -> None:
        """The model is that of another position now."""
        self.state, self._progress.scores = Outcome.APPLIED, {}
        self._progress.position = self._next_position()
        self._training.generators.seed(self._config.seed, "between", *self._key)

    def _next_position(self) -> Position:
        done = 0 if self.ends_epoch else self._progress.position.step_of_epoch + 1
        return Position(self.number, self.epoch + self.ends_epoch, done)

    def _undo(self) -> None:
        training = self._training
        training.engine.begin_step(self.number)
        if training.noise is not None:
            training.noise.cancel()
        training.update.abandon()
        if training.buffers is not None:
            training.buffers.restore()

    def _refuse_talks(self) -> None:
        """Raise if the passes of shards talked to other workers, who compute other ones, or none:
        the engine talks in the last backward only, and the run before and after the passes."""
        before, self._talks = self._talks, self._progress.count_talks()
        self._fit.talks |= self._talks != before
        if self._talks != before and not self._progress.may_talk:
            losses.refuse_talks(self.number, self._progress.shards, self._progress.size)

    def _lap(self, phase: Phase) -> None:
        """What has passed since the last lap belongs to `phase`."""
        now_s = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now_s - self._clock_s
        self._clock_s = now_s
