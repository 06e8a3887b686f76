"""From samples to this worker's batches: loaded ahead, in order, with their own random numbers.

One `DataLoader` serves the whole run, across epochs, so that its workers start once. What it is
asked for are shards, not samples: whoever loads a shard seeds its generators first, so that
augmentation does not depend on how many processes load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from paceline.errors import UsageError
from paceline.run.loader_signals import Lifeline
from paceline.run.plan import Plan, shards_of
from paceline.run.seeds import Generators, derive

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one global batch that goes through the model at once."""

    step: int
    epoch: int
    number: int
    """Which shard; with `merge_shards` the first of several."""
    indices: list[int]
    """Its samples; where the dataset is a stream, nobody knows more than how many."""


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


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is: steps applied, whole epochs among them, and steps since."""

    step: int = 0
    epoch: int = 0
    step_of_epoch: int = 0


class Order:
    """The order of the samples in every epoch, by (seed, epoch): torch's DistributedSampler's."""

    def __init__(self, samples: int, seed: int, shuffle: bool) -> None:
        self._samples, self._seed, self._shuffle = samples, seed, shuffle
        self._kept: tuple[int, Tensor] | None = None

    def take(self, epoch: int, positions: range) -> list[int]:
        if not self._shuffle:
            return list(positions)
        if self._kept is None or self._kept[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            # The device is given because a default device set by the user may not be the CPU.
            self._kept = epoch, torch.randperm(self._samples, generator=generator, device="cpu")
        indices: list[int] = self._kept[1][
            positions.start : positions.stop : positions.step
        ].tolist()
        return indices


class MapLoader:
    """A worker's batches of a dataset with indices, from one step on to the end of the run."""

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        *,
        seed: int,
        rank: int,
        size: int,
        shuffle: bool = True,
        merge_shards: bool = False,
        collate_fn: Collate | None = None,
        loading: dict[str, Any],
    ) -> None:
        """`loading` is handed on to the `DataLoader`."""
        self._plan = plan
        self._seed, self._shuffle = seed, shuffle
        self._mine = shards_of(rank, size, plan.shards)
        self._merge = merge_shards
        self._fetcher = ShardFetcher(dataset, seed, collate_fn or default_collate)
        self._loading = loading
        self._order = Order(plan.samples, seed, shuffle)
        self._batches: Iterator[Any] | None = None

    def portions(self, done: Position) -> Iterator[Portion]:
        """What this worker computes in every step from `done` on."""
        self._batches = iter(self._loader(done.step))
        for step in range(done.step + 1, self._plan.steps + 1):
            yield self._portion(self._order, step)

    def load(self, shard: Shard) -> Any:
        """The batch of the next shard: they come in the order of the portions."""
        if self._batches is None:
            raise UsageError(
                f"Step {shard.step} belongs to a loop that is over.",
                advice="Keep the iterator: `for step in run: with step: ...`.",
            )
        return next(self._batches)

    def close(self) -> None:
        """Let the loader's processes go."""
        self._batches = None

    def _portion(self, order: Order, step: int) -> Portion:
        plan, epoch = self._plan, self._plan.epoch_of(step)
        shards = [
            Shard(step, epoch, number, order.take(epoch, positions))
            for number in self._mine
            if len(positions := plan.shard(step, number))
        ]
        if self._merge and len(shards) > 1:
            indices = [index for shard in shards for index in shard.indices]
            shards = [Shard(step, epoch, shards[0].number, indices)]
        return Portion(step, epoch, len(plan.batch(step)), shards, plan.ends_epoch(step))

    def _loader(self, done: int) -> DataLoader[Any]:
        # The loader runs ahead, so it has an order of its own: two epochs may be in use at once.
        order = Order(self._plan.samples, self._seed, self._shuffle)
        steps = range(done + 1, self._plan.steps + 1)
        shards = (shard for step in steps for shard in self._portion(order, step).shards)
        return DataLoader(
            self._fetcher,
            sampler=shards,
            batch_size=None,
            collate_fn=as_it_is,
            generator=torch.Generator(),
            **self._loading,
        )


class ShardFetcher(Dataset[Any]):
    """A dataset whose index is a shard, and whose item is the shard's batch."""

    def __init__(self, dataset: Any, seed: int, collate_fn: Collate) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate_fn
        self._epoch: int | None = None

    def __getitem__(self, shard: Shard) -> Any:
        if shard.epoch != self._epoch:
            # Here and not in the training process, whose dataset may be another copy.
            self._epoch = shard.epoch
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                set_epoch(shard.epoch)
        Generators().seed(derive(self._seed, "data", shard.step, shard.number))
        if callable(several := getattr(self._dataset, "__getitems__", None)):
            return self._collate(several(shard.indices))
        return self._collate([self._dataset[index] for index in shard.indices])


def loading_options(
    *, workers: int, pin_memory: bool, prefetch: int, lifeline: Lifeline
) -> dict[str, Any]:
    """The arguments of a `DataLoader` that say how it loads, and not what."""
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": pin_memory}
    if workers > 0:
        options |= {"prefetch_factor": prefetch, "worker_init_fn": lifeline.on_start}
    return options


def as_it_is(batch: Any) -> Any:
    return batch
