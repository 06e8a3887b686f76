"""One step as a transaction: it is applied as a whole, or nothing has happened.

with step:                                   begin: gradients cleared, state remembered
    for x, y in step.batches():              shard by shard, each with its own random numbers
        step.backward(loss)                  the last backward also sums over the workers
                                             end: checked, then committed; or all put back
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PeerError, UsageError
from paceline.observe.phases import Phase
from paceline.record import StepRecording
from paceline.run.context import StepContext
from paceline.run.plan import Portion, Shard
from paceline.transport import mean_factor
from paceline.update import Loss


class Step:
    """One step of a run, on one worker.

        new --with--> open --(end of the block)--> applied
                      ^  ├─────────(an error)────> failed: all is as before
                      │  └──(state died, too)────> undone: the run goes back to a checkpoint
                      └ a worker died: the survivors begin anew, inside `batches()`

    Invariant: parameters, buffers, optimizer, scheduler and scaler change at the end of the block,
    all of them or none.
    """

    def __init__(
        self, portion: Portion, context: StepContext, on_end: Callable[[Step], None]
    ) -> None:
        """`on_end` is called when the block is over, whether the step is applied or failed."""
        self.number = portion.step
        """Counts from 1: the number of steps applied when this one is."""
        self.epoch = portion.epoch
        """Counts from 0."""
        self.ends_epoch = portion.ends_epoch
        """Whether this is the last step of its epoch."""
        self.samples = portion.samples
        """How many samples the global batch has, on all workers together."""
        self.state = "new"
        self.local_samples = sum([len(shard.indices) for shard in portion.shards])
        """How many of them this worker computes."""
        self.seconds = 0.0
        """How long the block took."""
        self.lr: float | None = None
        """What the optimizer's first group learns with in this step, where it is a plain number."""
        self.phases: dict[str, float] = {}
        """Where that went, as far as the host sees it: of a GPU the loading of data only."""
        self._context, self._on_end = context, on_end
        self._around = ExitStack()
        self._recording: StepRecording | None = None
        self._before: tuple[Any, ...] = ()
        self._begin_s = self._clock_s = 0.0
        self._is_lost = self._is_healed = self._is_undone = False
        self._passes: Generator[Any] | None = None
        self._deal(portion)

    def _deal(self, portion: Portion) -> None:
        """These shards of the batch are this worker's; none of them is computed yet."""
        self._busy = portion.busy or min(self._context.shards, portion.samples)
        self._shards = portion.shards
        self.local_samples = sum([len(shard.indices) for shard in portion.shards])
        self._shard: Shard | None = None
        self._losses: list[Loss] = []
        self._items = 0.0
        self._has_items: bool | None = None
        self._is_weighted = self._has_idle_worker = self._is_summed = False
        self._scale = 1.0

    def __enter__(self) -> Step:
        if self.state != "new":
            raise UsageError(
                f"Step {self.number} is {self.state} and cannot be run again.",
                advice="Take steps from the run: `for step in run: with step: ...`.",
            )
        context = self._context
        self._begin_s = time.perf_counter()
        self._before = context.generators.state()
        if self.number in (context.watching.trace_step, context.watching.asked_step):
            indices = [index for shard in self._shards for index in shard.indices]
            recording = context.watching.recording(
                self.number, context.model, indices, context.sinks
            )
            self._recording = self._around.enter_context(recording)
        self._begin()
        return self

    def _begin(self) -> None:
        """Clear the gradients, and remember what has to be put back if this fails."""
        context = self._context
        context.update.begin(self.number)
        context.model._begin_step(self.number)
        if context.step_note is not None:
            context.step_note[0] = self.number
        self.state = "open"
        lr = context.config.optimizer.param_groups[0].get("lr")
        self.lr = lr if isinstance(lr, int | float) else None
        if context.buffers is not None:
            context.buffers.begin()
        self._scale = context.size / self.samples
        if context.precision.is_short:
            self._scale, self._is_weighted = 1 / self.samples, True
        self._has_idle_worker = self._busy < context.size
        if context.noise is not None:
            context.noise.begin(self.number)
            if context.noise.is_measuring:
                self._scale, self._is_weighted = 1.0, True

    def batches(self) -> Iterator[Any]:
        """This worker's shards of the global batch, on the model's device.

        Empty on a worker that a short batch leaves without any; it takes part all the same.
        """
        if self.state != "open" or self._shard is not None or self._losses:
            raise UsageError(
                f"Step {self.number}: batches() is for one loop inside `with step:`.",
                advice="Keep the batches in a list to go through them twice.",
            )
        while True:
            self._passes = passes = self._batches()
            yield from passes
            if self._sum_up() or self._begin_anew():
                return

    def _batches(self) -> Generator[Any]:
        context = self._context
        for shard in self._shards:
            self._clock_s = time.perf_counter()
            batch = context.loader.load(shard)
            if context.device.type != "cpu":
                batch = context.to_device(batch)
            context.generators.seed(context.config.seed, "model", self.number, shard.number)
            self._lap(Phase.DATA)
            if context.buffers is not None:
                context.buffers.begin_shard()
            self._shard = shard
            with context.precision.forward:
                if shard is self._shards[-1]:
                    yield batch
                else:
                    with context.model.no_sync():
                        yield batch
            if self._is_lost:
                return
            self._end_shard()

    def _sum_up(self) -> bool:
        """Do what all workers do together when their shards are computed; False if one died."""
        context = self._context
        try:
            if not self._is_lost:
                if not self._shards:
                    context.model._take_part()
                if context.size > 1 and self.number >= context.vote.next_step:
                    context.vote.start(self.number)
                if context.buffers is not None:
                    context.buffers.settle(self.number, self._busy)
                self._is_summed = True
        except PeerError:
            if context.survival is None:
                raise
            self._is_lost = True
        return not self._is_lost

    def _begin_anew(self) -> bool:
        """A worker has died: deal the batch to those who are left; False if they compute it now."""
        portion = self._recover()
        if portion is None:
            return True
        self._deal(portion)
        self._begin()
        return False

    def _recover(self) -> Portion | None:
        """Go on without a worker that has died; this one's part of the step, computed anew.

        None where the step is over: it is applied where others had all of the sum when it was
        lost here, and undone where the dead took a part of the state along.
        """
        context = self._context
        self._undo()
        losses = context.metrics.put_aside()
        portion = context.continuity.deal_anew(self.number)
        self._is_lost = False
        if portion is None and context.position.step >= self.number:
            context.metrics.take_back(losses)
            context.continuity.leave_word()
            self._is_healed = True
        else:
            self._is_undone = portion is None
        return portion

    def _end_shard(self) -> None:
        """The loop continues with the next batch, or is over."""
        shard, self._shard = self._shard, None
        if shard is None:
            return
        if not self._losses or self._losses[-1].shard != shard.number:
            raise UsageError(
                f"Step {self.number}: there was no step.backward() for shard {shard.number}.",
                advice="Call it once per batch; for a batch that should not count, with items=0.",
            )
        if self._context.buffers is not None:
            self._context.buffers.end_shard(shard.number)

    def backward(
        self,
        loss: Tensor,
        items: float | Tensor | None = None,
        reduction: str = "mean",
        **old: Any,
    ) -> None:
        """Add the gradients of one shard's loss: the mean over `items`, or, with "sum", their sum.

        Gradients become those of the sum over all shards, divided by the number of all items.
        Without `items` these are the shard's samples. A tensor is read from its device.
        """
        context, shard, is_mean = self._context, self._shard, reduction == "mean"
        if old or reduction not in ("mean", "sum"):
            _refuse_arguments(old, reduction)
        if shard is None or (self._losses and self._losses[-1].shard == shard.number):
            raise UsageError(
                f"Step {self.number}: step.backward() is called once per batch, inside the loop "
                "over step.batches().",
                advice="Add the losses of one batch together first.",
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            self._refuse_loss(loss)
        self._lap(Phase.FORWARD)
        count = len(shard.indices) if items is None else self._number(items)
        if self._has_items not in (None, items is not None):
            raise UsageError(
                f"Step {self.number}: items were given for one batch and not for another.",
                advice="Pass items= to every step.backward(), or to none.",
            )
        self._has_items = items is not None
        self._is_weighted |= self._has_items
        if is_mean and not count:  # a mean over nothing, which torch's losses make NaN
            loss = torch.nan_to_num(loss)
        if self._recording is not None:
            self._recording.note_loss(loss * count if is_mean else loss, weight=count)
        factor = count * self._scale if is_mean else self._scale
        if shard is self._shards[-1] and (self._is_weighted or self._has_idle_worker):
            # See Note [Weights].
            weight = context.size if self._shards[0].number == 0 else 0.0
            if self._is_weighted:
                weight = (self._items + count) * self._scale
            context.model._weigh(weight)
        value = loss.detach()
        add = context.metrics.add if is_mean else context.metrics.add_sum
        add("loss", value, count)
        if context.survival is not None and shard is self._shards[-1]:
            context.continuity.leave_word(is_applied=False)
        try:
            with context.precision.backward:
                context.update.backward(loss, factor)
        except PeerError:
            if context.survival is None:
                raise
            self._is_lost = True
            return
        self._losses.append(Loss(value, shard.number, shard.indices))
        self._items += count
        if context.noise is not None:
            context.noise.add(count)
        self._lap(Phase.BACKWARD)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> bool:
        survival = self._context.survival
        if self._passes is not None:
            self._passes.close()  # ends autocast, should somebody still hold the batches
        is_lost = bool(error and survival and survival.explains(error))
        try:
            if kind is None:
                with self._around:
                    self._finish()
                    self.state = "undone" if self._is_undone else "applied"
            else:
                if isinstance(error, Exception):
                    error.add_note(f"In step {self.number} of the run.")
                self._around.__exit__(kind, error, frames)
                if (meaning := self._context.precision.explain(error)) is not None:
                    raise meaning from error
        except PeerError:
            if survival is None:
                raise
            is_lost = True
        finally:
            if self.state == "undone":
                self._context.metrics.forget()
            elif self.state != "applied":
                self._put_back()
            self.seconds = time.perf_counter() - self._begin_s
            self.phases[Phase.OTHER] = max(0.0, self.seconds - sum(self.phases.values()))
            if self._context.device.type != "cpu":
                self.phases = {Phase.DATA: self.phases.get(Phase.DATA, 0.0)}
            if is_lost:
                self.state = "lost"
            self._on_end(self)
        return is_lost

    def _finish(self) -> None:
        if self._is_healed or self._is_undone:
            return
        context, shards = self._context, self._shards
        if self._is_lost:
            raise PeerError(f"Step {self.number}: a worker is gone.")
        if len(self._losses) != len(shards):
            raise UsageError(
                f"Step {self.number}: {len(self._losses)} of this worker's {len(shards)} shards "
                "were computed.",
                advice="Go through all of step.batches() and call step.backward() for each; to "
                "leave the step out, leave the `with` block by an exception.",
            )
        self._end_shard()  # the loop may have been left by `break` after the last batch
        if not self._is_summed and not self._sum_up():
            raise PeerError(f"Step {self.number}: a worker is gone.")
        if context.size == 1 and self._is_weighted:
            total = self._items * self._scale
            if not math.isclose(total, 1.0, rel_tol=1e-15):  # which costs a pass over gradients
                context.update.multiply_grads(mean_factor(1, total))
        if context.noise is not None and context.noise.is_measuring:
            context.noise.end(scale=context.update.loss_scale)
        self._clock_s = time.perf_counter()
        try:
            norm = context.update.commit(self._losses)
        except PeerError:  # an update that is shared out was applied by some, or by nobody
            if context.survival is None:
                raise
            self._is_undone = self._recover() is not None or self._is_undone
            return
        if norm is not None:
            # All have the same one, and together they count as one.
            context.metrics.add("grad_norm", norm, 1.0 / context.size)
        context.generators.seed(context.config.seed, "between", self.number)
        self._lap(Phase.OPTIMIZER)

    def _put_back(self) -> None:
        """Leave this worker as it was before the step."""
        self.state = "failed"
        self._undo()
        self._context.metrics.forget()
        self._context.generators.restore(self._before)

    def _undo(self) -> None:
        context = self._context
        context.model._begin_step(self.number)
        if context.noise is not None:
            context.noise.cancel()
        context.update.abandon()
        if context.buffers is not None:
            context.buffers.restore()

    def _refuse_loss(self, loss: Any) -> None:
        what = f"is {loss!r:.80}, not a tensor"
        if isinstance(loss, Tensor):
            what = "does not depend on any parameter"
            if loss.numel() != 1:
                what = f"has {loss.numel()} elements"
        raise UsageError(
            f"Step {self.number}: the loss {what}.",
            advice="Pass the mean that the loss function returned for the output of run.model, "
            "without .item(), detach() and torch.no_grad(), and its items= where those are not the "
            "samples of the batch.",
        )

    def _number(self, items: float | Tensor) -> float:
        try:
            number = float(items)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not 0 <= number < math.inf:
            raise UsageError(
                f"Step {self.number}: items is {items!r:.80}; it is how many items the loss is "
                "a mean or a sum over.",
                advice="Pass the number of samples or tokens, from 0 up.",
            )
        return number

    def _lap(self, phase: Phase) -> None:
        """What has passed since the last lap belongs to `phase`."""
        now_s = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now_s - self._clock_s
        self._clock_s = now_s


def _refuse_arguments(old: dict[str, Any], reduction: str) -> None:
    if "weight" in old:
        raise UsageError(
            "step.backward() has no weight= any more.",
            advice="Pass a mean as it is, with items= over how many it is where those are not the "
            'samples; or a sum with items=n, reduction="sum".',
        )
    if old:
        raise TypeError(f"step.backward() has no argument {next(iter(old))!r}.")
    raise UsageError(f"reduction is {reduction!r}.", advice="Use 'mean' or 'sum'.")


# Note [Weights]
# Gradients are summed over the workers and divided by the sum of all weights, which costs a pass
# over them unless that quotient is one. Usually the items are samples, and everybody knows how
# many the global batch has: so losses are multiplied by size / samples beforehand, and the plain
# average over the workers is right. A worker without a shard weighs nothing, because it cannot know
# whether the others weigh items; then the one that has shard 0 brings all the weight there is,
# `size`, so that nothing is left to divide. Where items are given they are scaled alike, and the
# quotient corrects for the difference. In 16 bits the factor of a loss decides how its gradients
# are rounded, and whether they overflow; so there it does not depend on the number of workers.
