"""What a run logs and reports: sums and counts, kept where they were computed and read late.

A metric of a step is a weighted mean, kept as a sum and a count so that steps and workers can be
put together exactly. Tensors stay on their device until the step is long over; then the step is
reported, and its sums are added to those of the epoch. Sums over several steps or workers are not
rounded before they are read, so that no bit of them depends on the number of workers.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline import env
from paceline.errors import UsageError, shown
from paceline.group import HostCopy, Membership
from paceline.policy import NoiseEstimate
from paceline.run.same_bits import EVERY, hash_state
from paceline.telemetry import Message, StepReport, Summary, Sums

if TYPE_CHECKING:
    from paceline.run.parts import RunParts
    from paceline.run.step import Step

Number = float | Tensor
ExactSums = dict[str, list[list[float]]]
"""Name to sum and count, each as numbers whose sum it is: a few, from the smallest to the largest,
no two of which have a bit in common."""

# With more steps than these on their way, all are waited for: each holds tensors on the device.
_MOST_PENDING = 64
_SHORT = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Sum:
    """The sum, or the count, of one metric of one step: numbers and tensors apart."""

    numbers: list[float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)


class Metrics:
    """The metrics of the step under way, of steps whose numbers are on their way, of the epoch."""

    def __init__(self, report: Callable[[Any, Sums], None], members: Membership) -> None:
        """`report(report, sums)` is called once per step, in order, some time after it."""
        self.epoch: ExactSums = {}
        self.step = 0
        """The step under way, or the last one."""
        self.turn = 0
        """Its turn under way, or the last one, where there are several models."""
        self.epochs = 0
        """How many are over: the number of the one whose sums these are."""
        self._report, self._members = report, members
        self._now: dict[str, tuple[_Sum, _Sum]] = {}
        """Name to sum and count."""
        self._applied: dict[str, tuple[_Sum, _Sum]] = {}
        """Of turns of the step under way that are applied: they are not done again."""
        self._common: ExactSums = {}
        """What all workers know of the epoch alike: no worker has to leave it behind."""
        self._common_now: dict[str, Number] = {}
        self._before: dict[str, tuple[_Sum, _Sum]] = {}
        """What was there when the loop over the step's batches began."""
        self._pending: deque[tuple[Any, dict[str, Any], dict[str, Any], HostCopy | list[float]]] = (
            deque()
        )

    def add(self, name: str, value: Number, weight: Number) -> None:
        """Add a mean over `weight` items."""
        if isinstance(value, Tensor) and value.dtype in _SHORT:
            value = value.float()  # or its product with the weight would have three digits
        is_plain = not isinstance(weight, Tensor) and weight == 1
        self.add_sum(name, value if is_plain else value * weight, weight)

    def add_sum(self, name: str, value: Number, count: Number) -> None:
        """Add a sum over `count` items."""
        entry = self._now.get(name)
        if entry is None:
            if not isinstance(name, str) or not 0 < len(name) <= 100:
                raise UsageError(
                    f"A metric cannot be named {name!r}.", advice="Use a short string."
                )
            entry = self._now[name] = _Sum(), _Sum()
        for part, each in zip(entry, (value, count), strict=True):
            if not isinstance(each, Tensor):
                try:
                    part.numbers.append(float(each))
                except (TypeError, ValueError):
                    raise UsageError(
                        f"The metric {name!r} is {shown(each)}.", advice="Log one number."
                    ) from None
            elif each.numel() == 1:
                part.tensors.append(each.detach())
            else:
                raise UsageError(
                    f"The metric {name!r} has {each.numel()} elements.",
                    advice="Log one number: a mean, and over how many items as weight=.",
                )

    def add_common(self, name: str, value: Number) -> None:
        """Add a number of the step under way that is the same on all workers."""
        self._common_now[name] = value

    def begin_loop(self) -> None:
        """The loop over the step's batches begins."""
        self._before = _copied(self._now)

    def begin_again(self) -> None:
        """It begins anew: what was logged before it is not logged again."""
        self._now = _copied(self._before)

    def forget(self) -> None:
        """The step under way will not be finished; turns of it that are applied stay so."""
        self._now = {}

    def put_aside(self) -> dict[str, tuple[_Sum, _Sum]]:
        """What the step under way has so far, which it begins anew without."""
        aside, self._now = self._now, {}
        return aside

    def take_back(self, aside: dict[str, tuple[_Sum, _Sum]]) -> None:
        self._now = aside

    def end_turn(self, aside: dict[str, tuple[_Sum, _Sum]], *, is_applied: bool) -> None:
        """Keep what a turn has logged, if it is applied; what was put aside is the step's again."""
        if is_applied:
            _extend(self._applied, self._now)
        self._now = aside

    def so_far(self) -> ExactSums:
        """The sums of the step, or the turn, under way; waits for tensors."""
        return _read(self._now)

    def applied(self) -> ExactSums:
        """Those of the epoch, with those of applied turns; waits for tensors."""
        return add_all([_read(self._applied), self.epoch]) if self._applied else self.epoch

    def end_step(self, report: Any) -> None:
        """Close the step under way; report those that have arrived."""
        entries, self._now = self._now, {}
        if self._applied:
            _extend(self._applied, entries)
            entries, self._applied = self._applied, {}
        common, self._common_now = self._common_now, {}
        tensors = [each for entry in entries.values() for part in entry for each in part.tensors]
        tensors += [each for each in common.values() if isinstance(each, Tensor)]
        self._pending.append((report, entries, common, _together(tensors)))
        self.flush(wait=len(self._pending) > _MOST_PENDING)

    def flush(self, *, wait: bool) -> None:
        """Report the steps whose numbers have arrived, or, with `wait`, all of them."""
        while self._pending:
            report, entries, common, values = self._pending[0]
            if isinstance(values, HostCopy):
                if not wait and not values.is_here:
                    return
                values = values.read().tolist()
            self._pending.popleft()
            read, sums = iter(values), {}
            for name, entry in entries.items():
                found = [[*part.numbers, *islice(read, len(part.tensors))] for part in entry]
                add_sums(self.epoch, {name: found})
                sums[name] = list(map(round_sum, found))
            for name, value in common.items():
                number = next(read) if isinstance(value, Tensor) else value
                add_sums(self._common, {name: [[number], [1.0]]})
                if self._members.leads:
                    sums[name] = [number, 1.0]
            self._report(report, sums)

    def sums_of_epoch(self) -> ExactSums:
        """This worker's sums of the epoch so far, all of them; those in common are rank 0's."""
        self.flush(wait=True)
        return add_all([self.epoch, self._common]) if self._members.leads else self.epoch

    def common_sums(self) -> ExactSums:
        """What is in common so far, with the step under way."""
        self.flush(wait=True)
        now = {name: [[float(value)], [1.0]] for name, value in self._common_now.items()}
        return add_all([self._common, now])

    def take_common(self, sums: ExactSums) -> None:
        """Another worker has come further: take over what it has in common with the others."""
        self.flush(wait=True)
        # Flushed first, and then replaced: the other's sums include the steps that were on their
        # way.
        self._common, self._common_now = sums, {}

    def begin_at(self, epochs: int, sums: ExactSums, step: int) -> None:
        """Begin again at this step, where so many epochs are over, and the next has these sums."""
        self.forget()
        self._applied = {}
        self.take_common({})
        self.epoch, self.epochs, self.step = sums, epochs, step

    def end_epoch(self) -> None:
        """The epoch is over, and the next has no sums yet."""
        self.epoch, self._common, self.epochs = {}, {}, self.epochs + 1


