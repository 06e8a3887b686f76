"""What a run consists of on one worker, in four parts that are made once and then stay.

    place      who takes part, and which device is this worker's
    training   what computes, updates and is saved: the engine, the update, buffers, random numbers
    feed       where batches come from
    outlets    where numbers, messages and checkpoints go

What changes is in `progress`; `build` puts all of it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.data import Generators, Portion, Position
from paceline.ddp import Audit, Engine
from paceline.files import RunInfo
from paceline.group import Membership, World, map_tensors, word_device
from paceline.policy import NoiseMeter
from paceline.run.buffers import Buffers
from paceline.run.config import RunConfig
from paceline.run.cut import Cut
from paceline.run.exchanges import Exchanges
from paceline.run.fit import Fit
from paceline.run.loader import MapLoader, StreamLoader
from paceline.run.metrics import Metrics
from paceline.run.objects import StateObjects
from paceline.run.precision import Precision
from paceline.run.rating import Rating
from paceline.run.recovery import NoRecovery, Recovery
from paceline.run.state import RunState, Saving
from paceline.run.stop import LoaderSignals, StopRequest, Vote
from paceline.run.user_loader import UserLoader
from paceline.run.watching import Watching
from paceline.telemetry import Sinks
from paceline.torch_private import count_collectives
from paceline.update import Update, WeightAverage

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

    engine: Engine
    module: nn.Module
    update: Update
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
    objects: StateObjects

    def keep(self) -> tuple[Any, Any]:
        """What a block may change besides the model: generators, and the script's objects."""
        return self.generators.state(), self.objects.keep()

    def put_back(self, kept: tuple[Any, Any], step: int) -> None:
        """Leave them as they were before the block of `step`."""
        self.generators.restore(kept[0])
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


def loading(pins: bool, prefetch: int, signals: LoaderSignals, workers: int) -> dict[str, Any]:
    """Settings for a `DataLoader` with so many processes."""
    settings: dict[str, Any] = {"num_workers": workers, "pin_memory": pins}
    if workers > 0:
        settings |= {"prefetch_factor": prefetch, "worker_init_fn": signals.on_start}
    return settings


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
    """Into how many parts a batch is cut; see `cut`."""
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
    has_left: bool = False
    """Whether this worker alone has stopped, and the others continue."""


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
    recovery: Recovery = field(default_factory=NoRecovery)
    cut: Cut = field(init=False)

    def __post_init__(self) -> None:
        self.exchanges.recovery, fit = self.recovery, self.training.fit
        fit.on_change, fit.passes = self.count_passes, self._passes
        fit.tell = self.training.objects.tell = partial(self.outlets.sinks.tell, "message")
        self.place.membership.follow(self.on_generation)
        self.count_passes()
        self.cut = Cut(self)

    def _passes(self) -> int:
        return self.config.passes(self.progress.shards, self.progress.size)

    def count_passes(self) -> None:
        progress, size, training = self.progress, self.progress.size, self.training
        is_each = self._passes() == size <= self.feed.shortest_batch
        is_each = is_each and not training.audit.share and training.fit.size is None
        group = self.place.membership.group
        if training.buffers is not None:
            training.buffers.is_cut = training.fit.size is not None
        progress.may_talk = is_each
        is_counted = not is_each or training.fit.is_on or self.recovery.is_on
        progress.count_talks = count_collectives(group) if is_counted else int

    def recover_with(self, recovery: Recovery) -> None:
        """Leave lost workers to it."""
        self.recovery = self.exchanges.recovery = recovery
        self.vote.is_due, self.stop.leave = recovery.is_due, recovery.ask_to_leave
        self.training.objects.looks_at_large = True
        self.count_passes()

    def on_generation(self) -> None:
        """Who takes part has changed, and perhaps how small messages travel.

        Every part of the run is told here, after its engine: who follows the group itself is
        something that also exists without a run.
        """
        members = self.place.membership
        self.progress.size = members.size
        self.cut.begin()
        self.count_passes()
        members.word_device = word_device(members.group, self.place.device)
        self.outlets.saving.on_generation()
        self.outlets.watching.on_generation()
        self.vote.on_generation()
        if self.training.buffers is not None:
            self.training.buffers.on_generation()

    def take_over(self) -> None:
        """From now on this worker speaks, draws and writes for all."""
        outlets, step = self.outlets, self.progress.position.step
        outlets.sinks.take_over(self.config.sinks, outlets.info, step, [])
