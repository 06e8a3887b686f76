"""An iterable dataset as global batches: everybody reads everything and keeps a share.

A stream has no indices, so its samples cannot be dealt before they are read. Every worker reads the
whole stream and keeps what belongs to its shards. That is exact at any number of workers, in
mid-epoch too, as long as the stream yields the same samples in the same order whenever it is asked;
only the dataset itself can promise that, and it pays by being read once per worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from paceline import comm
from paceline.comm.membership import Membership
from paceline.errors import DesyncError, UsageError
from paceline.run.loader import Collate, make_loader
from paceline.run.plan import Generators, Portion, Position, Shard, shards_of

STATEMENT = (
    "The dataset is iterable: every worker reads all of it and keeps its share, in the order in "
    "which it comes. Exact resuming and equal results at other worker counts hold only if it "
    "yields the same samples in the same order every time."
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
        self,
        dataset: Any,
        membership: Membership,
        *,
        seed: int,
        word_device: torch.device,
        global_batch: int,
        shards: int,
        epochs: int,
        drop_last: bool,
        collate_fn: Collate,
        loading: dict[str, Any],
    ) -> None:
        """`word_device` is where small messages travel."""
        self._dataset, self._seed, self._epochs = dataset, seed, epochs
        self._membership, self._word_device = membership, word_device
        self._cut = Cut(shards, global_batch, drop_last)
        self._collate = collate_fn
        # Several processes would each read a stream of their own.
        self._loading = {**loading, "num_workers": min(loading["num_workers"], 1)}
        self._batches: dict[int, Any] = {}
        self._reading: Iterator[Any] | None = None

    def portions(self, done: Position) -> Iterator[Portion]:
        """What this worker of the current generation computes in every step after `done`."""
        step = done.step
        for epoch in range(done.epoch, self._epochs):
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                set_epoch(epoch)
            skipped = done.step_of_epoch if epoch == done.epoch else 0
            before = step
            for read in self._agreed(step, self._read(epoch, skipped)):
                step += 1
                shards = [Shard(step, epoch, number, [-1] * n) for number, n, _ in read.shards]
                self._batches = {number: batch for number, _, batch in read.shards}
                yield Portion(step, epoch, read.samples, shards, read.ends_epoch)
            if step == before and self._reading is not None:
                self._refuse_empty(epoch, skipped)

    def load(self, shard: Shard) -> Any:
        return self._batches.pop(shard.number)

    def close(self) -> None:
        self._reading = None

    def _agreed(self, step: int, reads: Iterator[Read]) -> Iterator[Read]:
        """The same reads, if all workers read as much: otherwise they would wait for each other.

        A short message in every step, which a dataset with a length does not need.
        """
        while True:
            read = next(reads, None)
            step += 1
            if self._membership.size > 1:
                mine = [-1, 0] if read is None else [read.samples, int(read.ends_epoch)]
                words = torch.tensor(mine, device=self._word_device)
                what = f"Step {step}: comparing what was read"
                everyone = comm.all_gather(self._membership.group, words, what)
                _refuse_differences(step, [each.tolist() for each in everyone])
            if read is None:
                return
            yield read

    def _refuse_empty(self, epoch: int, skipped: int) -> None:
        has = "has no samples"
        if skipped:
            has += f" beyond the {skipped} global batches that were trained on"
        elif self._cut.drop_last:
            has += f", or too few: they do not fill one global batch of {self._cut.global_batch}"
        raise UsageError(
            f"Epoch {epoch + 1} of the dataset {has}.",
            advice="Its __iter__ must begin anew whenever it is called: a generator, which can be "
            "gone through once, has nothing left for a second epoch.",
        )

    def _read(self, epoch: int, skipped: int) -> Iterator[Read]:
        mine = shards_of(self._membership.rank, self._membership.size, self._cut.shards)
        seed = self._seed, epoch
        stream = StreamFetcher(self._dataset, self._collate, self._cut, mine, skipped, seed)
        self._reading = iter(make_loader(stream, self._loading))
        own = Generators()
        stream_state: tuple[Any, ...] | None = None
        while self._reading is not None:
            with own.kept():  # a stream read in this process draws from the same generators
                if stream_state is not None:
                    own.restore(stream_state)
                read = next(self._reading, None)
                stream_state = own.state()
            if read is None:
                return
            yield Read(*read)


def _refuse_differences(step: int, everyone: Sequence[Sequence[int]]) -> None:
    """Raise if the workers have not read the same; each says how much, and if an epoch ends."""
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise DesyncError(
                f"Step {step}: the workers read different data from the stream.",
                f"Rank 0 has {_in_words(*everyone[0])}, rank {rank} {_in_words(*theirs)}.",
                "Let the dataset yield the same samples on every worker: a run deals them itself.",
            )


def _in_words(samples: int, ends_epoch: int) -> str:
    if samples < 0:
        return "none left"
    return f"a batch of {samples}" + (", the last of its epoch" if ends_epoch else "")


class Cut(NamedTuple):
    """How a stream is cut into global batches and shards."""

    shards: int
    global_batch: int
    drop_last: bool


class StreamFetcher(IterableDataset[Any]):
    """The stream as global batches, of which this worker's shards are put together."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        cut: Cut,
        mine: range,
        skipped: int,
        seed: tuple[int, int],
    ) -> None:
        """`mine` are the worker's shards; `skipped` batches were trained on before."""
        self._dataset, self._collate, self._seed = dataset, collate_fn, seed
        self._cut, self._mine, self._skipped = cut, mine, skipped

    def __iter__(self) -> Iterator[Read]:
        Generators().seed(self._seed[0], "stream", self._seed[1])
        cut, samples = self._cut, iter(self._dataset)
        for _ in islice(samples, self._skipped * cut.global_batch):
            pass
        batch = list(islice(samples, cut.global_batch))
        while batch and not (cut.drop_last and len(batch) < cut.global_batch):
            # Read ahead: whether a batch is the last of its epoch shows only in the next.
            following = list(islice(samples, cut.global_batch))
            is_last = len(following) < (cut.global_batch if cut.drop_last else 1)
            parts = [(number, batch[number :: cut.shards]) for number in self._mine]
            shards = [(number, len(part), self._collate(part)) for number, part in parts if part]
            yield Read(len(batch), is_last, shards)
            batch = following
