"""Where a run's steps, messages, evaluations, checkpoints and end go.

A `Sink` is notified of events. The run folder and the terminal are two of them, and
`Run(..., sinks=[...])` takes more: a tracker is one class with these methods. `Sinks` notifies all
of them, and switches off one that raises: observing a training must not stop it.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from paceline.errors import check_members, message_of
from paceline.files import EventWriter, RunFolder, RunInfo, find_info, write_info
from paceline.group import Membership
from paceline.telemetry.display import Progress

INFO_PERIOD_S = 2.0
"""How far the step in `run.json` may lag behind."""
ALL_APPLIED = "all steps are applied"
"""The reason why a run ends normally; it is not shown."""
Sums = dict[str, list[float]]
"""Name to [sum, count]: so that steps and workers can be combined exactly."""
METHODS = ("start", "step", "epoch", "evaluation", "message", "checkpoint", "stop")


class StepReport(NamedTuple):
    """An applied step as this worker saw it, reported once its numbers have reached the host."""

    step: int
    """Counts from 1."""
    epoch: int
    """Counts from 0."""
    samples: int
    """On all workers together."""
    local_samples: int
    """On this worker, as are all fields below."""
    seconds: float
    phases: Mapping[str, float]
    """Seconds by phase."""
    sums: Sums
    """Sum and count of every metric."""
    lr: float | None = None
    """The learning rate of the optimizer's first group, where it is a plain number."""
    queued: int | None = None
    """Batches that the loader's processes had ready; None where it has none."""
    piece: int | None = None
    """The most samples that went through the model at once; None: whole shards."""

    @property
    def metrics(self) -> dict[str, float]:
        """The means over this worker's samples."""
        return means(self.sums)


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that has reached the disk."""

    step: int
    name: str
    bytes: int
    seconds: float
    """How long training stood still: waiting for the previous save, and copying into memory."""
    metric: float | None
    better: Literal["lower", "higher"]
    """Which metric is better."""


class Summary(NamedTuple):
    """The exact means of an epoch, or of an evaluation, over the samples of all workers."""

    epoch: int
    step: int
    metrics: Mapping[str, float]
    seconds: float
    samples: int


class Message(NamedTuple):
    """A text to show, or, where `kind` is not "message", facts to record."""

    text: str
    level: str = "info"
    """`info`, `warning` or `error`."""
    kind: str = "message"
    """`message`; `blame`: a worker holds the others up; `noise`: the gradient noise scale;
    `generation`: workers died or joined; `fit`: the size of a piece has changed; `hashes`: of the
    state, in a run with the same bits at any number of workers."""
    facts: Mapping[str, Any] = {}
    """The same as values by name."""


class Sink(Protocol):
    """Receives a run's events: `start`, then the others in their order, then `stop`.

    Those passed to `Run` are called on rank 0 only. A subclass defines the methods that it needs;
    the others do nothing.
    """

    # Each has a `return`: type checkers treat an empty method of a protocol as abstract.

    def start(self, info: RunInfo, step: int, lines: Sequence[str]) -> None:
        """The loop begins after `step` steps; `lines` describe the run."""
        return

    def step(self, report: StepReport) -> None:
        return

    def epoch(self, summary: Summary) -> None:
        return

    def evaluation(self, summary: Summary) -> None:
        return

    def message(self, message: Message) -> None:
        return

    def checkpoint(self, written: Written) -> None:
        return

    def stop(self, step: int, status: str, reason: str) -> None:
        """The loop has ended: `status` is `finished`, `stopped` or `failed`."""
        return


class FolderSink:
    """The run folder: each worker's own events; rank 0 adds what concerns all, and `run.json`."""

    def __init__(self, folder: RunFolder, rank: int, info: RunInfo, members: Membership) -> None:
        self._folder, self._members, self._info = folder, members, info
        self._events = EventWriter(folder, rank)
        self._info_due_s = 0.0
        self._has_failed = self._is_over = False

    def start(self, info: RunInfo, step: int, lines: Sequence[str]) -> None:
        facts = {"pid": os.getpid(), "host": info.host, "device": info.device}
        self._events.write("start", size=info.workers, step=step, **facts)
        self._info, self._is_over = info, False
        self._update(status="running", step=step)

    def step(self, report: StepReport) -> None:
        facts = report._asdict()
        facts |= {"samples": facts.pop("local_samples"), "metrics": facts.pop("sums")}
        for name in ("queued", "piece"):
            if facts[name] is None:
                del facts[name]
        self._events.write("step", **facts)
        if time.monotonic() >= self._info_due_s:
            self._update(step=report.step)

    def epoch(self, summary: Summary) -> None:
        self._write_first("epoch", **summary._asdict())
        self._update(step=summary.step)

    def evaluation(self, summary: Summary) -> None:
        self._write_first("evaluation", **summary._asdict())

    def message(self, message: Message) -> None:
        facts = message.facts or {"text": message.text, "level": message.level}
        self._write_first(message.kind, **facts)
        if message.kind == "message" and "shards" in facts:
            self._update(shards=facts["shards"])

    def checkpoint(self, written: Written) -> None:
        self._write_first("checkpoint", **dataclasses.asdict(written))

    def stop(self, step: int, status: str, reason: str) -> None:
        self._events.write("stop", step=step, reason=reason)
        self._events.close()
        self._is_over = True
        self._update(status=status, step=step, reason=reason)

    def _write_first(self, kind: str, **facts: Any) -> None:
        if self._members.leads:
            self._events.write(kind, **facts)
        if self._is_over:  # an evaluation or a save after the loop
            self._events.close()

    def _update(self, **changes: Any) -> None:
        """Change `run.json`; a disk that is full now may have room later."""
        self._info_due_s = time.monotonic() + INFO_PERIOD_S
        if not self._members.leads:
            return
        found = None if changes.get("status") == "running" else find_info(self._folder)
        if found is not None and found.failed_worker is not None:
            return  # a worker that has failed has written the cause
        self._info = dataclasses.replace(self._info, updated=time.time(), **changes)
        try:
            write_info(self._folder, self._info)
        except OSError as error:
            if not self._has_failed:
                warnings.warn(f"{self._folder.info} cannot be written: {error}.", stacklevel=2)
            self._has_failed = True


