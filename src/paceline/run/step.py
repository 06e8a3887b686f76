"""One step as a transaction: it is applied as a whole, or nothing has happened.

with step:                                   begin: gradients cleared, state remembered
    for x, y in step.batches():              shard by shard, each with its own random numbers
        step.backward(loss)                  the last backward also sums over the workers
                                             end: checked, then committed; or all put back
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from paceline.comm import tree
from paceline.errors import UsageError
from paceline.record import StepRecording
from paceline.run.context import Workshop
from paceline.run.loader import Portion, Shard
from paceline.run.seeds import derive
from paceline.update.finite import Loss


class Step:
    """One step of a run, on one worker.

        new --with--> open --(end of the block)--> applied
                       └────────(an error)───────> failed: all is as before

    Invariant: parameters, buffers, optimizer, scheduler and scaler change at the end of the block,
    all of them or none.
    """

    def __init__(
        self,
        portion: Portion,
        workshop: Workshop,
        on_summed: Callable[[Step], None],
        on_end: Callable[[Step], None],
    ) -> None:
        """`on_summed` is called when all gradients have arrived, and `on_end` when the block is
        over, whether the step is applied or failed."""
        self.number = portion.step
        """Counts from 1: the number of steps applied when this one is."""
        self.epoch = portion.epoch
        """Counts from 0."""
        self.ends_epoch = portion.ends_epoch
        """Whether this is the last step of its epoch."""
        self.samples = portion.samples
        """How many samples the global batch has, on all workers together."""
        self.state = "new"
        self.local_samples = sum(len(shard.indices) for shard in portion.shards)
        """How many of them this worker computes."""
        self.seconds = 0.0
        """How long the block took."""
        self._portion = portion
        self._on_summed, self._on_end = on_summed, on_end
        self._shop = workshop
        self._inside, self._around = ExitStack(), ExitStack()
        self._recording: StepRecording | None = None
        self._before: tuple[Any, ...] = ()
        self._shard: Shard | None = None
        self._done = 0
        self._losses: list[Loss] = []
        self._weight = 0.0
        self._has_items: bool | None = None
        self._is_weighted = False
        self._scale = 1.0
        self._begin_s = self._clock_s = 0.0

    def __enter__(self) -> Step:
        if self.state != "new":
            raise UsageError(
                f"Step {self.number} is {self.state} and cannot be run again.",
                advice="Take steps from the run: `for step in run: with step: ...`.",
            )
        shop = self._shop
        shop.update.begin()
        self.state = "open"
        self._begin_s = time.perf_counter()
        self._before = shop.generators.state()
        if shop.recorder is not None:
            indices = [index for shard in self._portion.shards for index in shard.indices]
            recorder = shop.recorder.around(self.number, indices)
            self._recording = self._around.enter_context(recorder)
        shop.buffers.begin()
        shop.seconds = dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.0)
        self._scale = shop.size / self.samples
        if shop.noise is not None:
            shop.noise.begin(self.number)
            if shop.noise.is_measuring:
                self._scale, self._is_weighted = 1.0, True
        return self

    def batches(self) -> Iterator[Any]:
        """This worker's shards of the global batch, on the model's device.

        Empty on a worker that a short batch leaves without any; it takes part all the same.
        """
        if self.state != "open" or self._shard is not None or self._done:
            raise UsageError(
                f"Step {self.number}: batches() is for one loop inside `with step:`.",
                advice="Keep the batches in a list to go through them twice.",
            )
        shop, shards = self._shop, self._portion.shards
        for position, shard in enumerate(shards):
            self._lap()
            batch = shop.loader.load(shard)
            if shop.device.type != "cpu":
                batch = tree.map_tensors(self._to_device, batch)
            self._lap("data")
            shop.buffers.begin_shard()
            shop.generators.seed(derive(shop.seed, "model", self.number, shard.number))
            self._shard = shard
            is_last = position == len(shards) - 1
            # As in torch, whether gradients are summed is decided by the forward pass.
            self._inside.enter_context(shop.model.no_sync(enabled=not is_last))
            yield batch
            self._end_shard()

    def _end_shard(self) -> None:
        """The loop goes on to the next batch, or is over."""
        shard, self._shard = self._shard, None
        if shard is None:
            return
        self._inside.close()
        if not self._is_done(shard):
            raise UsageError(
                f"Step {self.number}: there was no step.backward() for shard {shard.number}.",
                advice="Call it once per batch; for a batch that should not count, with items=0.",
            )
        self._shop.buffers.end_shard(shard.number)

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
        shop, shard = self._shop, self._shard
        _refuse_old_arguments(old, reduction)
        if shard is None or self._is_done(shard):
            raise UsageError(
                f"Step {self.number}: step.backward() is called once per batch, inside the loop "
                "over step.batches().",
                advice="Add the losses of one batch together first.",
            )
        if loss.numel() != 1:
            raise UsageError(
                f"Step {self.number}: the loss has {loss.numel()} elements.",
                advice="Pass their mean, and over how many items it is as items= where those are "
                "not the samples of the batch.",
            )
        if not shop.update.has_noted_grads:
            raise UsageError(
                f"Step {self.number}: the gradients of the shards before shard {shard.number} were "
                "changed or cleared.",
                advice="Leave zero_grad() and clipping to the run: it clears gradients itself, and "
                "clips those of the whole batch with clip_norm=.",
            )
        self._lap("forward")
        count = len(shard.indices) if items is None else _number(items)
        self._note_items(are_given=items is not None)
        is_mean = reduction == "mean"
        if is_mean and not count:  # a mean over nothing: torch's losses make it NaN
            loss = torch.nan_to_num(loss)
        if self._recording is not None:
            self._recording.note_loss(loss * count if is_mean else loss, weight=count)
        with self._weighted(count):
            scaled = shop.finite.poisoned(loss, count * self._scale if is_mean else self._scale)
            shop.update.scaled(scaled).backward()  # type: ignore[no-untyped-call]
        shop.update.note_grads()
        self._done += 1
        self._losses.append(Loss(shard, loss.detach()))
        self._weight += count
        if is_mean:
            shop.metrics.add("loss", loss.detach(), count)
        else:
            shop.metrics.add_sum("loss", loss, count)
        if shop.noise is not None:
            shop.noise.add(count)
        self._lap("backward")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with self._around:
                    self._finish()
                    self.state = "applied"
            else:
                self._around.__exit__(kind, error, frames)
        finally:
            if self.state != "applied":
                self._put_back()
            self._shop.update.end()
            self.seconds = time.perf_counter() - self._begin_s
            self._on_end(self)

    @property
    def phases(self) -> dict[str, float]:
        """Where the time of the block went. Of a GPU the host sees the loading of data only."""
        spent = dict(self._shop.seconds)
        if self._shop.device.type != "cpu":
            return {"data": spent["data"]}
        spent["other"] = max(0.0, self.seconds - sum(spent.values()))
        return spent

    def _finish(self) -> None:
        shop = self._shop
        shards = self._portion.shards
        if self._done == len(shards):
            self._end_shard()  # the loop may have been left by `break` after the last batch
        else:
            raise UsageError(
                f"Step {self.number}: {self._done} of this worker's {len(shards)} shards were "
                "computed.",
                advice="Go through all of step.batches() and call step.backward() for each; to "
                "leave the step out, leave the `with` block by an exception.",
            )
        if not shards:
            self._take_part_without_samples()
        self._on_summed(self)
        self._lap("other")
        if shop.size == 1 and self._is_weighted:
            self._divide_by_weight()
        shop.buffers.settle(self.number, min(shop.shards, self.samples))
        if shop.noise is not None and shop.noise.is_measuring:
            shop.noise.end(scale=shop.update.loss_scale)
        norm = shop.update.norm()
        if shop.update.scaler is None:
            shop.finite.check(self.number, self._losses, norm)
        if norm is not None:
            shop.metrics.add("grad_norm", norm, 1.0)
        self._lap("other")
        shop.update.apply(norm)
        shop.generators.seed(derive(shop.seed, "between", self.number))
        self._lap("optimizer")

    def _put_back(self) -> None:
        """Leave this worker as it was before the step."""
        shop = self._shop
        self.state = "failed"
        self._inside.close()
        if shop.noise is not None:
            shop.noise.cancel()
        shop.update.zero_grads()
        shop.buffers.restore()
        shop.metrics.forget()
        shop.finite.forget()
        shop.generators.restore(self._before)

    def _note_items(self, *, are_given: bool) -> None:
        if self._has_items not in (None, are_given):
            raise UsageError(
                f"Step {self.number}: items were given for one batch and not for another.",
                advice="Pass items= to every step.backward(), or to none.",
            )
        self._has_items = are_given
        self._is_weighted |= are_given

    def _weighted(self, count: float) -> AbstractContextManager[None]:
        """Say how much of the step's weight this backward brings; see Note [Weights]."""
        shop = self._shop
        if shop.size == 1:
            return nullcontext()
        if self._is_weighted:
            return shop.model.weighted(count * self._scale)
        is_first = self._shard is not None and self._shard.number == 0
        return shop.model.weighted(shop.size if is_first else 0.0)

    def _divide_by_weight(self) -> None:
        """What the sum over the workers does otherwise, for a worker that is alone."""
        total = self._weight * self._scale
        if total != 1.0:
            self._shop.update.multiply_grads(1.0 / total if total else 0.0)

    def _take_part_without_samples(self) -> None:
        """Sum with the others without anything to add, and get what they have.

        A real backward would have to reach a parameter, and then all would think it was used.
        """
        model = self._shop.model
        with model.weighted(0.0):
            model._reducer.take_part()

    def _is_done(self, shard: Shard) -> bool:
        return bool(self._losses) and self._losses[-1].shard is shard

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._shop.device, non_blocking=True)

    def _lap(self, phase: str = "") -> None:
        """What has passed since the last call belongs to `phase`."""
        now_s = time.perf_counter()
        if phase in self._shop.seconds:
            self._shop.seconds[phase] += now_s - self._clock_s
        self._clock_s = now_s


def _refuse_old_arguments(old: dict[str, Any], reduction: str) -> None:
    if "weight" in old:
        raise UsageError(
            "step.backward() has no weight= any more.",
            advice="Pass a mean as it is, with items= over how many it is where those are not the "
            'samples; or a sum with items=n, reduction="sum".',
        )
    if old:
        raise TypeError(f"step.backward() has no argument {next(iter(old))!r}.")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction is {reduction!r}.", advice="Use 'mean' or 'sum'.")


def _number(items: float | Tensor) -> float:
    number = float(items)
    if not 0 <= number < float("inf"):
        raise UsageError(
            f"items is {number}; it is how many items the loss is a mean or a sum over.",
            advice="Pass the number of samples or tokens, from 0 up.",
        )
    return number


# Note [Weights]
# Gradients are summed over the workers and divided by the sum of all weights, which costs a pass
# over them unless that quotient is one. Usually the items are samples, and everybody knows how
# many the global batch has: so losses are multiplied by size / samples beforehand, and the worker
# that has shard 0 brings all the weight there is, `size`, so that nothing is left to divide. Where
# weights are given they are scaled alike, and the quotient corrects for the difference.
