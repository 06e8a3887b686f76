"""Evaluation: every sample counted once, at any number of workers.

The dataset is cut into batches that do not depend on the workers; rank r of W takes batches r,
r + W and so on. Each gives sums and counts; those are added up over all batches and all workers,
and divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from paceline import comm
from paceline.comm import tree
from paceline.errors import UsageError
from paceline.run.loader import Collate, Shard, ShardFetcher, as_it_is
from paceline.run.metrics import Metrics, Sums, merge
from paceline.run.seeds import Generators, derive

Score = Callable[[Any], Mapping[str, tuple[float | Tensor, float | Tensor]]]
"""Takes a batch; gives, by name, a sum and over how many items it is."""

_ADVICE = 'Return sums and counts by name, such as {"accuracy": (correct, len(y))}.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is to be scored, and how it is loaded."""

    dataset: Any
    batch: int
    collate_fn: Collate | None
    loading: dict[str, Any]
    seed: int
    step: int

    def __post_init__(self) -> None:
        if type(self.batch) is not int or self.batch < 1:
            raise UsageError(
                f"batch is {self.batch!r}.", advice="Pass a whole number from 1 up, or None."
            )

    def run(
        self,
        score: Score,
        module: nn.Module,
        group: Any,
        generators: Generators,
        word_device: torch.device,
    ) -> Sums:
        """The sums and counts of all workers, by name; every worker calls this."""
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        metrics = Metrics(lambda _facts, _sums: None)
        with generators.kept(), in_evaluation_mode(module), torch.no_grad():
            for number, batch in self._batches(group.rank(), group.size()):
                if device.type != "cpu":
                    batch = tree.map_tensors(lambda t: t.to(device, non_blocking=True), batch)
                generators.seed(derive(self.seed, "evaluation", self.step, number))
                for name, (total, rows) in _checked(score(batch)).items():
                    metrics.add_sum(name, total, rows)
                metrics.end_step({})
        return gather(group, metrics.take_epoch(), word_device, "Adding up the evaluation")

    def _batches(self, rank: int, size: int) -> Iterator[tuple[int, Any]]:
        """One worker's batches of the dataset in its own order, each with its number."""
        collate, batch = self.collate_fn or default_collate, self.batch
        if not (isinstance(self.dataset, Sized) and hasattr(self.dataset, "__getitem__")):
            samples = iter(self.dataset)
            for number in count():
                if not (part := list(islice(samples, batch))):
                    return
                if number % size == rank:
                    yield number, collate(part)
        total = len(self.dataset)
        numbers = range(rank, -(-total // batch), size)
        cuts = [range(number * batch, min((number + 1) * batch, total)) for number in numbers]
        shards = [Shard(self.step, -1, n, list(c)) for n, c in zip(numbers, cuts, strict=True)]
        loader: DataLoader[Any] = DataLoader(
            _Evaluated(self.dataset, self.seed, collate),
            sampler=shards,
            batch_size=None,
            collate_fn=as_it_is,
            generator=torch.Generator(),
            **self.loading,
        )
        yield from zip(numbers, loader, strict=True)


def gather(group: Any, sums: Sums, word_device: torch.device, what: str) -> Sums:
    """The sums of all workers, added in rank order and so equal everywhere to the last bit."""
    if group.size() == 1:
        return sums
    added: Sums = {}
    plain = {name: [repr(total), repr(count)] for name, (total, count) in sums.items()}
    for theirs in comm.exchange(group, plain, word_device, what):
        merge(added, {name: [float(t), float(c)] for name, (t, c) in theirs.items()})
    return added


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