def _extend(into: dict[str, tuple[_Sum, _Sum]], more: Mapping[str, tuple[_Sum, _Sum]]) -> None:
    for name, entry in more.items():
        for part, added in zip(into.setdefault(name, (_Sum(), _Sum())), entry, strict=True):
            part.numbers += added.numbers
            part.tensors += added.tensors


def _read(entries: Mapping[str, tuple[_Sum, _Sum]]) -> ExactSums:
    sums: ExactSums = {}
    for name, entry in entries.items():
        read = [[*part.numbers, *map(Tensor.item, part.tensors)] for part in entry]
        add_sums(sums, {name: read})
    return sums


def _copied(entries: Mapping[str, tuple[_Sum, _Sum]]) -> dict[str, tuple[_Sum, _Sum]]:
    def copy(part: _Sum) -> _Sum:
        return _Sum([*part.numbers], [*part.tensors])

    return {name: (copy(total), copy(count)) for name, (total, count) in entries.items()}


def add_sums(into: ExactSums, sums: Mapping[str, Any]) -> None:
    """Add sums and counts by name."""
    for name, entry in sums.items():
        have = into.setdefault(name, [[], []])
        for part, more in zip(have, entry, strict=True):
            add_exactly(part, more)


def add_all(everyone: list[ExactSums]) -> ExactSums:
    """The sums of all workers."""
    total: ExactSums = {}
    for sums in everyone if len(everyone) > 1 else ():
        add_sums(total, sums)
    return total if len(everyone) > 1 else dict(everyone[0])


