"""What happens between two steps: keep what the last was like, agree, save, end an epoch."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

from paceline.observe import stopwatch
from paceline.run.build import Parts
from paceline.run.evaluation import gather
from paceline.run.loader import Position
from paceline.run.metrics import means
from paceline.run.step import Step
from paceline.run.stop import StopRequest
from paceline.run.vote import Wishes


class Between:
    """How far a run is, and what it does there.

    Invariant: `position` moves with the commit of a step, so that a save at any time afterwards
    holds as many steps as the parameters do.
    """

    def __init__(self, parts: Parts, stop: StopRequest) -> None:
        self.position = parts.position
        self._parts, self._stop = parts, stop
        self._scores: dict[str, float] = {}
        """What is known of the model as it is now: a step that is applied makes it another one."""
        self._kept: Step | None = None
        self._epoch_s = time.perf_counter()
        self._epoch_samples = self.position.step_of_epoch * parts.record.info.global_batch
        self._phases: dict[str, float] = {}

    def begin(self) -> None:
        """The loop begins."""
        self._epoch_s = time.perf_counter()

    def save(self) -> None:
        """Save where the run stands; every worker calls it."""
        parts = self._parts
        parts.shop.finite.ask()
        parts.shop.metrics.flush(wait=True)
        parts.saving.save(
            parts.state,
            self.position,
            facts=parts.facts,
            epoch_sums=parts.shop.metrics.epoch,
            scores=self._scores,
        )

    def on_evaluation(self, scores: Mapping[str, float], samples: int, seconds: float) -> None:
        self._scores |= scores
        # After the last step of an epoch the next one has begun, but has nothing to show yet.
        epoch = self.position.epoch - (self.position.step_of_epoch == 0)
        self._parts.record.evaluation(max(epoch, 0), self.position.step, scores, seconds, samples)

    def say_what_is_not_saved(self) -> None:
        """The loop is left by the user, perhaps by one worker alone: this is no time to save."""
        parts, step = self._parts, self.position.step
        saved = parts.saving.saved_step
        if parts.saving.is_on and saved != step:
            newest = "there is no checkpoint"
            if saved is not None:
                newest = f"the newest checkpoint is that of step {saved}"
            parts.record.message(
                f"The loop was left after step {step}, and {newest}. Call run.save() on every "
                "worker before leaving it, to go on from there.",
                "warning",
            )

    def leave_together(self) -> None:
        """Wait for rank 0's disk: a launcher that sees one worker leave would end the others."""
        parts = self._parts
        parts.saving.report(parts.record, wait=True)
        gather(parts.group, {}, parts.word_device, "Leaving together")

    def on_summed(self, step: Step) -> None:
        """All gradients of the step have arrived."""
        self._parts.vote.start(step.number, self._wishes())

    def on_step_end(self, step: Step) -> None:
        if step.state == "failed":
            self._stop.ignore()  # the error may end the program, which is not ours then
            return
        self._scores = {}
        if step.ends_epoch:
            self.position = Position(step.number, step.epoch + 1, 0)
        else:
            done = self.position.step_of_epoch + 1
            self.position = Position(step.number, step.epoch, done)

    def keep(self, step: Step) -> None:
        """Write down what an applied step was like, and the epoch that it ends; once.

        Every worker calls it.
        """
        if step is self._kept:
            return
        self._kept = step
        parts, shop = self._parts, self._parts.shop
        self._epoch_samples += step.samples
        shop.metrics.end_step(
            {
                "step": step.number,
                "epoch": step.epoch,
                "samples": step.local_samples,
                "seconds": step.seconds,
                "phases": self._phases_of(step),
            }
        )
        parts.record.step(step.number, step.epoch, step.samples, lambda: means(shop.metrics.last))
        if step.ends_epoch:
            self._end_epoch(step)

    def after(self, step: Step) -> int:
        """The loop's body is over and the step applied; returns a signal to stop for, or 0."""
        parts, shop = self._parts, self._parts.shop
        self.keep(step)
        wishes = parts.vote.result(step.number, self._wishes())
        if wishes.buffers:
            shop.buffers.adopt()
        number = signal.SIGTERM if wishes.terminate else signal.SIGINT if wishes.interrupt else 0
        if number or parts.saving.is_due(step.number, step.ends_epoch, self._scores):
            self.save()
        parts.saving.report(parts.record)
        return number

    def _end_epoch(self, step: Step) -> None:
        parts, shop = self._parts, self._parts.shop
        sums = gather(
            parts.group, shop.metrics.take_epoch(), parts.word_device, "Adding up the epoch"
        )
        metrics = means(sums)
        self._scores = metrics | self._scores  # of two with one name, the evaluation's
        now_s = time.perf_counter()
        seconds, self._epoch_s = now_s - self._epoch_s, now_s
        samples, self._epoch_samples = self._epoch_samples, 0
        parts.record.epoch(step.epoch, step.number, metrics, seconds, samples)
        if shop.noise is not None:
            estimate = shop.noise.read(parts.group)
            if estimate is not None:
                parts.record.noise(step.number, estimate)

    def _wishes(self) -> Wishes:
        number = self._stop.signal
        news = self._parts.shop.size > 1 and self._parts.shop.buffers.has_news
        return Wishes(float(number == signal.SIGINT), float(number == signal.SIGTERM), float(news))

    def _phases_of(self, step: Step) -> dict[str, float]:
        """Where the step's time went, as far as somebody has measured it."""
        watch = stopwatch.find(self._parts.group)
        if watch is None:
            return step.phases
        before, self._phases = self._phases, watch.totals()
        return {phase: total - before.get(phase, 0.0) for phase, total in self._phases.items()}
