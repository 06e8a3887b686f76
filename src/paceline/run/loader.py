"""From samples to this worker's batches: loaded ahead, in order, with their own random numbers.

One `DataLoader` serves the whole run, across epochs, so that its workers start once. What it is
asked for are shards, not samples: whoever loads a shard seeds its generators first, so that
augmentation does not depend on how many processes load.

A stream has no indices, so its samples cannot be dealt before they are read: every worker reads all
of it and keeps what belongs to its shards. That is exact at any number of workers, in mid-epoch
too, as long as it yields the same samples in the same order whenever it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, tee
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data import DealtFiles, Generators
from paceline.errors import DesyncError, UsageError
from paceline.group import Membership, all_gather
from paceline.run.config import Collate, RunConfig
from paceline.run.plan import Plan, Portion, Position, Shard, shards_of
from paceline.torch_private import find_queue


class MapLoader:
    """A worker's batches of a dataset with indices, from one step on to the end of the run."""

    def __init__(
        self, config: RunConfig, plan: Plan, membership: Membership, loading: dict[str, Any]
    ) -> None:
        """`loading` is handed on to the `DataLoader`."""
        self._plan, self._membership, self._loading = plan, membership, loading
        dataset, lanes = config.dataset, plan.lanes
        self._fetcher = ShardFetcher(
            dataset if lanes is None else DealtFiles(dataset, lanes), config.seed
        )
        self._collate = config.collate_fn
        self._batches: Iterator[Any] | None = None
        self.queue: Any = None
        """Where the batches wait that other processes have loaded; None without such processes."""

    def portions(self, done: Position) -> Iterator[Portion]:
        """What this worker of the current generation computes in every step after `done`."""
        members = self._membership
        portions = self._plan.portions(done.step, members.rank, members.size)
        # The loader runs ahead of the steps, by as much as its processes prefetch.
        ahead, now = tee(portions)
        shards = (shard for portion in ahead for shard in portion.shards)
        loading, plan = self._loading, self._plan
        if plan.lanes is not None:
            mine = len(shards_of(members.rank, members.size, plan.shards))
            workers = plan.lanes.processes(
                loading["num_workers"], mine, is_merged=plan.merge_shards
            )
            loading = {**loading, "num_workers": workers}
        self._batches = iter(make_loader(self._fetcher, loading, self._collate, shards))
        self.queue = find_queue(self._batches)
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
        self._batches = self.queue = None


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


class Read(NamedTuple):
    """One global batch as a worker has read it: how long it is, and the worker's shards of it."""

    samples: int
    ends_epoch: bool
    shards: list[tuple[int, int, Any]]
    """Number, how many samples, and their batch."""