def add_exactly(parts: list[float], values: Iterable[float]) -> list[float]:
    """Add numbers to a sum without rounding it (Shewchuk, 1997)."""
    for value in values:
        rest = []
        for part in parts:
            large, small = (value, part) if abs(value) > abs(part) else (part, value)
            value = large + small
            if lost := small - (value - large):
                rest.append(lost)
        parts[:] = [*rest, value] if math.isfinite(value) else [value]
    return parts


def round_sum(parts: Iterable[float]) -> float:
    """The number that is nearest to a sum."""
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):  # infinite, or infinite in both directions
        return sum(parts)


def means(sums: Mapping[str, list[list[float]]]) -> dict[str, float]:
    """The mean of each sum over its count, rounded once."""
    found = {}
    for name, (total, count) in sums.items():
        if items := sum(map(Fraction, count)):
            is_finite = all(map(math.isfinite, total))
            found[name] = (
                float(sum(map(Fraction, total)) / items) if is_finite else round_sum(total)
            )
    return found


def _together(tensors: list[Tensor]) -> HostCopy | list[float]:
    """Their values, or one message to the host for all of them."""
    if not tensors:
        return []
    device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    # Not every accelerator computes in double precision.
    wide = torch.float64 if device.type in {"cpu", "cuda"} else torch.float32
    flat = [tensor.to(device, wide, non_blocking=True).reshape(()) for tensor in tensors]
    together = torch.stack(flat)
    return together.tolist() if device.type == "cpu" else HostCopy(together)


