"""What a run consists of on one worker, in four parts that are made once and then stay.

    place      who takes part, and which device is this worker's
    training   what computes, updates and is saved: the engine, the update, buffers, random numbers
    feed       where batches come from
    outlets    where numbers, messages and checkpoints go

What changes is in `progress`, and in how the batch is cut; `build` puts all of it together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from paceline.data import Files, Generators, Plan, Portion, Position
from paceline.ddp import Audit
from paceline.files import RunInfo
from paceline.group import Membership, World, exchange, map_tensors, word_device
from paceline.policy import NoiseMeter
from paceline.run.buffers import Buffers
from paceline.run.config import RunConfig
from paceline.run.fit import Fit
from paceline.run.loader import MapLoader, StreamLoader
from paceline.run.loader_signals import LoaderSignals
from paceline.run.metrics import ExactSums, Metrics
from paceline.run.objects import StateObjects
from paceline.run.recovery import Exchanges, Recovery
from paceline.run.state import RunState, Saving
from paceline.run.stop import StopRequest, Vote
from paceline.run.updates import Precision, Rating
from paceline.run.user_loader import UserLoader
from paceline.run.watching import Watching
from paceline.telemetry import Message, Sinks, count_text
from paceline.torch_private import count_collectives
from paceline.update import WeightAverage, total_norm

Loader = MapLoader | StreamLoader | UserLoader


@dataclass(frozen=True, slots=True)
class Place:
    """Who takes part, and where this worker computes."""

    world: World
    membership: Membership
    device: torch.device
    is_replacement: bool
    """Whether this worker joins a training that is under way."""

    def to_device(self, batch: Any) -> Any:
        """The batch with its tensors on the model's device."""
        return map_tensors(lambda t: t.to(self.device, non_blocking=True), batch)


@dataclass(frozen=True, slots=True)
class Training:
    """What computes and what is changed by a step."""

    engine: Any
    """An `Engine`; a `TurnEngine` of several models, whose turns have one each."""
    module: nn.Module
    update: Any
    """An `Update`; or a `TurnUpdate` likewise."""
    shares_out: bool
    precision: Precision
    average: WeightAverage | None
    buffers: Buffers | None
    noise: NoiseMeter | None
    generators: Generators
    rating: Rating
    state: RunState
    audit: Audit
    fit: Fit
    objects: StateObjects | None
    """The script's own; None where it has passed none."""

    def put_back(self, kept: tuple[Any, Any], step: int) -> None:
        """Leave generators and the script's objects as they were before the block of `step`."""
        self.generators.restore(kept[0])
        if self.objects is not None:
            self.objects.put_back(kept[1], step)


