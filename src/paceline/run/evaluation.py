"""Evaluation: every sample counted once, at any number of workers.

The dataset is cut into batches that do not depend on the workers; rank r of W takes batches r,
r + W and so on. Each gives sums and counts; those are added up over all batches and all workers,
and divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from paceline import comm, tree
from paceline.errors import UsageError
from paceline.run.loader import Collate, Shard, ShardFetcher, as_it_is
from paceline.run.metrics import Metrics, Sums, merge
from paceline.run.seeds import Generators, derive

Score = Callable[[Any], Mapping[str, tuple[float | Tensor, float | Tensor]]]
"""Takes a batch; gives, by name, a sum and over how many items it is."""

_ADVICE = 'Return sums and counts by name, such as {"accuracy": (correct, len(y))}.'


def add_up(
    score: Score,
    batches: Iterator[tuple[int, Any]],
    *,
    module: nn.Module,
    device: torch.device,
    generators: Generators,
    seed: int,
    step: int,
) -> Sums:
    """This worker's sums over its numbered batches, in evaluation mode, drawing nothing."""
    totals: list[Sums] = []
    sums = Metrics(lambda _, each: totals.append(each))
    with generators.kept(), in_evaluation_mode(module), torch.no_grad():
        for number, batch in batches:
            if device.type != "cpu":
                batch = tree.map_tensors(lambda t: t.to(device, non_blocking=True), batch)
            generators.seed(derive(seed, "evaluation", step, number))
            for name, pair in _checked(score(batch)).items():
                total, count = pair
                # As a mean over one item: the count may be on the device too.
                sums.add(f"{name}/sum", total, 1.0)
                sums.add(f"{name}/count", count, 1.0)
            sums.end_step({})
        sums.flush(wait=True)
    added: Sums = {}
    for each in totals:
        names = [key.removesuffix("/sum") for key in each if key.endswith("/sum")]
        merge(added, {n: [each[f"{n}/sum"][0], each[f"{n}/count"][0]] for n in names})
    return added


def gather(group: Any, sums: Sums, word_device: torch.device, what: str) -> Sums:
    """The sums of all workers, added in rank order and so equal everywhere to the last bit."""
    if group.size() == 1:
        return sums
    added: Sums = {}
    plain = {name: [repr(total), repr(count)] for name, (total, count) in sums.items()}
    for theirs in comm.exchange(group, plain, word_device, what):
        merge(added, {name: [float(t), float(c)] for name, (t, c) in theirs.items()})
    return added


def numbered_batches(
    dataset: Any,
    *,
    batch: int,
    rank: int,
    size: int,
    seed: int,
    step: int,
    collate_fn: Collate | None,
    loading: dict[str, Any],
) -> Iterator[tuple[int, Any]]:
    """This worker's batches of the dataset in its own order, each with its number."""
    collate = collate_fn or default_collate
    if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        samples, number = iter(dataset), 0
        while part := list(islice(samples, batch)):
            if number % size == rank:
                yield number, collate(part)
            number += 1
        return
    total = len(dataset)
    numbers = range(rank, -(-total // batch), size)
    shards = [
        Shard(step, -1, number, list(range(number * batch, min((number + 1) * batch, total))))
        for number in numbers
    ]
    loader: DataLoader[Any] = DataLoader(
        _Evaluated(dataset, seed, collate),
        sampler=shards,
        batch_size=None,
        collate_fn=as_it_is,
        generator=torch.Generator(),
        **loading,
    )
    yield from zip(numbers, loader, strict=True)


class _Evaluated(ShardFetcher):
    """Reads shards as training does, and leaves the dataset's epoch alone."""

    def __getitem__(self, shard: Shard) -> Any:
        self._epoch = shard.epoch
        return super().__getitem__(shard)


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Inside, every layer is in evaluation mode; afterwards each is in the mode it was in."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


def _checked(scores: Any) -> Mapping[str, Any]:
    if not isinstance(scores, Mapping):
        raise UsageError(f"The scores are a {type(scores).__name__}.", advice=_ADVICE)
    for name, pair in scores.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise UsageError(
                f"The score {name!r} is a {type(pair).__name__}, not a sum and a count.",
                advice=_ADVICE,
            )
    return scores
