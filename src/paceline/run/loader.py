"""From samples to this worker's batches: loaded ahead, in order, with their own random numbers.

One `DataLoader` serves the whole run, across epochs, so that its workers start once. What it is
asked for are shards, not samples: a worker that loads a shard seeds its generators first, so that
augmentation does not depend on how many processes load.

A stream has no indices, so its samples cannot be dealt before they are read: every worker reads all
of it and keeps what belongs to its shards. That is exact at any number of workers, in mid-epoch
too, as long as it yields the same samples in the same order whenever it is asked.

Whether all workers read the same samples is looked at once, before the first step: a few of them
are summed up, and the summaries compared.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from ctypes import string_at
from dataclasses import replace
from functools import partial
from itertools import count, islice, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data import (
    DealtFiles,
    Files,
    Generators,
    Lanes,
    OrderName,
    Plan,
    Portion,
    Position,
    Shard,
    check_batch,
    choose_order,
    shards_of,
)
from paceline.ddp import in_tree_order
from paceline.errors import DesyncError, UsageError
from paceline.group import Membership, all_gather, named_leaves
from paceline.run.config import Collate, RunConfig
from paceline.run.forks import LivingBatches, living_context
from paceline.run.loader_signals import LoaderSignals


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
    check_batch(config.global_batch, shards)
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
    cut: dict[str, Any] = {"global_batch": config.global_batch, "shards": shards}
    cut |= {"seed": config.seed, "shuffle": options.shuffle, "drop_last": options.drop_last}
    lanes = None
    if isinstance(dataset, Files):
        if options.order != "auto":
            raise UsageError(
                f"order is {options.order!r}, and files are read one after the other.",
                advice='Leave order="auto"; Files(window=) says how far samples are shuffled.',
            )
        lanes = Lanes(counts=dataset.counts, lanes=dataset.lanes, window=dataset.window, **cut)
        order = None
    return Plan(
        samples=samples,
        epochs=config.epochs,
        order=order or choose_order(samples),
        lanes=lanes,
        merge_shards=options.merge_shards,
        arrange=in_tree_order if options.same_bits else None,
        audits=audits if options.audit else None,
        **cut,
    )


class MapLoader:
    """A worker's batches of a dataset with indices, from one step on to the end of the run."""

    first_rank = 0

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
        self.queue: LivingBatches | None = None
        """Where the batches wait that other processes have loaded; None without such processes."""

    def portions(self, done: Position) -> Iterator[Portion]:
        """What this worker of the current generation computes in every step after `done`."""
        members = self._membership
        portions = self._plan.portions(done.step, members.rank, members.size)
        # The loader runs ahead of the steps, by as much as its processes prefetch.
        ahead, now = tee(portions)
        shards = (shard for portion in ahead for shard in (*portion.audited, *portion.shards))
        loading, plan = self._loading, self._plan
        if plan.lanes is not None:
            mine = len(shards_of(members.rank, members.size, plan.shards))
            workers = plan.lanes.processes(
                loading["num_workers"], mine, is_merged=plan.merge_shards
            )
            loading = {**loading, "num_workers": workers}
        make = partial(make_loader, self._fetcher, loading, self._collate)
        self.queue = LivingBatches(make, shards) if loading["num_workers"] else None
        self._batches = self.queue or iter(make(shards))
        return now

    def cut_into(self, shards: int) -> None:
        self._plan = replace(self._plan, shards=shards)

    def load(self, shard: Shard) -> Any:
        """The batch of the next shard: they come in the order of the portions."""
        if self._batches is None:
            raise UsageError(
                f"Step {shard.step} belongs to a loop that is over.",
                advice="Keep the iterator: `for step in run: with step: ...`.",
            )
        return next(self._batches)

    def close(self, *, at_once: bool = False) -> None:
        """Let the loader's processes go; `at_once` does not wait for what they load."""
        if at_once and self.queue is not None:
            self.queue.end()
        self._batches = self.queue = None