@dataclass(frozen=True, slots=True)
class Feed:
    """Where batches come from."""

    loader: Loader
    shortest_batch: float
    """How many samples the shortest global batch has; infinite where that is not known."""
    signals: LoaderSignals
    loading: Callable[[int], dict[str, Any]]
    """The arguments of a `DataLoader` with so many processes that say how it loads, not what."""
    evaluated: set[int] = field(default_factory=set)
    """Lengths of the datasets whose samples this worker has compared with the others'."""


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where everything goes that a run tells and saves."""

    sinks: Sinks
    metrics: Metrics
    saving: Saving
    watching: Watching
    info: RunInfo
    lines: list[str]
    """What is said when the loop begins."""

    def report_checkpoints(self, *, wait: bool = False) -> None:
        """Tell of those that have reached the disk since."""
        for written in self.saving.take_finished(wait=wait):
            self.sinks.tell("checkpoint", written)


@dataclass(slots=True)
class RunProgress:
    """How far the run is; all of it is equal on every worker between two steps."""

    position: Position
    size: int
    """Workers of the current generation, as a plain number because every step asks for it."""
    shards: int
    """Into how many parts a batch is cut; see `Cut`."""
    count_talks: Callable[[], int] = int
    """How many collectives this worker has started."""
    may_talk: bool = False
    """Whether every worker computes exactly one pass of each step: only then can a pass talk."""
    scores: dict[str, float] = field(default_factory=dict)
    """What is known of the model as it is now: a step that is applied makes it another one."""
    stopping: int = 0
    """What the workers have agreed to stop for: a signal, `stop.BY_SCRIPT` or another of those."""
    save_at: int = 0
    evaluate_at: int = 0
    """The last steps after which all have agreed to save, and to evaluate."""
    reason: str = ""
    """Why, where `stop.BY_OTHERS` alone does not tell."""
    has_left: bool = False
    """Whether this worker alone has stopped, and the others continue."""


_STREAM = (
    "The dataset is iterable: every worker reads all of it and keeps its share, in the order in "
    "which it comes. Exact resuming and equal results at other worker counts hold only if it "
    "yields the same samples in the same order every time. Files in paceline.data are read by one "
    "worker each."
)
_NO_NOISE = (
    "The gradient noise scale cannot be measured: the whole batch goes through the model at once, "
    "so there is nothing to compare. Pass shards=2 or more to a new run."
)


def opening_lines(
    config: RunConfig,
    world: World,
    device: torch.device,
    shards: int,
    plan: Plan | None,
    position: Position,
    *,
    may_cut: bool,
) -> list[str]:
    """What is said when the loop begins; `may_cut` if the first step decides on shards."""
    lines = [_STREAM] if plan is None and config.loader is None else []
    if isinstance(config.dataset, Files) and (files := len(config.dataset.files)) < shards:
        lines.append(
            f"{count_text(files, 'file')} for {count_text(shards, 'shard')}: each is opened by "
            f"several workers, who skip what is not theirs. With {shards} files or more every "
            "worker reads its own."
        )
    if world.size > shards and not may_cut:
        lines.append(say_idle(world.size, shards))
    if world.device.type != "cpu" and device.type == "cpu":
        lines.append(f"The model is on the CPU, although this worker has {world.device}.")
    if plan is not None and position.step >= plan.steps:
        lines.append(f"Nothing is left to do: all {plan.steps} steps are applied.")
    cosine = config.scheduler if type(config.scheduler) is CosineAnnealingLR else None
    if plan is not None and cosine is not None and cosine.T_max < plan.steps:
        lines.append(
            f"CosineAnnealingLR falls for T_max={cosine.T_max} steps, then rises again, and it is "
            f"stepped once per step. To let it fall all the time pass T_max={plan.steps}."
        )
    is_one = count_passes(config, shards, world.size) == 1
    if config.options.noise_every and is_one and not (may_cut and world.size > shards):
        lines.append(_NO_NOISE)
    return lines


def count_passes(config: RunConfig, shards: int, workers: int) -> int:
    """How many backward passes a step has, on all workers together."""
    return min(workers, shards) if config.options.merge_shards else shards


class Outcome(StrEnum):
    """What has become of a step on one worker."""

    NEW = auto()
    OPEN = auto()
    """Inside the block."""
    SUMMED = auto()
    """Inside the block, and all gradients have arrived."""
    LOST = auto()
    """Inside the block: another worker died."""
    HEALED = auto()
    """Applied with the others: it was lost here, they had all of the sum, and gave their state."""
    APPLIED = auto()
    UNDONE = auto()
    """Another worker died: the step is done again, or, where a part of the state died with it, the
    run goes back to a checkpoint."""
    FAILED = auto()
    """An error left the block; all is as before."""


class Dealing:
    """Hands out steps: this worker's part of each, among those who are there now."""

    def __init__(self, loader: Loader, membership: Membership, progress: RunProgress) -> None:
        self._loader, self._membership, self._progress = loader, membership, progress
        self.portions: Iterator[Portion] = iter(())
        self.generation = -1
        """To whose members the steps are dealt."""

    def deal(self) -> None:
        """Begin with the first step that is not applied."""
        self.generation = self._membership.generation
        self.portions = self._loader.portions(self._progress.position)

    def again(self) -> Portion:
        """The first step that is not applied, once more."""
        self.deal()
        return next(self.portions)