class TerminalSink:
    """Rank 0's terminal; the others follow silently, because they may become rank 0."""

    def __init__(
        self,
        mode: str,
        folder: RunFolder | None,
        *,
        draws: bool,
        began: tuple[int, float] | None = None,
    ) -> None:
        """`began` is the run's first step and its time, where this worker joined later."""
        self._mode, self._folder, self._draws, self._advice = mode, folder, draws, ""
        self._began = began
        self._progress = Progress(mode, draws=False)  # silent until the run begins
        self._resumed = 0, 0
        """The epoch that was begun before, and how many of its samples had been processed."""

    def start(self, info: RunInfo, step: int, lines: Sequence[str]) -> None:
        self._progress = Progress(self._mode, draws=self._draws)
        names = ("name", "workers", "epochs", "steps", "steps_per_epoch", "global_batch")
        known = {name: getattr(info, name) for name in names}
        self._progress.start(**known, step=step, lines=[*info.policy, *lines])
        if info.steps_per_epoch:
            epoch, done = divmod(step, info.steps_per_epoch)
            self._resumed = epoch, count_samples(info, done)
        if self._began is not None:
            first, then_s = self._began
            samples = count_samples(info, step) - count_samples(info, first)
            self._progress.join_late(first, samples, time.time() - then_s)

    def draw(self) -> None:
        """Draw from now on: this worker has become rank 0."""
        silent, self._progress = self._progress, Progress(self._mode)
        self._progress.take_over(silent)

    def step(self, report: StepReport) -> None:
        self._progress.step(
            report.step, epoch=report.epoch, samples=report.samples, metrics=lambda: report.metrics
        )

    def epoch(self, summary: Summary) -> None:
        epoch, _, metrics, seconds, samples = summary
        resumed, before = self._resumed
        timed = samples - before if epoch == resumed else samples
        self._progress.epoch(epoch, metrics, seconds=seconds, samples=timed)

    def evaluation(self, summary: Summary) -> None:
        self._progress.evaluation(summary.epoch, summary.metrics, step=summary.step)

    def message(self, message: Message) -> None:
        if message.kind == "noise":
            self._advice = message.text  # only the last one is shown, at the end
        elif message.kind == "generation":  # the launcher has printed it
            self._progress.count_workers(message.facts["workers"])
        elif message.kind == "hashes":
            pass  # not for people
        else:
            self._progress.message(message.text, message.level)

    def checkpoint(self, written: Written) -> None:
        """Nothing is shown."""

    def stop(self, step: int, status: str, reason: str) -> None:
        # The reason of a failure is in the traceback.
        lines = ["" if status == "failed" or reason == ALL_APPLIED else reason, self._advice]
        if self._folder is not None:
            path = shlex.quote(self._folder.shown)
            lines.insert(1, f"To see more of this run: paceline report {path}")
        self._progress.finish(status, lines=[line for line in lines if line], reason=reason)

    def hold(self) -> None:
        """The loop has ended, but the outcome is not known yet: `stop` will show it."""
        self._progress.hold()


