"""`Run`: a training as a sequence of steps that can stop anywhere and go on at any size.

The class puts the parts of this package together and walks through the steps; each part can be read
alone. What happens in a step is in `step`, what happens between two of them is here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.world import World
from paceline.errors import UsageError
from paceline.run.between import Between
from paceline.run.build import build
from paceline.run.config import Wanted
from paceline.run.evaluation import Evaluation, Score
from paceline.run.loader import loading_options
from paceline.run.metrics import means
from paceline.run.options import RunOptions
from paceline.run.step import Step
from paceline.run.stop import StopRequest, name_signal

DEFAULT_OPTIONS = RunOptions()


class Run:
    """A training of `epochs` passes over `dataset`, in steps of `global_batch` samples.

        for step in run:
            with step:
                for x, y in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))

    The batch of a step is cut into `shards`, one per worker of the first start unless said
    otherwise; any number of workers up to that computes the same training. With a `folder` the run
    is recorded there, and goes on from its newest good checkpoint. `state` are further objects with
    `state_dict()` that belong to it, by name. `workers` are processes that load data.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any,
        *,
        global_batch: int,
        epochs: int,
        seed: int = 0,
        folder: str | os.PathLike[str] | None = None,
        shards: int | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        workers: int = 0,
        world: World | None = None,
        options: RunOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.options = options
        self._parts = build(
            Wanted(
                model=model,
                optimizer=optimizer,
                dataset=dataset,
                global_batch=global_batch,
                epochs=epochs,
                seed=seed,
                folder=folder,
                shards=shards,
                scheduler=scheduler,
                scaler=scaler,
                state=state or {},
                workers=workers,
                world=world,
                options=options,
            )
        )
        self._stop = StopRequest(self._parts.record.say)
        self._between = Between(self._parts, self._stop)
        self._open: Step | None = None
        self._is_running = False

    @property
    def model(self) -> nn.Module:
        """The model to call in the loop; the one that was passed, kept equal on all workers."""
        return self._parts.shop.model

    @property
    def world(self) -> World:
        return self._parts.world

    @property
    def step(self) -> int:
        """How many steps are applied."""
        return self._between.position.step

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self._between.position.epoch

    @property
    def steps(self) -> int | None:
        """How many steps the whole run has; None for a dataset without a length."""
        return self._parts.record.info.steps

    @property
    def shards(self) -> int:
        return self._parts.shop.shards

    def log(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Keep a metric of the current step: a mean over `weight` items.

        Tensors stay on their device until the step is long over.
        """
        self._parts.shop.metrics.add(name, value, weight)

    def message(self, text: str, level: str = "info") -> None:
        """Say something on the terminal, once for all workers, and keep it in the folder."""
        self._parts.record.message(text, level)

    def evaluate(
        self,
        score: Score,
        dataset: Any = None,
        *,
        reduction: Literal["mean", "sum"] | None = None,
        batch: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
    ) -> dict[str, float]:
        """Score every sample once, on all workers together, and return the means by name.

        `score(batch)` gives means over the samples of the batch by name, {"accuracy": 0.9}; where
        they are over other items, with how many: {"loss": (loss, tokens)} and reduction="mean".
        With reduction="sum" the numbers are sums. It is called in evaluation mode, without
        gradients. Every worker calls this; without a dataset it is the one that is trained on.
        """
        self._refuse_inside_step("evaluate")
        parts, shop, begin_s = self._parts, self._parts.shop, time.perf_counter()
        task = Evaluation(
            dataset=parts.dataset if dataset is None else dataset,
            batch=-(-parts.record.info.global_batch // shop.shards) if batch is None else batch,
            collate_fn=collate_fn or self.options.collate_fn,
            loading=loading_options(
                workers=workers,
                pin_memory=parts.pin_memory,
                prefetch=self.options.prefetch,
                lifeline=parts.lifeline,
            ),
            seed=shop.seed,
            step=self.step,
            reduction=reduction,
        )
        total = task.run(score, shop.module, parts.group, shop.generators, parts.word_device)
        samples = int(max((count for _, count in total.values()), default=0))
        scores = means(total)
        self._between.on_evaluation(scores, samples, time.perf_counter() - begin_s)
        return scores

    def save(self) -> None:
        """Save now, besides what the options say; every worker calls it, between two steps."""
        self._refuse_inside_step("save")
        if self._open is not None and self._open.state == "applied":
            self._between.keep(self._open)
        self._between.save()

    def __iter__(self) -> Iterator[Step]:
        if self._is_running:
            raise UsageError("This run is being iterated already.", advice="One loop at a time.")
        return self._walk()

    def _walk(self) -> Iterator[Step]:
        parts = self._parts
        status, reason, number = "failed", "an error", 0
        parts.saving.begin()
        self._is_running = True
        self._between.begin()
        self._listen()
        if self.options.handle_signals:
            parts.lifeline.tie()
        parts.record.start(self.step, parts.lines)
        parts.watching.begin(parts.group, parts.record)
        portions = parts.shop.loader.portions(self._between.position)
        try:
            while (portion := next(portions, None)) is not None:
                self._listen()
                step = Step(portion, parts.shop, self._between.on_summed, self._between.on_step_end)
                self._open = step
                yield step
                self._open = None
                if step.state != "applied":
                    self._refuse_untried(step)
                    portions = parts.shop.loader.portions(self._between.position)
                    continue
                if number := self._between.after(step):
                    status, reason = "stopped", f"stopped by {name_signal(number)}"
                    self._between.leave_together()
                    break
            else:
                parts.shop.finite.ask()
                status, reason = "finished", "all steps are applied"
        except GeneratorExit:
            if self._open is None or self._open.state != "failed":
                status, reason = "stopped", "the loop was left"
                self._between.say_what_is_not_saved()
            raise
        finally:
            self._is_running, self._open = False, None
            if not sys.is_finalizing():  # a loop that outlives the program has nothing to say
                self._end(status, reason, is_complete=status == "finished" or number > 0)
        if number and self.options.exit_on_signal:
            raise SystemExit(128 + number)

    def _end(self, status: str, reason: str, *, is_complete: bool) -> None:
        parts = self._parts
        try:
            parts.lifeline.cut()
            parts.shop.loader.close()
            parts.shop.metrics.flush(wait=is_complete)
            parts.saving.report(parts.record, wait=True)
            parts.record.stop(self.step, status, reason)
        finally:
            parts.watching.end()
            parts.saving.end()
            self._stop.ignore()

    def _listen(self) -> None:
        if self.options.handle_signals:
            self._stop.listen()

    def _refuse_inside_step(self, what: str) -> None:
        if self._open is not None and self._open.state == "open":
            raise UsageError(
                f"run.{what}() was called inside step {self._open.number}.",
                advice="Call it between two steps: after the `with` block, in the same loop.",
            )

    def _refuse_untried(self, step: Step) -> None:
        if step.state != "failed":
            raise UsageError(
                f"Step {step.number} was not run.",
                advice="Run every step: `for step in run: with step: ...`; `break` ends the loop.",
            )