@dataclass
class RunParts:
    """All of it. A `Step` is given what it needs."""

    config: RunConfig
    place: Place
    training: Training
    feed: Feed
    outlets: Outlets
    progress: RunProgress
    dealing: Dealing
    exchanges: Exchanges
    stop: StopRequest
    vote: Vote
    agreed: dict[str, Any]
    """What all workers were given alike, and a newcomer must be given too."""
    step_note: Any
    """Memory in which the launcher reads the number of the step."""
    may_cut: bool
    """Whether a generation may find that there can be more shards."""
    between_steps: list[Callable[[], None]] = field(default_factory=list)
    """What all workers do before each step; they may wait for each other, and may stop the run."""
    recovery: Recovery = field(default_factory=Recovery)
    cut: Cut = field(init=False)

    def __post_init__(self) -> None:
        self.exchanges.recovery, fit = self.recovery, self.training.fit
        fit.on_change, fit.passes = self.count_passes, self._passes
        fit.tell = partial(self.outlets.sinks.tell, "message")
        if self.training.objects is not None:
            self.training.objects.tell = fit.tell
        self.place.membership.follow(self.on_generation)
        self.count_passes()
        self.cut = Cut(self)

    def _passes(self) -> int:
        return count_passes(self.config, self.progress.shards, self.progress.size)

    def count_passes(self) -> None:
        progress, size, training = self.progress, self.progress.size, self.training
        is_each = self._passes() == size <= self.feed.shortest_batch
        is_each = is_each and not training.audit.share and training.fit.size is None
        if training.buffers is not None:
            training.buffers.is_cut = training.fit.size is not None
        progress.may_talk = is_each
        # Where no pass may talk it is refused, `fit` has to know, and a step in which the script
        # has talked begins again with its block; no other code asks.
        is_counted = not is_each or training.fit.is_on or self.recovery.is_on
        progress.count_talks = count_collectives(self.place.membership.group) if is_counted else int

    def recover_with(self, recovery: Recovery) -> None:
        """Leave lost workers to it."""
        self.recovery = self.exchanges.recovery = recovery
        self.vote.is_due, self.stop.leave = recovery.is_due, recovery.ask_to_leave
        if self.training.objects is not None:
            self.training.objects.looks_at_large = True
        self.count_passes()

    def on_generation(self) -> None:
        """Who takes part has changed, and perhaps how small messages travel.

        Every part of the run is told here, after its engine, which follows the group itself.
        """
        members = self.place.membership
        self.progress.size = members.size
        self.cut.begin()
        self.count_passes()
        members.word_device = word_device(members.group, self.place.device)
        self.outlets.saving.on_generation()
        self.outlets.watching.on_generation()
        self.vote.on_generation()
        if self.training.noise is not None:
            self.training.noise.forget()
        if self.training.buffers is not None:
            self.training.buffers.on_generation()

    def take_over(self) -> None:
        """From now on this worker speaks, draws and writes for all."""
        outlets, step = self.outlets, self.progress.position.step
        outlets.sinks.take_over(self.config.sinks, outlets.info, step, [])


_LOSS, _LOSS_IN_DOUBLE, _LOSS_IN_16_BITS = 1e-5, 1e-10, 1e-3
"""How far apart two cuts may be, relatively, by rounding alone."""
_NORM = 100
"""In gradients more cancels out than in a loss: so many times as far."""