class ShardFetcher(Dataset[Any]):
    """A dataset whose index is a shard, and whose item is the list of the shard's samples."""

    def __init__(self, dataset: Any, seed: int, *, tells_epoch: bool = True) -> None:
        self._dataset, self._seed = dataset, seed
        self._tells_epoch, self._epoch = tells_epoch, -1
        self._generators = Generators()

    def __getitem__(self, shard: Any) -> Any:
        if shard.epoch != self._epoch and self._tells_epoch:
            self._enter_epoch(shard.epoch)
        self._generators.seed(self._seed, "data", shard.step, shard.number)
        several = getattr(self._dataset, "__getitems__", None)
        return _call(several if callable(several) else self._one_by_one, shard.indices)

    def _one_by_one(self, indices: Sequence[int]) -> list[Any]:
        # Not list(map(...)), which takes a `StopIteration` of the dataset for the end of the list.
        get = self._dataset.__getitem__
        return [get(index) for index in indices]

    def _enter_epoch(self, epoch: int) -> None:
        # Here and not in the training process, whose dataset may be another copy.
        self._epoch = epoch
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)


def _call(function: Callable[[Any], Any], argument: Any) -> Any:
    """What it returns; its `StopIteration` would end a loop that reads batches without a word."""
    try:
        return function(argument)
    except StopIteration as error:
        raise UsageError(
            "The dataset or collate_fn raised StopIteration, as next() does after the last item.",
            advice="Have the dataset read a sample by its index, or make it an IterableDataset.",
        ) from error


def loading(pins: bool, prefetch: int, signals: LoaderSignals, workers: int) -> dict[str, Any]:
    """Settings for a `DataLoader` with so many processes."""
    settings: dict[str, Any] = {"num_workers": workers, "pin_memory": pins}
    if workers > 0:
        settings |= {"prefetch_factor": prefetch, "worker_init_fn": signals.on_start}
    return settings


