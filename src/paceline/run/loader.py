"""From samples to this worker's batches: loaded ahead, in order, with their own random numbers.

One `DataLoader` serves the whole run, across epochs, so that its workers start once. What it is
asked for are shards, not samples: whoever loads a shard seeds its generators first, so that
augmentation does not depend on how many processes load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import tee
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from paceline.comm.membership import Membership
from paceline.errors import UsageError
from paceline.run.config import Collate, RunConfig
from paceline.run.plan import Generators, Plan, Portion, Position, Shard


class MapLoader:
    """A worker's batches of a dataset with indices, from one step on to the end of the run."""

    def __init__(
        self, config: RunConfig, plan: Plan, membership: Membership, loading: dict[str, Any]
    ) -> None:
        """`loading` is handed on to the `DataLoader`."""
        self._plan, self._membership, self._loading = plan, membership, loading
        self._fetcher = ShardFetcher(config.dataset, config.seed)
        self._collate = config.collate_fn
        self._batches: Iterator[Any] | None = None

    def portions(self, done: Position) -> Iterator[Portion]:
        """What this worker of the current generation computes in every step after `done`."""
        members = self._membership
        portions = self._plan.portions(done.step, members.rank, members.size)
        # The loader runs ahead of the steps, by as much as its processes prefetch.
        ahead, now = tee(portions)
        shards = (shard for portion in ahead for shard in portion.shards)
        self._batches = iter(make_loader(self._fetcher, self._loading, self._collate, shards))
        return now

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


class ShardFetcher(Dataset[Any]):
    """A dataset whose index is a shard, and whose item is the list of the shard's samples."""

    def __init__(self, dataset: Any, seed: int, *, tells_epoch: bool = True) -> None:
        self._dataset, self._seed = dataset, seed
        self._tells_epoch, self._epoch = tells_epoch, -1
        self._generators = Generators()

    def __getitem__(self, shard: Shard) -> Any:
        if shard.epoch != self._epoch and self._tells_epoch:
            # Here and not in the training process, whose dataset may be another copy.
            self._epoch = shard.epoch
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                set_epoch(shard.epoch)
        self._generators.seed(self._seed, "data", shard.step, shard.number)
        if callable(several := getattr(self._dataset, "__getitems__", None)):
            return several(shard.indices)
        return list(map(self._dataset.__getitem__, shard.indices))


def make_loader(
    dataset: Any,
    loading: dict[str, Any],
    collate_fn: Collate,
    shards: Iterable[Shard] | None = None,
) -> DataLoader[Any]:
    """A `DataLoader` of whole batches that leaves the generators of this process alone."""
    return DataLoader(
        dataset,
        sampler=shards,
        batch_size=None,
        collate_fn=collate_fn,
        generator=torch.Generator(),
        **loading,
    )