class StreamLoader:
    """A worker's batches of a stream, epoch after epoch."""

    def __init__(
        self, config: RunConfig, shards: int, membership: Membership, loading: dict[str, Any]
    ) -> None:
        self._config, self._shards, self._membership = config, shards, membership
        # Several processes would each read a stream of their own.
        self._loading = {**loading, "num_workers": min(loading["num_workers"], 1)}
        self._batches: dict[int, Any] = {}
        self._reading: Iterator[Any] | None = None
        self.queue: Any = None

    def portions(self, done: Position) -> Iterator[Portion]:
        """What this worker of the current generation computes in every step after `done`."""
        step = done.step
        for epoch in range(done.epoch, self._config.epochs):
            if callable(set_epoch := getattr(self._config.dataset, "set_epoch", None)):
                set_epoch(epoch)
            skipped = done.step_of_epoch if epoch == done.epoch else 0
            before = step
            for read in self._read(epoch, skipped, step):
                step += 1
                shards = [Shard(step, epoch, number, [-1] * n) for number, n, _ in read.shards]
                self._batches = {number: batch for number, _, batch in read.shards}
                yield Portion(step, epoch, read.samples, shards, read.ends_epoch)
            if step == before and self._reading is not None:
                self._refuse_empty(epoch, skipped)

    def load(self, shard: Shard) -> Any:
        return self._batches.pop(shard.number)

    def close(self) -> None:
        self._reading = self.queue = None

    def _read(self, epoch: int, skipped: int, step: int) -> Iterator[Read]:
        """One epoch from its batch `skipped` on, of which every worker has read as much."""
        config, members = self._config, self._membership
        mine = shards_of(members.rank, members.size, self._shards)
        stream = StreamFetcher(
            config.dataset,
            config.collate_fn,
            mine,
            shards=self._shards,
            global_batch=config.global_batch,
            drop_last=config.options.drop_last,
            skipped=skipped,
            seed=(config.seed, epoch),
        )
        self._reading = iter(make_loader(stream, self._loading, _as_it_is))
        self.queue = find_queue(self._reading)
        own = Generators()
        stream_state: tuple[Any, ...] | None = None
        while self._reading is not None:
            step += 1
            with own.kept():  # a stream read in this process draws from the same generators
                if stream_state is not None:
                    own.restore(stream_state)
                read = next(self._reading, None)
                stream_state = own.state()
            if members.size > 1:
                # Otherwise they would wait for each other: a short message in every step, which
                # a dataset with a length does not need.
                words = [0, 1] if read is None else [read[0], int(read[1])]
                flat = torch.tensor(words, device=members.word_device)
                everyone = all_gather(members.group, flat, f"Step {step}: comparing reads")
                _refuse_differences(step, [each.tolist() for each in everyone])
            if read is None:
                return
            yield Read(*read)

    def _refuse_empty(self, epoch: int, skipped: int) -> None:
        raise UsageError(
            f"Epoch {epoch + 1} of the dataset has no samples beyond the {skipped} global batches "
            "that were trained on, or too few to fill one.",
            advice="Its __iter__ must begin anew whenever it is called: a generator, which can be "
            "gone through once, has nothing left for a second epoch.",
        )


def _refuse_differences(step: int, everyone: Sequence[Sequence[int]]) -> None:
    """Raise if the workers have not read the same; each says how much, and if an epoch ends."""
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            ours, others = (
                f"{samples} samples" + ", the last of the epoch" * bool(is_last)
                for samples, is_last in (everyone[0], theirs)
            )
            raise DesyncError(
                f"Step {step}: the workers read different data from the stream.",
                f"Rank 0 has {ours}, rank {rank} {others}.",
                "Let the dataset yield the same samples on every worker: a run deals them itself.",
            )


def _as_it_is(read: Any) -> Any:
    return read


class StreamFetcher(IterableDataset[Any]):
    """The stream as global batches, of which this worker's shards are put together."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        mine: range,
        *,
        shards: int,
        global_batch: int,
        drop_last: bool,
        skipped: int,
        seed: tuple[int, int],
    ) -> None:
        """`mine` are the worker's shards; `skipped` batches were trained on before."""
        self._dataset, self._collate, self._mine = dataset, collate_fn, mine
        self._shards, self._global_batch, self._drop_last = shards, global_batch, drop_last
        self._skipped, self._seed = skipped, seed

    def __iter__(self) -> Iterator[Read]:
        Generators().seed(self._seed[0], "stream", self._seed[1])
        size, samples = self._global_batch, iter(self._dataset)
        for _ in islice(samples, self._skipped * size):
            pass
        batch = list(islice(samples, size))
        while batch and not (self._drop_last and len(batch) < size):
            # Read ahead: whether a batch is the last of its epoch shows only in the next.
            following = list(islice(samples, size))
            is_last = len(following) < (size if self._drop_last else 1)
            parts = [(number, batch[number :: self._shards]) for number in self._mine]
            shards = [(number, len(part), self._collate(part)) for number, part in parts if part]
            yield Read(len(batch), is_last, shards)
            batch = following
