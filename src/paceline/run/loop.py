"""`Run`: a training as a sequence of steps that can stop anywhere and continue at any size.

The class is the way through the steps, and what happens between two of them: report what the last
was like, agree on stopping, save, end an epoch. What happens in a step is in `step`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline import env
from paceline.comm.world import World
from paceline.ddp import DDPOptions
from paceline.errors import CheckpointError, PeerError, UsageError
from paceline.observe import stopwatch
from paceline.run import stop
from paceline.run.config import RunConfig, RunOptions
from paceline.run.context import StepContext
from paceline.run.evaluation import Score, evaluate
from paceline.run.metrics import means
from paceline.run.own_loader import OwnLoader
from paceline.run.plan import Position
from paceline.run.sinks import ALL_APPLIED, Message, Sink, StepReport, Summary
from paceline.run.step import Step

DEFAULT_OPTIONS = RunOptions()


class Run:
    """A training of `epochs` passes over `dataset`, in steps of `global_batch` samples.

        for step in run:
            with step:
                for x, y in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))

    The batch of a step is cut into `shards`, one per worker of the first start unless said
    otherwise; any number of workers up to that computes the same training. With a `folder` the run
    is recorded there, and continues from its newest good checkpoint. `state` are further objects
    with `state_dict()` that belong to it, by name. `workers` are processes that load data. `ddp`
    are options of the engine, and `sinks` are told what happens, on rank 0; `trackers` are too, and
    may be names: `"tensorboard"`, `"wandb:project"`. Instead of a dataset, `loader` may give each
    worker's batches: an iterable, or a function that makes one of a `World`; see docs/data.md.

    Invariant: the position moves with the commit of a step, so that a save at any time afterwards
    holds as many steps as the parameters do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Any = None,
        *,
        global_batch: int | None = None,
        epochs: int,
        seed: int = 0,
        folder: str | os.PathLike[str] | None = None,
        shards: int | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        workers: int = 0,
        world: World | None = None,
        ddp: DDPOptions | None = None,
        sinks: Sequence[Sink] = (),
        trackers: Sequence[str | Sink] = (),
        loader: Any = None,
        options: RunOptions = DEFAULT_OPTIONS,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        config = RunConfig(**arguments)
        context = self._context = StepContext(config)
        self.options = options
        self.model: nn.Module = context.model
        """The model to call in the loop; the one that was passed, kept equal on all workers."""
        self.world = context.world
        self.membership = context.membership
        """Who takes part; `run.membership.move_on(group)` between two steps changes it."""
        self.shards = context.shards
        self.steps: int | None = context.info.steps
        """How many steps the whole run has; None for a dataset without a length."""
        self._scores: dict[str, float] = {}
        """What is known of the model as it is now: a step that is applied makes it another one."""
        self._open: Step | None = None
        self._is_running = False
        self._reported = 0
        self._epoch_s = time.perf_counter()
        self._epoch_samples = self._context.position.step_of_epoch * config.global_batch
        self._phases: dict[str, float] = {}

    @property
    def step(self) -> int:
        """How many steps are applied."""
        return self._context.position.step

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self._context.position.epoch

    @property
    def ema(self) -> dict[str, Any] | None:
        """The averaged weights, as a state dict of the model; None without `ema=`."""
        average = self._context.average
        return None if average is None else average.state_dict()

    def log(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Keep a metric of the current step: a mean over `weight` items.

        Tensors stay on their device until the step is long over.
        """
        self._context.metrics.add(name, value, weight)

    def message(self, text: str, level: str = "info") -> None:
        """Say something on the terminal, once for all workers, and keep it in the folder."""
        self._context.sinks.tell("message", Message(text, level))

    def evaluate(
        self,
        score: Score,
        dataset: Any = None,
        *,
        reduction: Literal["mean", "sum"] | None = None,
        batch: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        ema: bool = False,
    ) -> dict[str, float]:
        """Score every sample once, on all workers together, and return the means by name.

        `score(batch)` gives means over the samples of the batch by name, {"accuracy": 0.9}; where
        they are over other items, with how many: {"loss": (loss, tokens)} and reduction="mean".
        With reduction="sum" the numbers are sums. It is called in evaluation mode, without
        gradients. Every worker calls this; without a dataset it is the one that is trained on.

        With `ema` the model has the averaged weights meanwhile, and names begin with "ema_".
        """
        self._refuse_inside_step("evaluate")
        context, begin_s = self._context, time.perf_counter()
        if not callable(score):
            raise UsageError(
                f"run.evaluate() takes a function that scores a batch, not {type(score).__name__}.",
                advice="Call run.evaluate(score, dataset).",
            )
        if ema and context.average is None:
            raise UsageError(
                "run.evaluate(ema=True) was called in a run that averages no weights.",
                advice="Pass ema=0.999 in RunOptions.",
            )
        config, position = context.config, context.position
        if dataset is None and config.dataset is None:
            raise UsageError(
                "There is no dataset to evaluate on: this run has a loader.",
                advice="Pass one to run.evaluate(), of which every worker takes its share.",
            )
        task = partial(
            evaluate,
            context,
            score,
            config.dataset if dataset is None else dataset,
            batch=-(-config.global_batch // context.shards) if batch is None else batch,
            collate_fn=collate_fn or config.collate_fn,
            workers=workers,
            step=position.step,
            reduction=reduction,
            average=context.average if ema else None,
        )
        total = context.continuity.add_up(task, "Adding up the evaluation")
        samples = int(max((count for _, count in total.values()), default=0))
        scores = means(total)
        if context.continuity.is_apart:
            return scores  # of a step that is done again, and then for all to see
        self._scores |= scores
        # After the last step of an epoch the next one has begun, but has nothing to show yet.
        epoch = max(position.epoch - (position.step_of_epoch == 0), 0)
        seconds = time.perf_counter() - begin_s
        summary = Summary(epoch, position.step, scores, seconds, samples)
        context.sinks.tell("evaluation", summary)
        return scores

    def stop(self) -> None:
        """End the run after this step, with a checkpoint and without an error.

        One worker is enough to end it on all of them, after the same step: they agree about ten
        times a second. Started again, the run continues.
        """
        self._context.stop.is_asked = True

    def save(self) -> None:
        """Save now, besides what the options say; every worker calls it, between two steps."""
        self._refuse_inside_step("save")
        if self._open is not None and self._open.state == "applied":
            self._report(self._open)
        self._save()
        if not self._is_running and (lost := self._find_lost()):
            raise _not_saved(f"over, but {lost}")
        if not self._is_running:
            env.note_unsaved(False)

    def __iter__(self) -> Iterator[Step]:
        if self._is_running:
            raise UsageError("This run is being iterated already.", advice="One loop at a time.")
        return self._walk()

    def _walk(self) -> Iterator[Step]:
        context, members = self._context, self.membership
        continuity = context.continuity
        status, reason, number = "failed", "an error", 0
        lost: str | None = None
        is_complete = False
        context.saving.begin()
        self._is_running = True
        self._epoch_s = time.perf_counter()
        if self.options.handle_signals:
            context.stop.listen()
            context.loader_signals.hold()
        is_first = not context.is_replacement
        if is_first:
            context.sinks.tell("start", context.info, self.step, context.lines)
        context.watching.begin(members, context.sinks)
        continuity.begin()
        if not is_first:  # now it knows the step
            context.sinks.tell("start", context.info, self.step, context.lines)
            done = context.position.step_of_epoch
            self._epoch_samples = done * context.config.global_batch
        if context.rating.is_over:  # it was when the last start ended
            context.stopping = stop.BY_RATING
        try:
            if is_first and context.survival is not None and context.shares_out:
                self._save()  # something to go back to
                self._find_lost()
            while True:
                portion = None if context.stopping else continuity.next_portion()
                if portion is None:
                    if not context.stopping:
                        context.update.finish()
                    # A launcher that sees one go would end the one that writes.
                    lost = "" if context.has_left else self._leave_together()
                    if lost is not None:
                        break
                    context.stopping, context.stop.is_asked = 0, False
                    continue
                if portion.step <= self._reported:
                    self._go_back()
                if self.options.handle_signals and not context.stop.before:
                    context.stop.listen()
                step = self._open = Step(portion, context, self._on_step_end)
                yield step
                self._open = None
                if step.state == "applied":
                    self._after(step)
                elif step.state == "lost":
                    continuity.regroup()
                elif step.state in ("failed", "undone"):
                    continuity.deal()  # the same step comes again, or one before it
                else:
                    raise UsageError(
                        f"Step {step.number} was not run.",
                        advice="Run every step: `for step in run: with step: ...`; `break` ends "
                        "the loop.",
                    )
                continuity.deal_to_members()
            status, reason, number = self._why_over()
            is_complete = True
            if lost:
                reason = f"{status}, but {lost}"
        except GeneratorExit:
            if self._open is None or self._open.state != "failed":
                status, reason = "stopped", "the loop was left"
                if self._open is not None and self._open.state == "applied":
                    self._report_step(self._open)
                self._say_what_is_not_saved()
                continuity.end(is_left=True)
            raise
        finally:
            self._is_running, self._open = False, None
            context.stopping, context.stop.is_asked = 0, False
            if not sys.is_finalizing():  # a loop that outlives the program has nothing to say
                self._end(status, reason, is_complete=is_complete)
        if number and self.options.exit_on_signal:
            raise SystemExit(128 + number)
        if lost:
            raise _not_saved(reason)

    def _why_over(self) -> tuple[str, str, int]:
        """The status of a run whose loop is over, the reason, and the signal, if it was one."""
        context, number = self._context, self._context.stopping
        if context.has_left:
            return "stopped", "this worker was asked to leave; the others continue", number
        if number >= stop.BY_SCRIPT and self.step == self.steps:
            number = 0
        match number:
            case 0:
                return "finished", ALL_APPLIED, 0
            case stop.BY_SCRIPT:
                return "stopped", "stopped by run.stop()", 0
            case stop.BY_RATING:
                return "stopped", context.rating.reason, 0
        return "stopped", f"stopped by {stop.name_signal(number)}", number

    def _leave_together(self) -> str | None:
        """Wait for the last checkpoint; what to say of steps that no checkpoint holds.

        Nobody goes before: who writes it may die, and then another one does. None where the state
        died with it, so that there are steps to do again.
        """
        context, saving = self._context, self._context.saving
        lost, generation = "", -1
        while generation != self.membership.generation:
            if context.continuity.must_go_back:
                if not 0 < context.stopping < stop.BY_SCRIPT:
                    return None
                context.continuity.next_portion()  # a signal ends the run at what is saved
            generation = self.membership.generation
            if context.survival is not None and saving.is_on and saving.saved_step != self.step:
                self._save()
            lost = self._find_lost()
        context.continuity.end()
        return lost

    def _find_lost(self) -> str:
        """What to say of steps that no checkpoint holds, when all are written that can be."""
        saving = self._context.saving
        self._report_checkpoints(wait=True)
        find = partial(saving.find_lost, self.step)
        lost: str = self._context.continuity.exchange(find, "Asking what is saved")[0]
        if lost:
            saving.saved_step = None  # so that another save tries again
        return lost

    def _on_step_end(self, step: Step) -> None:
        if step.state in ("lost", "undone"):
            return
        self._context.continuity.on_step_end()
        if step.state == "failed":
            self._context.stop.ignore()  # the error may end the program, which is not ours then
            return
        self._scores = {}
        if step.ends_epoch:
            self._context.position = Position(step.number, step.epoch + 1, 0)
        else:
            done = self._context.position.step_of_epoch + 1
            self._context.position = Position(step.number, step.epoch, done)

    def _after(self, step: Step) -> None:
        """The loop's body is over and the step applied."""
        context, saving = self._context, self._context.saving
        self._report(step)
        if self._scores:
            context.rating.note(step.number, self._scores)
            if context.rating.is_over:
                context.stopping = stop.BY_RATING
        is_time_to_change = False
        if context.vote.pending is not None or context.size == 1:
            is_time_to_change = self._count_votes(step.number)
        if saving.is_on:
            if context.stopping or saving.is_due(step.number, step.ends_epoch, self._scores):
                self._save()
            self._report_checkpoints()
        if is_time_to_change and not context.stopping:
            assert context.survival is not None
            context.continuity.hand_in()
            if context.survival.is_leaving:
                self._report_checkpoints(wait=True)
                context.continuity.leave()
                context.has_left, context.stopping = True, signal.SIGTERM
            else:
                # Last: who is new begins with the next step.
                context.continuity.regroup(is_lost=False)

    def _count_votes(self, step: int) -> bool:
        """Do what the workers want; whether they want to change to another generation."""
        context = self._context
        try:
            requests = context.vote.result(step)
            if requests.buffers and context.buffers is not None:
                context.buffers.adopt()
        except PeerError:
            if context.survival is None:
                raise
            context.continuity.regroup()
            return False
        if requests.terminate or requests.interrupt:
            number = signal.SIGTERM if requests.terminate else signal.SIGINT
            context.stopping = context.stop.signal or number
        elif requests.stop:
            context.stopping = context.stopping or stop.BY_SCRIPT
        if requests.record and not requests.generation:
            context.watching.record_as_asked(step + 1, self.membership)
        return requests.generation == context.size

    def _report(self, step: Step) -> None:
        """Tell what an applied step was like, and the epoch that it ends; once.

        Every worker calls it.
        """
        if step.number == self._reported:
            return
        self._report_step(step)
        if step.ends_epoch:
            self._end_epoch(step)
            if mistake := self._context.rating.find_mistake(self._scores):
                self.message(mistake, "warning")

    def _report_step(self, step: Step) -> None:
        if step.number == self._reported:
            return
        self._reported = step.number
        self._context.metrics.epochs = step.epoch
        self._epoch_samples += step.samples
        phases = step.phases
        if (watch := stopwatch.find(self.membership.group)) is not None:
            before, self._phases, phases = self._phases, watch.totals(), {}
            for name, total in self._phases.items():
                phases[name] = total - before.get(name, 0.0)
        samples, local_samples = step.samples, step.local_samples
        queued = self._context.loader.queued
        report = StepReport(
            *(step.number, step.epoch, samples, local_samples, step.seconds, phases, {}, step.lr),
            queued=queued,
        )
        self._context.metrics.end_step(report)

    def _end_epoch(self, step: Step) -> None:
        context = self._context
        sums = context.continuity.add_up(context.metrics.sums_of_epoch, "Adding up the epoch")
        context.metrics.end_epoch()
        metrics = means(sums)
        self._scores = metrics | self._scores  # of two with one name, the evaluation's
        now_s = time.perf_counter()
        seconds, self._epoch_s = now_s - self._epoch_s, now_s
        samples, self._epoch_samples = self._epoch_samples, 0
        context.sinks.tell("epoch", Summary(step.epoch, step.number, metrics, seconds, samples))
        if context.noise is not None:
            estimate = None
            try:
                estimate = context.noise.read(self.membership.group)
            except PeerError:  # what the dead one had measured is gone: say nothing this time
                if context.survival is None:
                    raise
                context.continuity.regroup()
            if estimate is not None:
                scale, advice = estimate.noise_scale, estimate.advice
                facts = {"step": step.number, "noise_scale": scale, "advice": advice}
                context.sinks.tell("message", Message(advice, "info", "noise", facts))

    def _save(self) -> None:
        """Save where the run stands; every worker calls it."""
        context = self._context
        context.rating.note(self.step, self._scores)
        context.update.finish()
        context.metrics.flush(wait=True)
        if isinstance(context.loader, OwnLoader) and context.saving.is_on:
            context.state.loaders = context.loader.gather_states(context.position)
        try:
            context.saving.save(
                context.state,
                self._context.position,
                facts=context.facts,
                add_up=context.continuity.add_up,
                metrics=context.metrics,
                scores=self._scores,
                can_save=lambda: not context.continuity.must_go_back,
            )
        except PeerError:  # while the state was gathered
            if context.survival is None:
                raise
            context.continuity.regroup()

    def _go_back(self) -> None:
        """Steps that were reported are done again."""
        context = self._context
        self._reported, self._scores = context.position.step, {}
        self._epoch_samples = context.position.step_of_epoch * context.config.global_batch

    def _report_checkpoints(self, *, wait: bool = False) -> None:
        for written in self._context.saving.take_finished(wait=wait):
            self._context.sinks.tell("checkpoint", written)

    def _say_what_is_not_saved(self) -> None:
        """The loop is left by the user, perhaps by one worker alone: this is no time to save."""
        saving = self._context.saving
        self._report_checkpoints(wait=True)
        if saving.is_on and saving.written_step != self.step:
            env.note_unsaved(bool(saving.problem))
            advice = "Call run.save() on every worker before leaving it, to continue from there."
            self.message(
                f"The loop was left after step {self.step}, and step {saving.written_step} is the "
                f"last that is saved. {saving.problem or advice}",
                "error" if saving.problem else "warning",
            )

    def _end(self, status: str, reason: str, *, is_complete: bool) -> None:
        context = self._context
        try:
            context.loader_signals.release()
            context.loader.close()
            context.metrics.flush(wait=is_complete)
            self._report_checkpoints(wait=True)
            # Of a worker that fails the launcher tells, and the others continue.
            if status != "failed" or context.survival is None or context.size == 1:
                context.sinks.tell("stop", self.step, status, reason)
        finally:
            context.watching.end()
            context.saving.end()
            context.stop.ignore()

    def _refuse_inside_step(self, what: str) -> None:
        if self._open is not None and self._open.state == "open":
            raise UsageError(
                f"run.{what}() was called inside step {self._open.number}.",
                advice="Call it between two steps: after the `with` block, in the same loop.",
            )


def _not_saved(reason: str) -> CheckpointError:
    return CheckpointError(
        f"The run is {reason}",
        advice="Make room and call run.save() on every worker, or start again: the run continues "
        "from its newest checkpoint.",
    )
