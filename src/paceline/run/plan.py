"""Which samples form which shard of which step, and their random numbers: arithmetic, nothing else.

    order of epoch e:   a permutation drawn from (seed, e); see `data.order`
    batch of step k:    `global_batch` neighbours in that order
    shard v of V:       every V-th sample of the batch, beginning with the v-th
    random numbers:     drawn from (seed, k, v), before loading and again before the model

No worker appears in it: rank r of W computes shards r, r + W, r + 2W and so on, so W changes who
computes what, and never what is computed. With V = W, and a batch that W divides, a rank gets the
very samples that `DistributedSampler` with the same seed deals it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import IterableDataset

from paceline.data import (
    EpochOfFiles,
    Files,
    KeyedOrder,
    Lanes,
    OrderName,
    choose_order,
    draw_order,
)
from paceline.ddp import in_tree_order
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.run.config import RunConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one global batch that goes through the model at once."""

    step: int
    epoch: int
    number: int
    """Which shard; with `merge_shards` the first of several."""
    indices: list[int]
    """Its samples; where the dataset is a stream, nobody knows more than how many."""
    is_second: bool = False
    """Whether another worker computes it, and this one as well; see `ddp.audit`."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What one worker computes of one step."""

    step: int
    epoch: int
    samples: int
    """How many samples the global batch has, on all workers together."""
    shards: list[Shard]
    """Without those that a short batch leaves empty."""
    ends_epoch: bool
    busy: int | None = None
    """How many shards of it have samples, on all workers; None: as many as there can be."""
    audited: list[Shard] = field(default_factory=list)
    """Shards of other workers that this one computes as well, before its own."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is: steps applied, whole epochs among them, and steps since.

    With several models, also how many turns of the next step are.
    """

    step: int = 0
    epoch: int = 0
    step_of_epoch: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The data of a whole run. Steps count from 1, epochs and shards from 0."""

    samples: int
    global_batch: int
    shards: int
    epochs: int
    seed: int = 0
    shuffle: bool = True
    order: OrderName = "torch"
    lanes: Lanes | None = None
    """Where the samples are in files: these decide about the order."""
    drop_last: bool = False
    """Whether samples that do not fill the last batch of an epoch are left out of it."""
    merge_shards: bool = False
    """Whether a worker's shards go through the model as one."""
    in_tree_order: bool = False
    """Whether shards whose gradients are added first come one after the other."""
    audits: Callable[[int, int, int], list[int]] | None = None
    """Of step, rank and size: the shards that a rank computes besides its own."""
    steps_per_epoch: int = field(init=False)
    steps: int = field(init=False)
    shortest_batch: int = field(init=False)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("The dataset is empty.", advice="Look at how it finds its samples.")
        check_batch(self.global_batch, self.shards)
        if self.drop_last and self.samples < self.global_batch:
            raise UsageError(
                f"The dataset has {self.samples} samples, which do not fill one global batch of "
                f"{self.global_batch}, and drop_last leaves them out.",
                advice="Use a smaller global_batch, or drop_last=False.",
            )
        whole, rest = divmod(self.samples, self.global_batch)
        per_epoch = whole + (rest > 0 and not self.drop_last)
        object.__setattr__(self, "steps_per_epoch", per_epoch)
        object.__setattr__(self, "steps", self.epochs * per_epoch)
        object.__setattr__(self, "shortest_batch", len(self.batch(per_epoch)))

    def batch(self, step: int) -> range:
        """Where in the order of its epoch the batch of a step is."""
        start = (step - 1) % self.steps_per_epoch * self.global_batch
        return range(start, min(start + self.global_batch, self.samples))

    def portions(self, done: int, rank: int, size: int) -> Iterator[Portion]:
        """What rank `rank` of `size` computes in every step after `done` steps."""
        per_epoch, order, order_of = self.steps_per_epoch, None, -1
        mine: Sequence[int] = shards_of(rank, size, self.shards)
        if self.in_tree_order:
            mine = in_tree_order(mine, self.shards)
        for step in range(done + 1, self.steps + 1):
            epoch, batch = (step - 1) // per_epoch, self.batch(step)
            if epoch != order_of:
                order, order_of = self._order(epoch), epoch
            shards = self._cut(step, batch, order, mine)
            audited = []
            if self.audits is not None:
                seconds = self.audits(step, rank, size)
                audited = self._cut(step, batch, order, seconds, is_second=True)
            if self.merge_shards and len(shards) > 1:
                together = [index for shard in shards for index in shard.indices]
                shards = [Shard(step, epoch, shards[0].number, together)]
            is_last = step % per_epoch == 0
            yield Portion(step, epoch, len(batch), shards, is_last, audited=audited)

    def _cut(
        self,
        step: int,
        batch: range,
        order: Any,
        numbers: Sequence[int],
        *,
        is_second: bool = False,
    ) -> list[Shard]:
        """Shards of a batch, without those that have no samples."""
        shards, epoch = [], (step - 1) // self.steps_per_epoch
        for number in numbers:
            if places := batch[number :: self.shards]:
                indices = list(places)
                if order is not None:
                    indices = order[places.start : places.stop : places.step].tolist()
                shards.append(Shard(step, epoch, number, indices, is_second))
        return shards

    def _order(self, epoch: int) -> Tensor | KeyedOrder | EpochOfFiles | None:
        """The order of the samples in an epoch; None: as they stand."""
        if self.lanes is not None:
            return self.lanes.epoch(epoch)
        return draw_order(self.order, self.samples, self.seed, epoch) if self.shuffle else None