def make_loader(
    dataset: Any, loading: dict[str, Any], collate_fn: Collate, shards: Iterable[Any] | None = None
) -> DataLoader[Any]:
    """A `DataLoader` of whole batches that leaves the generators of this process alone."""
    return DataLoader(
        dataset,
        sampler=shards,
        batch_size=None,
        collate_fn=partial(_call, collate_fn),
        generator=torch.Generator(),
        multiprocessing_context=living_context() if loading["num_workers"] else None,
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

    first_rank = 0

    def __init__(
        self, config: RunConfig, shards: int, membership: Membership, loading: dict[str, Any]
    ) -> None:
        self._config, self._shards, self._membership = config, shards, membership
        # Several processes would each read a stream of their own.
        self._loading = {**loading, "num_workers": min(loading["num_workers"], 1)}
        self._batches: dict[int, Any] = {}
        self._reading: LivingBatches | None = None
        self.queue: LivingBatches | None = None

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

    def cut_into(self, shards: int) -> None:
        self._shards = shards

    def load(self, shard: Shard) -> Any:
        return self._batches.pop(shard.number)

    def close(self, *, at_once: bool = False) -> None:
        if at_once and self.queue is not None:
            self.queue.end()
        self._reading = self.queue = None

    def _read(self, epoch: int, skipped: int, step: int) -> Iterator[Read]:
        """One epoch from its batch `skipped` on, of which every worker has read as much."""
        config, members = self._config, self._membership
        mine = shards_of(members.rank, members.size, self._shards)
        loading, shards = self._loading, self._shards

        def make(batches: Iterator[int]) -> Any:
            stream = StreamFetcher(
                config.dataset,
                config.collate_fn,
                mine,
                shards=shards,
                global_batch=config.global_batch,
                drop_last=config.options.drop_last,
                skipped=next(batches),
                seed=(config.seed, epoch),
            )
            return make_loader(stream, loading, _as_it_is)

        self._reading = LivingBatches(make, count(skipped))
        self.queue = self._reading if loading["num_workers"] else None
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


LONGEST_S = 0.5
"""A dataset that takes longer for a sample is not read any further when workers compare."""
_MOST_LEAVES, _MOST_ELEMENTS = 8, 2**22
_ROUGHLY = 0.01

Leaf = tuple[str, str, list[float]]
"""Where in the sample, what is compared exactly there, and what roughly."""


def sum_up_samples(
    dataset: Any, size: int, seed: int, processes: int, *, tells_epoch: bool = True
) -> dict[str, Any]:
    """The first, the middle and the last sample, by index; not where two reads of it differ."""
    # A run deals indices, so the sample of an index must be the same one on every worker. What
    # differs between two reads of one worker, with the same random numbers, is not compared. Real
    # numbers are compared roughly, because machines of different kinds round, resample and decode
    # differently; everything else exactly. A loader process reads them if one reads all: what a
    # dataset opens in the process that reads is not to be shared with it.
    settings = {"num_workers": min(processes, 1)}
    reader = _TwoReads(dataset, seed, tells_epoch=tells_epoch)
    indices = sorted({0, size // 2, size - 1})
    found: dict[str, Any] = {}
    with Generators().kept(), suppress(Exception):  # such as of samples that are in themselves
        found = next(iter(make_loader(reader, settings, _as_it_is, [indices])))
    return found


class _TwoReads(ShardFetcher):
    """A dataset whose item is a summary of some samples."""

    def __getitem__(self, indices: Any) -> dict[str, list[Leaf]]:
        if self._tells_epoch:
            self._enter_epoch(0)
        one, several = self._dataset.__getitem__, getattr(self._dataset, "__getitems__", None)
        reads: list[Any] = []
        with suppress(Exception):  # it will be raised where the script can see it, in the loop
            for index in indices:
                begin_s = time.monotonic()
                for _ in range(2):
                    self._generators.seed(self._seed, "data", 0, 0)
                    reads.append(several([index])[0] if callable(several) else one(index))
                if time.monotonic() - begin_s > LONGEST_S:
                    break
        leaves = [named_leaves(sample, "sample") for sample in reads]
        summaries = [list(islice(_sum_up(each), _MOST_LEAVES)) for each in leaves]
        pairs = zip(indices, summaries[::2], summaries[1::2], strict=False)
        return {str(i): one for i, one, two in pairs if _first_difference(one, two) is None}


def _sum_up(leaves: list[tuple[str, Any]]) -> Iterator[Leaf]:
    for path, value in leaves:
        if isinstance(value, Tensor) or hasattr(value, "__array_interface__"):
            tensor = torch.as_tensor(value)
            flat = tensor.detach().reshape(-1)[:_MOST_ELEMENTS].cpu().contiguous()
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            if tensor.dtype == torch.uint8 or tensor.is_floating_point():
                yield path, kind, _summary(flat.double())
            else:
                # In memory, a view that is conjugated or negated lazily has the bits of its base.
                flat = flat.resolve_conj().resolve_neg()
                yield path, f"{kind} {_hash(string_at(flat.data_ptr(), flat.nbytes))}", []
        elif isinstance(value, float):
            yield path, "float", [value]
        elif isinstance(value, (int, bytes)) or (isinstance(value, str) and os.sep not in value):
            text = repr(value)
            yield path, text if len(text) < 20 else f"{text[:16]}... {_hash(text.encode())}", []


def refuse_other_samples(
    ours: dict[str, Any], theirs: dict[str, Any], where: str, elsewhere: str
) -> None:
    """Raise if two workers read something else under the same index."""
    for index in sorted(ours.keys() & theirs.keys(), key=int):
        if (place := _first_difference(ours[index], theirs[index])) is not None:
            raise DesyncError(
                f"Sample {index} of the dataset is not the same {where} and {elsewhere}.",
                f"First difference: {place}.",
                "Build the dataset from the same files on every worker, and from seeded random "
                "numbers (paceline.seed_everything(0) before it): a run deals the samples itself.",
            )


def _summary(flat: Tensor) -> list[float]:
    """Means and some elements; fewer digits than would make a long message."""
    if not flat.numel():
        return []
    some = flat[:: max(1, flat.numel() // 4)][:4].tolist()
    return [float(f"{x:.6g}") for x in [flat.mean().item(), flat.abs().mean().item(), *some]]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    """Where two samples are not the same, in words."""
    for one, two in zip(ours, theirs, strict=False):
        (path, kind, numbers), (other_path, other_kind, others) = one, two
        if (path, kind, len(numbers)) != (other_path, other_kind, len(others)):
            return f"{path} is {kind} in the one, {other_path} is {other_kind} in the other"
        scale = _ROUGHLY * max(map(abs, [*numbers, *others]), default=0.0)
        for a, b in zip(numbers, others, strict=True):
            if abs(a - b) > scale or (a != a) != (b != b):
                return f"{path}, which is {kind}, has {a:g} in the one and {b:g} in the other"
    if len(ours) != len(theirs):
        return f"{len(ours)} parts in the one and {len(theirs)} in the other"
    return None