class Cut:
    """Into how many shards the batch of a step is cut, as all workers have agreed on it.

    Where there are more workers than shards, the first step of a generation finds out whether it
    would be the same in more of them, unless the script has fixed their number:

        step k, as it is cut --(draws, or changes buffers)---------------> applied; it stays so
                 │
                 └──> step k, one shard per worker --(the same loss and gradients)--> applied; so
                               │                                                      from now on
                               └──(others)--> step k, as it was cut --> applied; it stays so

    What a step draws is seeded by the numbers of its shards, and batch statistics are those of a
    shard; without either, a loss that is a mean over its items has the same gradients in any cut. A
    loss that is none, because it compares samples, or divides by something that `items=` does not
    say, shows.

    Invariant: whether a step is computed in another cut first depends on what all workers have told
    each other, so they compute it equally often.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self.is_open = self.is_repeated = False
        """Whether the step under way decides about the cut; and whether it is computed once more,
        in another one."""
        self._has_drawn = False
        self._before = 0
        """How many shards there were, while others are tried."""
        self._told: list[list[float]] = []
        """What each worker has found in the old cut."""
        self._said: set[tuple[int, int]] = set()
        self.begin()

    def begin(self) -> None:
        """A generation begins: with its first step it is open whether there can be more."""
        if self._before:
            self._cut_into(self._before)
        progress, self._before, self._has_drawn = self._parts.progress, 0, False
        self.is_repeated, self.is_open = False, self._parts.may_cut and self._most > progress.shards

    def adopt(self, shards: int) -> None:
        """So many shards are what the workers have agreed on."""
        if shards != self._parts.progress.shards:
            self._note(shards)
        self.begin()

    @property
    def _most(self) -> int:
        return min(self._parts.progress.size, self._parts.config.global_batch)

    def look(self, *key: int) -> None:
        """The loss of a shard, seeded by `key`, is computed: have random numbers been drawn?"""
        parts = self._parts
        self._has_drawn |= parts.training.generators.were_used(parts.config.seed, "model", *key)

    def decide(self, step: int, sums: ExactSums) -> None:
        """The gradients of an open step have arrived; a collective: all workers call this.

        `sums` are those of this worker's losses.
        """
        told, progress = self._tell(step, sums), self._parts.progress
        before, self._before, self._has_drawn = self._before, 0, False
        if before:
            why = self._difference(step, before, told)
            if why:
                self._cut_into(before)
                self.is_repeated = True
            else:
                self._note(progress.shards)
                self._say_changed(step, before)
        else:
            why = _reason(step, told)
            if not why and math.isfinite(_mean(told)):  # nan equals nothing
                self._before, self._told, self.is_repeated = progress.shards, told, True
                self._cut_into(self._most)
        self.is_open = bool(self._before)
        if why:
            self._say_refused(why)

    def _tell(self, step: int, sums: ExactSums) -> list[list[float]]:
        """What every worker has found: whether it drew, changed buffers; loss, items, length."""
        training, members = self._parts.training, self._parts.place.membership
        loss, items = (math.fsum(part) for part in sums.get("loss", ([], [])))
        norm = 0.0
        if not training.shares_out:  # there a worker has its share of the sums only
            norm = total_norm(param.grad for param in training.module.parameters()).item()
        has_changed = training.buffers is not None and training.buffers.have_changed()
        found = [float(self._has_drawn), float(has_changed), loss, items, norm]
        what = f"Step {step}: comparing two cuts of the batch"
        told: list[list[float]] = exchange(members.group, found, members.word_device, what)
        return told

    def _difference(self, step: int, before: int, told: list[list[float]]) -> str:
        """What is not the same in both cuts; empty where all is."""
        parts, near = self._parts, _LOSS
        if parts.training.precision.is_short:
            near = _LOSS_IN_16_BITS
        elif all(p.dtype == torch.float64 for p in parts.training.module.parameters()):
            near = _LOSS_IN_DOUBLE
        losses = [_mean(each) for each in (self._told, told)]
        norms = [max(each[4] for each in cut) for cut in (self._told, told)]
        pairs = {"loss": (losses, near), "length of the gradients": (norms, _NORM * near)}
        for what, ((was, now), most) in pairs.items():
            if not math.isclose(was, now, rel_tol=most):
                counts = [count_text(n, "shard") for n in (before, parts.progress.shards)]
                return (
                    f"the {what} of step {step} is {was:.7g} in {counts[0]} and {now:.7g} in "
                    f"{counts[1]}"
                )
        return ""

    def _note(self, shards: int) -> None:
        """From now on there are so many, for those who come later too."""
        self._cut_into(shards)
        self._parts.outlets.saving.note_shards(shards)

    def _cut_into(self, shards: int) -> None:
        loader = self._parts.feed.loader
        assert not isinstance(loader, UserLoader)  # whose batches are what they are
        self._parts.progress.shards = shards
        loader.cut_into(shards)
        self._parts.count_passes()

    def _say_changed(self, step: int, before: int) -> None:
        parts, shards = self._parts, self._parts.progress.shards
        text = (
            f"From step {step} on the batch is cut into {shards} shards, one per worker, and not "
            f"into {before}: it draws no random numbers, and has the same loss and gradients "
            f"either way. A new run with shards={before} cuts it as before."
        )
        facts = {"text": text, "level": "info", "shards": shards}
        parts.outlets.sinks.tell("message", Message(text, facts=facts))
        parts.recovery.tell_facts(shards=shards)

    def _say_refused(self, why: str) -> None:
        parts, size, shards = self._parts, self._parts.progress.size, self._parts.progress.shards
        parts.recovery.tell_facts(grows=False)
        if (size, shards) not in self._said:
            self._said.add((size, shards))
            text = say_idle(size, shards, f" The batch cannot be cut into more: {why}.")
            parts.outlets.sinks.tell("message", Message(text, "warning"))


def _reason(step: int, told: list[list[float]]) -> str:
    """Why a step, as it is cut, would be another one in any other cut; empty where it may not."""
    if any(has_drawn for has_drawn, *_ in told):
        return f"step {step} draws random numbers"
    if any(has_changed for _, has_changed, *_ in told):
        return f"step {step} changes buffers, as layers do that keep statistics of a batch"
    return ""


def _mean(told: list[list[float]]) -> float:
    total, items = (math.fsum(each[n] for each in told) for n in (2, 3))
    return total / items if items else 0.0


def say_idle(workers: int, shards: int, why: str = "") -> str:
    """There are more workers than shards."""
    idle = workers - shards
    return (
        f"{workers} workers share {count_text(shards, 'shard')}, so {count_text(idle, 'worker')} "
        f"{'has' if idle == 1 else 'have'} nothing to compute.{why} Pass shards= to a new run to "
        "use them."
    )