def make_plan(
    config: RunConfig,
    shards: int,
    order: OrderName | None = None,
    audits: Callable[[int, int, int], list[int]] | None = None,
) -> Plan | None:
    """Which samples form which step; None where samples cannot be asked for by number.

    `order` is the one that the run began with, if it began before.
    """
    dataset, options = config.dataset, config.options
    if config.loader is not None:
        return None
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__iter__"):
            raise UsageError(
                f"dataset has the type {type(dataset).__name__}, which is not a dataset.",
                advice="Pass an object with __len__ and __getitem__, or an iterable one.",
            )
        return None
    if not isinstance(dataset, Sized):
        raise UsageError(
            f"The dataset has the type {type(dataset).__name__}, which has no length.",
            advice="Give it __len__, or make it an IterableDataset.",
        )
    samples = len(dataset)
    if options.order != "auto":
        order = options.order
    lanes = None
    if isinstance(dataset, Files):
        if options.order != "auto":
            raise UsageError(
                f"order is {options.order!r}, and files are read one after the other.",
                advice='Leave order="auto"; Files(window=) says how far samples are shuffled.',
            )
        lanes = Lanes(
            counts=dataset.counts,
            shards=shards,
            global_batch=config.global_batch,
            lanes=dataset.lanes,
            window=dataset.window,
            seed=config.seed,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
        )
        order = None
    return Plan(
        samples=samples,
        global_batch=config.global_batch,
        shards=shards,
        epochs=config.epochs,
        seed=config.seed,
        shuffle=options.shuffle,
        order=order or choose_order(samples),
        lanes=lanes,
        drop_last=options.drop_last,
        merge_shards=options.merge_shards,
        in_tree_order=bool(options.same_bits),
        audits=audits if options.audit else None,
    )


def shards_of(rank: int, size: int, shards: int) -> range:
    """The shards that one worker computes, in order."""
    return range(rank, shards, size)


def check_batch(global_batch: int, shards: int) -> None:
    if global_batch < shards:
        raise UsageError(
            f"A global batch of {global_batch} cannot be cut into {shards} shards.",
            advice="Use a larger global_batch, fewer shards, or fewer workers: without shards= "
            "there is one shard per worker.",
        )
