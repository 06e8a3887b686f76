"""A callback: told of a run as a sink is, it may ask for something that all workers then do.

What one worker has asked for rides in the vote, so that every worker does it after the same step;
see `stop.Vote`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.telemetry import Message, Sink, StepReport, Summary, Written

if TYPE_CHECKING:
    from paceline.run.loop import Run


class Callback(Sink):
    """The base of your own, passed in `Run(sinks=[...])`; every method may be left out.

    The methods called `on_...` are called on rank 0, some time after what they tell of. What a
    callback asks for is done by all workers after the same step, within about a tenth of a second.
    """

    run: Run
    """The run it was passed to."""

    def on_step(self, report: StepReport) -> None:
        """A step is applied; numbers are those of rank 0."""

    def on_evaluate(self, summary: Summary) -> None:
        """`run.evaluate()` is over; numbers are those of all workers."""

    def on_checkpoint(self, written: Written) -> None:
        """A checkpoint is on the disk."""

    def on_death(self, worker: int, how: str, step: int) -> None:
        """A worker died in `step`, and the others continue."""

    def on_end(self, status: str, reason: str) -> None:
        """The loop is over: `finished`, `stopped` or `failed`."""

    def evaluate(self) -> None:
        """Call `self.run.evaluate(...)` here: every worker does so, once one has asked for it."""

    def ask_stop(self) -> None:
        """Have the run end, as `run.stop()` does."""
        self.run.stop()

    def ask_save(self) -> None:
        """Have a checkpoint written, besides those that the options say."""
        self.run._parts.vote.asked.add("save")

    def ask_evaluation(self) -> None:
        """Have `evaluate` called, of all callbacks on all workers."""
        self.run._parts.vote.asked.add("evaluation")

    def step(self, report: StepReport) -> None:
        self.on_step(report)

    def evaluation(self, summary: Summary) -> None:
        self.on_evaluate(summary)

    def checkpoint(self, written: Written) -> None:
        self.on_checkpoint(written)

    def message(self, message: Message) -> None:
        for died in message.facts.get("died", ()) if message.kind == "generation" else ():
            self.on_death(died["worker"], died["how"], died["step"])

    def stop(self, _step: int, status: str, reason: str) -> None:
        self.on_end(status, reason)


def take_callbacks(sinks: Sequence[Any], run: Run) -> list[Callback]:
    """Those among the sinks of a run, which know it from now on."""
    callbacks = [each for each in sinks if isinstance(each, Callback)]
    for each in callbacks:
        each.run = run
    return callbacks