class Sinks:
    """All sinks of a run on one worker.

    Invariant: whatever a sink raises, the others are notified, and training continues without it.
    """

    def __init__(self, sinks: Sequence[Sink], terminal: TerminalSink | None) -> None:
        self._sinks: list[Sink] = [*([] if terminal is None else [terminal]), *sinks]
        self._terminal = terminal
        self.is_telling = False
        """Whether a sink runs now, which only one of the workers has."""

    def tell(self, method: str, *args: Any, but: Sink | None = None) -> None:
        """Call one method of every sink; the terminal starts first and stops last."""
        before, self.is_telling = self.is_telling, True
        # The terminal is the first sink: its summary must come after what other sinks print at the
        # end.
        try:
            for sink in reversed(self._sinks) if method == "stop" else self._sinks:
                if sink is but:
                    continue
                try:
                    getattr(sink, method)(*args)
                except Exception as error:
                    self._switch_off(sink, method, error)
        finally:
            self.is_telling = before

    def take_over(self, sinks: Sequence[Sink], *start: Any) -> None:
        """Draw from now on, and add these sinks, whose `start` gets `start`."""
        if self._terminal is not None:
            self._terminal.draw()
        Sinks(sinks, None).tell("start", *start)
        self._sinks += sinks

    def stop_all_but_terminal(self, *end: Any) -> Callable[..., None] | None:
        """Stop all sinks but the terminal; returns what stops the terminal later."""
        terminal = self._terminal
        self.tell("stop", *end, but=terminal)
        if terminal is None:
            return None
        terminal.hold()
        return terminal.stop

    def drop_terminal(self) -> None:
        """Stop drawing: another worker has become rank 0."""
        self._sinks = [sink for sink in self._sinks if sink is not self._terminal]
        self._terminal = None

    def report_step(self, report: StepReport, sums: Sums) -> None:
        self.tell("step", report._replace(sums=sums))

    def say(self, text: str) -> None:
        """Show a text on the terminal only; for signal handlers, which must not write files."""
        if self._terminal is not None:
            self._terminal.message(Message(text))

    def _switch_off(self, sink: Sink, method: str, error: Exception) -> None:
        self._sinks = [each for each in self._sinks if each is not sink]
        name, what = type(sink).__name__, f"{type(error).__name__}: {message_of(error)}"
        text = f"The sink {name} is switched off, because its {method}() raised {what}"
        self.tell("message", Message(text, "warning"))


def check_sinks(argument: str, sinks: Sequence[Any]) -> None:
    """Raise if any of `sinks` is not a sink."""
    for number, sink in enumerate(sinks):
        advice = f"A sink has {', '.join(METHODS[:-1])} and {METHODS[-1]}; see docs/run.md."
        check_members(f"{argument}[{number}]", sink, (), advice, METHODS)


def count_samples(info: RunInfo, step: int) -> int:
    """How many samples the first `step` steps of a run have processed."""
    batch, size, steps = info.global_batch, info.dataset_size, info.steps_per_epoch
    if size is None or not steps:
        return step * batch
    epochs, rest = divmod(step, steps)
    return epochs * min(size, steps * batch) + min(size, rest * batch)


def means(sums: Mapping[str, Any]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sums.items() if count}