class Reports:
    """Tells what steps and epochs were like, each once, and counts the samples and the time."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.last = 0
        """The last step that was told of."""
        self._epoch_s = time.perf_counter()
        self._epoch_samples = 0
        self._count_samples()
        self._phases: dict[str, float] = {}

    def begin(self) -> None:
        """The loop begins."""
        self._epoch_s = time.perf_counter()

    def go_back(self) -> None:
        """The run continues elsewhere: steps that were told of may be done again."""
        progress = self._parts.progress
        self.last, progress.scores = progress.position.step, {}
        self._count_samples()

    def _count_samples(self) -> None:
        parts = self._parts
        done = parts.progress.position.step_of_epoch
        self._epoch_samples = done * parts.config.global_batch

    def tell(self, step: Step) -> None:
        """Tell what an applied step was like, and the epoch that it ends; once.

        Every worker calls it.
        """
        if step.number == self.last:
            return
        self.report_step(step)
        state = self._parts.training.state
        if self._parts.config.options.same_bits and not state.is_whole:
            self._tell_hash(step.number)
        if step.ends_epoch:
            self._tell_epoch(step)
            parts = self._parts
            if mistake := parts.training.rating.find_mistake(parts.progress.scores):
                parts.outlets.sinks.tell("message", Message(mistake, "warning"))

    def report_step(self, step: Step) -> None:
        """Tell of the step alone, which no other worker has to know of."""
        if step.number == self.last:
            return
        self.last = step.number
        parts, outlets = self._parts, self._parts.outlets
        metrics, watch, queue = outlets.metrics, outlets.watching.watch, parts.feed.loader.queue
        metrics.epochs = step.epoch
        self._epoch_samples += step.samples
        phases = step.phases
        if watch is not None and watch.step:  # an engine that tells where it is
            before, self._phases, phases = self._phases, watch.totals(), {}
            for name, total in self._phases.items():
                phases[name] = total - before.get(name, 0.0)
        metrics.end_step(
            StepReport(
                step=step.number,
                epoch=step.epoch,
                samples=step.samples,
                local_samples=step.local_samples,
                seconds=step.seconds,
                phases=phases,
                sums={},
                lr=step.lr,
                queued=None if queue is None else queue.qsize(),
                piece=parts.training.fit.size,
            )
        )
        if parts.config.options.same_bits and parts.training.state.is_whole:
            self._tell_hash(step.number)

    def _tell_hash(self, number: int) -> None:
        """Write down the hash of the state now and then, so that two runs can be compared.

        Every worker calls it where each has a part of the state; where one dies in it, or is gone
        with its part, nothing is written this time.
        """
        parts, last = self._parts, self._parts.outlets.info.steps
        is_replayed = str(number) == env.read(env.REPLAY_VARIABLE)
        is_due = number % EVERY == 0 or number == last or is_replayed
        if is_due and not parts.recovery.must_go_back:
            hashes = parts.recovery.attempt(self._hash, instead=None)
            if hashes is not None:
                facts = {"step": number, "hashes": hashes}
                parts.outlets.sinks.tell("message", Message("", "info", "hashes", facts))
        if is_replayed:
            raise SystemExit(0)  # what the script does after its loop is not wanted

    def _hash(self) -> dict[str, str] | None:
        parts = self._parts
        if parts.place.membership.leads:
            return hash_state(parts.training.state.gather(parts.progress.position, {}))
        parts.training.state.take_part()
        return None

    def read_noise(self) -> NoiseEstimate | None:
        """Combine what all workers have measured since the last time, where they measure."""
        noise, exchanges = self._parts.training.noise, self._parts.exchanges
        if noise is None or self._parts.recovery.step_abandoned:
            return None
        return noise.add_gathered(
            exchanges.exchange(noise.measurements, "Adding up the gradient noise")
        )

    def add_up_so_far(self) -> ExactSums:
        """What a checkpoint keeps of the epoch, from all workers; the noise scale keeps its own."""
        self.read_noise()
        sums = self._parts.outlets.metrics.sums_of_epoch
        return self._parts.exchanges.add_up(sums, "Adding up the epoch so far")

    def _tell_epoch(self, step: Step) -> None:
        parts = self._parts
        metrics, sinks = parts.outlets.metrics, parts.outlets.sinks
        sums = means(parts.exchanges.add_up(metrics.sums_of_epoch, "Adding up the epoch"))
        metrics.end_epoch()
        # Of two with one name, the evaluation's.
        parts.progress.scores = sums | parts.progress.scores
        now_s = time.perf_counter()
        seconds, self._epoch_s = now_s - self._epoch_s, now_s
        samples, self._epoch_samples = self._epoch_samples, 0
        sinks.tell("epoch", Summary(step.epoch, step.number, sums, seconds, samples))
        if (estimate := self.read_noise()) is not None:
            scale, advice = estimate.noise_scale, estimate.advice
            facts = {"step": step.number, "noise_scale": scale, "advice": advice}
            sinks.tell("message", Message(advice, "info", "noise", facts))
