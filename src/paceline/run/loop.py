"""`Run`: a training as a sequence of steps that can stop anywhere and continue at any size.

The class is the way through the steps, and what happens between two of them: report what the last
was like, agree on stopping, save, end an epoch. What happens in a step is in `step`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

import paceline
from paceline.data import Portion
from paceline.ddp import DDPOptions, Engine
from paceline.errors import UsageError, refuse_unknown_arguments
from paceline.group import World
from paceline.run import stop
from paceline.run.build import build_run
from paceline.run.callback import take_callbacks
from paceline.run.config import RunConfig, RunOptions
from paceline.run.evaluation import Collect, Evaluation, Score, evaluate
from paceline.run.metrics import Reports
from paceline.run.models import models_to_call
from paceline.run.parts import Outcome
from paceline.run.same_bits import fixed_arithmetic, refuse_other_threads
from paceline.run.step import Step
from paceline.run.stop import End, Requests
from paceline.run.turns import StepOfTurns
from paceline.run.user_loader import UserLoader
from paceline.telemetry import ALL_APPLIED, Message, Sink

DEFAULT_OPTIONS = RunOptions()
_RENAMED = {
    "workers": "Pass loader_workers= for processes that load data; how many workers train is said "
    "to the launcher: `paceline run --workers 4 train.py`.",
    "callbacks": "Pass sinks=[...]: a paceline.Callback is one.",
}


@refuse_unknown_arguments(_RENAMED, options=RunOptions, ddp=DDPOptions)
class Run:
    """A training of `epochs` passes over `dataset`, in steps of `global_batch` samples.

        for step in run:
            with step:
                for x, y in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))

    The batch of a step is cut into `shards`, one per worker of the first start unless said
    otherwise; any number of workers up to that computes the same training. With a `folder` the run
    is recorded there, and continues from its newest good checkpoint. `state` are further objects
    with `state_dict()` that belong to it, by name. `loader_workers` are processes that load data.
    `ddp` are options of the engine, and `sinks` are told what happens, on rank 0; `trackers` are
    too, and may be names: `"tensorboard"`, `"wandb:project"`. Instead of a dataset, `loader` may
    give each worker's batches: an iterable, or a function that makes one of a `World`; see
    docs/data.md. `config` are hyperparameters of your own, kept and shown with those of the run.

    Invariant: the position moves with the commit of a step, so that a save at any time afterwards
    holds as many steps as the parameters do.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: Any = None,
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
        loader_workers: int = 0,
        world: World | None = None,
        ddp: DDPOptions | None = None,
        engine: Callable[[nn.Module, World], Engine] | None = None,
        sinks: Sequence[Sink] = (),
        trackers: Sequence[str | Sink] = (),
        loader: Any = None,
        config: Mapping[str, Any] | None = None,
        options: RunOptions = DEFAULT_OPTIONS,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        checked = RunConfig(**arguments)
        with ExitStack() as around:  # a run that is refused leaves nothing changed
            if options.same_bits:
                around.enter_context(fixed_arithmetic())
            parts = self._parts = build_run(checked)
            self._around = around.pop_all()
        self.options = options
        self.model: Any = parts.training.engine
        """The model to call in the loop; the one that was passed, kept equal on all workers."""
        self.models = models_to_call(self.model) if checked.models is not None else {}
        """Where there are several, those to call in the loop, by name."""
        self._step_class = StepOfTurns if self.models else Step
        self.folder = checked.folder
        """Where it writes what happens; None: nowhere."""
        self.world = parts.place.world
        self.membership = parts.place.membership
        """Who takes part; `run.membership.move_on(group)` between two steps changes it."""
        self.steps: int | None = parts.outlets.info.steps
        """How many steps the whole run has; None for a dataset without a length."""
        self._open: Step | None = None
        self._failure = stop.LEFT
        """How the last step that failed did."""
        self._is_running = self._evaluates = False
        self._reports = Reports(parts)
        self._callbacks = take_callbacks(checked.sinks, self) if checked.sinks else []

    def _repr_html_(self) -> str | None:
        return None if self.folder is None else paceline.RunView(self.folder)._repr_html_()

    @property
    def step(self) -> int:
        """How many steps are applied."""
        return self._parts.progress.position.step

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self._parts.progress.position.epoch

    @property
    def shards(self) -> int:
        """Into how many parts the batch of a step is cut."""
        return self._parts.progress.shards

    @property
    def ema(self) -> dict[str, Any] | None:
        """The averaged weights, as a state dict of the model; None without `ema=`."""
        average = self._parts.training.average
        return None if average is None else average.state_dict()

    def log(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Keep a metric of the step: a mean over `weight` items. Tensors are read long after it."""
        self._parts.outlets.metrics.add(name, value, weight)

    def message(self, text: str, level: str = "info") -> None:
        """Say something on the terminal, once for all workers, and keep it in the folder."""
        self._parts.outlets.sinks.tell("message", Message(text, level))

    @refuse_unknown_arguments(_RENAMED)
    def evaluate(
        self,
        score: Score,
        dataset: Any = None,
        *,
        reduction: Literal["mean", "sum"] | None = None,
        batch: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loader_workers: int = 0,
        ema: bool = False,
        collect: Collect | None = None,
    ) -> dict[str, float]:
        """Score every sample once, on all workers together, and return the means by name.

        `score(batch)` gives means over the samples of the batch by name, {"accuracy": 0.9}; where
        they are over other items, with how many: {"loss": (loss, tokens)} and reduction="mean".
        With reduction="sum" the numbers are sums. It is called in evaluation mode, without
        gradients. Every worker calls this; without a dataset it is the one that is trained on.

        With `ema` the model has the averaged weights meanwhile, and names begin with "ema_". With
        `collect` the score function returns predictions, one item per sample, and `collect` is
        called once, on rank 0, with those of all samples in the order of the dataset.
        """
        self._refuse_inside("evaluate", "ask_evaluation")
        how = reduction, batch, collate_fn, loader_workers, ema, collect
        self._evaluates = True
        try:
            return evaluate(self._parts, Evaluation(score, dataset, *how))
        finally:
            self._evaluates = False

    def stop(self) -> None:
        """End the run after this step, with a checkpoint and without an error.

        One worker is enough to end it on all, after the same step. Started again, it continues.
        """
        self._parts.stop.is_asked = True

    def save(self) -> None:
        """Save now, besides what the options say; every worker calls it, between two steps."""
        self._refuse_inside("save", "ask_save")
        if self._open is not None and self._open.is_applied:
            self._reports.tell(self._open)  # before it is saved: the epoch's sums include it
        self._save()
        if not self._is_running and (lost := self._find_lost()[0]):
            raise stop.not_saved(f"over, but {lost}")
        if not self._is_running:
            stop.note_unsaved("")

    def __iter__(self) -> Iterator[Step]:
        if self._is_running:
            raise UsageError("This run is being iterated already.", advice="One loop at a time.")
        return self._walk()

    def _walk(self) -> Iterator[Step]:
        parts = self._parts
        progress, outlets, recovery = parts.progress, parts.outlets, parts.recovery
        end, number = End("failed", "an error"), 0
        lost: str | None = None
        again: Portion | None = None
        is_complete = False
        outlets.saving.begin()
        outlets.lines.extend(parts.training.state.begin())
        self._is_running = True
        try:
            if self.options.same_bits:
                self._around.enter_context(fixed_arithmetic())
            self._reports.begin()
            if self.options.handle_signals:
                parts.stop.listen()
                parts.feed.signals.hold()
            is_first = not parts.place.is_replacement
            if is_first:
                outlets.sinks.tell("start", outlets.info, self.step, outlets.lines)
            outlets.watching.begin(outlets.sinks, progress)
            recovery.begin()
            parts.dealing.deal()
            if not is_first:  # now it knows the step
                outlets.sinks.tell("start", outlets.info, self.step, outlets.lines)
                self._reports.go_back()
            if parts.training.rating.is_over:  # it was when the last start ended
                progress.stopping = stop.BY_RATING
            if is_first and recovery.is_on and parts.training.shares_out:
                self._save()  # something to go back to
                self._find_lost()
            while True:
                portion = again
                if again is None and not progress.stopping:
                    portion = recovery.attempt(self._next_portion)
                if portion is None:
                    if not progress.stopping:
                        parts.training.update.finish()
                    # A launcher that sees one go would end the one that writes.
                    lost = "" if progress.has_left else self._leave_together()
                    if lost is not None:
                        break
                    progress.stopping, parts.stop.is_asked = 0, False
                    continue
                if portion.step <= self._reports.last:
                    self._reports.go_back()
                # A step that failed has put the handlers back, and the script has gone on all the
                # same.
                if self.options.handle_signals and not parts.stop.before:
                    parts.stop.listen()
                if self.options.same_bits:
                    refuse_other_threads(portion.step)
                step = self._open = self._step_class(portion, parts, self._on_failure)
                yield step
                self._open = None
                again = step.again
                match step.state:
                    case Outcome.APPLIED | Outcome.HEALED:
                        if parts.exchanges.level is not None:
                            parts.exchanges.catch_up()
                        self._after(step)
                    case Outcome.FAILED | Outcome.UNDONE:
                        outlets.metrics.forget()  # what the code behind the block has logged
                        if step.state is Outcome.UNDONE:  # nor does it count in `state=`
                            parts.training.put_back(step.before, step.number)
                        if again is None:
                            parts.dealing.deal()  # the same step comes again, or one before it
                    case _:
                        raise UsageError(
                            f"Step {step.number} was not run.",
                            advice="Write `with step:` inside `for step in run:`; `break` ends "
                            "the loop.",
                        )
                if parts.dealing.generation != self.membership.generation:
                    parts.dealing.deal()  # the script has moved the membership on
            end, number = self._why_over()
            is_complete = True
            if lost:
                end = end._replace(reason=f"{end.status}, but {lost}")
        except GeneratorExit:
            end = self._failure
            if self._open is None or self._open.state is not Outcome.FAILED:
                thrown = stop.find_thrown(sys._getframe(1))
                end = self._describe(thrown, self.step)
                if self._open is not None and self._open.is_applied:
                    self._reports.report_step(self._open)
                if thrown is None:
                    self._say_what_is_not_saved()
                recovery.end(is_left=True)
            raise
        except BaseException as error:
            end = self._describe(error, self.step)
            raise
        finally:
            at = self.step if self._open is None else self._open.number
            self._is_running, self._open = False, None
            progress.stopping, parts.stop.is_asked = 0, False
            if not sys.is_finalizing():  # a loop that outlives the program has nothing to say
                if recovery.ended:
                    end = End("failed", recovery.ended)
                where = parts.config.folder, self.world.rank, at
                stop.record_error_at_exit(*where, is_late=is_complete)
                self._end(end, is_complete=is_complete)
        if number and self.options.exit_on_signal:
            raise SystemExit(128 + number)
        if lost:
            raise stop.not_saved(end.reason)

    def _next_portion(self) -> Portion | None:
        """This worker's part of the next step; None after the last."""
        if self._parts.recovery.must_go_back:
            self._parts.recovery.go_back()
        for task in self._parts.between_steps:
            task()
        return None if self._parts.progress.stopping else next(self._parts.dealing.portions, None)

    def _why_over(self) -> tuple[End, int]:
        """How the loop has come to its end, and the signal, if it was one."""
        progress, number = self._parts.progress, self._parts.progress.stopping
        if progress.has_left:
            reason = "this worker was asked to leave; the others continue"
            return End("stopped", reason), number
        if number >= stop.BY_SCRIPT and self.step == self.steps:
            number = 0  # nothing was left out
        match number:
            case 0:
                return End("finished", ALL_APPLIED), 0
            case stop.BY_SCRIPT:
                return End("stopped", "stopped by run.stop()"), 0
            case stop.BY_RATING:
                return End("stopped", self._parts.training.rating.reason), 0
            case stop.BY_OTHERS:
                return End("stopped", progress.reason), 0
        return End("stopped", stop.describe_signal(number)), number

    def _describe(self, error: BaseException | None, step: int) -> End:
        """An error ends the loop of this worker."""
        is_outlived = error is not None and self._parts.recovery.is_outlived(error)
        return stop.describe_end(error, self.world.rank, step)._replace(is_outlived=is_outlived)

    def _leave_together(self) -> str | None:
        """Wait for the last checkpoint; what to say of steps that no checkpoint holds.

        No worker goes before: the one that writes may die, and then another one does. None where
        the state died with it, so that there are steps to do again.
        """
        parts, saving = self._parts, self._parts.outlets.saving
        recovery, is_saved, lost = parts.recovery, False, ""
        while recovery.must_go_back or not is_saved:
            if recovery.must_go_back:
                if not 0 < parts.progress.stopping < stop.BY_SCRIPT:
                    return None
                recovery.attempt(self._next_portion)  # a signal ends the run at what is saved
            if not self._is_saved():
                self._save()
            lost, is_saved = self._find_lost()
        is_complete = parts.progress.stopping in (0, stop.BY_RATING)
        recovery.end(is_saved=is_complete and saving.is_on and not lost)
        return lost

    def _is_saved(self) -> bool:
        """Whether this worker knows of a save of the last step, where others may have to do it."""
        saving = self._parts.outlets.saving
        return not (self._parts.recovery.is_on and saving.is_on) or saving.saved_step == self.step

    def _find_lost(self) -> tuple[str, bool]:
        """What to say of steps that no checkpoint holds, when all are written that can be; and
        whether every worker knows of a save of the last step.

        The worker that writes may have died: those who have regrouped since forget that save, and
        those who took part in it only afterwards do not. So all of them save again, or none does.
        """
        saving = self._parts.outlets.saving
        self._parts.outlets.report_checkpoints(wait=True)
        told = self._parts.exchanges.exchange(
            lambda: [saving.find_lost(self.step), self._is_saved()], "Asking what is saved"
        )
        lost, is_saved = told[0][0], all(each for _, each in told)
        if lost or not is_saved:
            saving.saved_step = None  # so that another save tries again
        return lost, is_saved

    def _on_failure(self, step: Step) -> None:
        """An error leaves the block: say how, while it is there."""
        self._failure = self._describe(sys.exception(), step.number)

    def _after(self, step: Step) -> None:
        """The loop's body is over and the step applied."""
        parts, progress = self._parts, self._parts.progress
        saving = parts.outlets.saving
        self._reports.tell(step)
        self._rate(step.number)
        wants_change = False
        if parts.vote.pending is not None or progress.size == 1:
            wants_change = self._count_votes(step.number)
        if progress.evaluate_at == step.number:
            for each in self._callbacks:
                each.evaluate()
            self._rate(step.number)  # now with what they have measured
        if saving.is_on:
            is_asked = progress.stopping or progress.save_at == step.number
            if is_asked or saving.is_due(step.number, step.ends_epoch, progress.scores):
                self._save()
            parts.outlets.report_checkpoints()
        # Last: who is new begins with the next step.
        if wants_change and not progress.stopping and not parts.recovery.change_generation():
            progress.has_left, progress.stopping = True, signal.SIGTERM

    def _rate(self, step: int) -> None:
        """Judge the model after `step`, if something was measured."""
        progress, rating = self._parts.progress, self._parts.training.rating
        if progress.scores:
            rating.note(step, progress.scores)
            if rating.is_over:
                progress.stopping = progress.stopping or stop.BY_RATING

    def _count_votes(self, step: int) -> bool:
        """Do what the workers want; whether they want to change to another generation."""
        parts, progress = self._parts, self._parts.progress
        requests = parts.recovery.attempt(partial(parts.vote.result, step), instead=Requests())
        if requests.number or requests.leaving == progress.size:
            progress.stopping = requests.number or signal.SIGTERM
        elif requests.stop:
            progress.stopping = progress.stopping or stop.BY_SCRIPT
        if requests.save:
            progress.save_at = step
        if requests.evaluation:
            progress.evaluate_at = step
        if requests.record and not requests.generation:
            parts.outlets.watching.record_as_asked(step + 1)
        return requests.generation == progress.size

    def _save(self) -> None:
        """Save where the run stands; every worker calls it."""
        parts = self._parts
        parts.training.rating.note(self.step, parts.progress.scores)
        parts.training.update.finish()
        parts.outlets.metrics.flush(wait=True)
        parts.recovery.attempt(partial(self._write_checkpoint, parts.exchanges.asked))

    def _write_checkpoint(self, asked: int) -> None:
        """Tried again where a worker dies while its share is gathered: what was exchanged, after
        `asked` other results, is kept, and the state is whole then."""
        parts, saving = self._parts, self._parts.outlets.saving
        parts.exchanges.asked = asked
        state, position = parts.training.state, parts.progress.position
        if isinstance(parts.feed.loader, UserLoader) and saving.is_on:
            state.loaders = parts.feed.loader.gather_states(position)
        saving.save(
            state,
            position,
            self._reports.add_up_so_far,
            parts.progress.scores,
            can_save=lambda: not parts.recovery.must_go_back and not parts.recovery.step_abandoned,
        )

    def _say_what_is_not_saved(self) -> None:
        """The loop is left by the user, perhaps by one worker alone: this is no time to save."""
        saving = self._parts.outlets.saving
        self._parts.outlets.report_checkpoints(wait=True)
        if saving.is_on and saving.written_step != self.step:
            text = stop.describe_unsaved(self.step, saving.written_step, saving.problem)
            stop.note_unsaved(text if saving.problem else "")
            self.message(text, "error" if saving.problem else "warning")

    def _end(self, end: End, *, is_complete: bool) -> None:
        parts, outlets = self._parts, self._parts.outlets
        parts.training.state.end()
        try:
            parts.feed.signals.release()
            parts.feed.loader.close(at_once=end.status == "failed")
            outlets.metrics.flush(wait=is_complete)
            outlets.report_checkpoints(wait=True)
            if not end.is_outlived:
                stop.tell_end(outlets.sinks, end, self.world.rank, self.step)
        finally:
            outlets.watching.end()
            outlets.saving.end()
            parts.stop.ignore()
            self._around.close()

    def _refuse_inside(self, what: str, ask: str) -> None:
        """Raise where not all workers come by, or not all equally often."""
        advice = "Call it between two steps: after the `with` block, in the same loop."
        where = "inside run.evaluate()" if self._evaluates else ""
        if self._open is not None and self._open.is_open:
            where = f"inside step {self._open.number}"
        elif self._parts.outlets.sinks.is_telling:
            where = "by a callback, which rank 0 alone runs"
            advice = f"Call self.{ask}() there: all workers do it, after the same step."
        if where:
            raise UsageError(f"run.{what}() was called {where}.", advice=advice)
