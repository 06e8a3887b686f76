"""Evaluation: every sample counted once, at any number of workers.

The dataset is cut into batches that do not depend on the workers; rank r of W takes batches r,
r + W and so on. Each gives means or sums and over how many items they are; sums and counts are
added up over all batches and all workers, and divided once.
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

Number = float | Tensor
Score = Callable[[Any], Mapping[str, Number | tuple[Number, Number]]]
"""Takes a batch; gives, by name, a mean or a sum, alone or with the number of its items."""

_ADVICE = 'Return means by name, such as {"accuracy": (out.argmax(1) == y).float().mean()}.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is to be scored, and how it is loaded."""

    dataset: Any
    batch: int
    collate_fn: Collate | None
    loading: dict[str, Any]
    seed: int
    step: int
    reduction: str | None
    """Whether scores are means or sums; None where they have no counts and so are means."""

    def __post_init__(self) -> None:
        if self.reduction not in (None, "mean", "sum"):
            raise UsageError(f"reduction is {self.reduction!r}.", advice="Use 'mean' or 'sum'.")
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
            for number, rows, batch in self._batches(group.rank(), group.size()):
                if device.type != "cpu":
                    batch = tree.map_tensors(lambda t: t.to(device, non_blocking=True), batch)
                generators.seed(derive(self.seed, "evaluation", self.step, number))
                add = metrics.add_sum if self.reduction == "sum" else metrics.add
                for name, value, items in self._checked(score(batch), rows):
                    add(name, value, items)
                metrics.end_step({})
        return gather(group, metrics.take_epoch(), word_device, "Adding up the evaluation")

    def _batches(self, rank: int, size: int) -> Iterator[tuple[int, int, Any]]:
        """One worker's batches of the dataset in its own order: number, samples, batch."""
        collate, batch = self.collate_fn or default_collate, self.batch
        if not (isinstance(self.dataset, Sized) and hasattr(self.dataset, "__getitem__")):
            samples = iter(self.dataset)
            for number in count():
                if not (part := list(islice(samples, batch))):
                    return
                if number % size == rank:
                    yield number, len(part), collate(part)
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
        yield from zip(numbers, map(len, cuts), loader, strict=True)

    def _checked(self, scores: Any, rows: int) -> Iterator[tuple[str, Number, Number]]:
        """Name, value and number of items of each score of a batch of `rows` samples."""
        if not isinstance(scores, Mapping):
            raise UsageError(f"The scores are a {type(scores).__name__}.", advice=_ADVICE)
        for name, score in scores.items():
            match score:
                case int() | float() | Tensor():
                    yield name, score, rows
                case [int() | float() | Tensor() as value, int() | float() | Tensor() as items]:
                    self._refuse_ambiguous(name)
                    # A mean over nothing is NaN, and says nothing.
                    yield name, value if self.reduction == "sum" or items else 0.0, items
                case _:
                    raise UsageError(
                        f"The score {name!r} is a {type(score).__name__}, and not a number with or "
                        "without the number of its items.",
                        advice=_ADVICE,
                    )

    def _refuse_ambiguous(self, name: str) -> None:
        if self.reduction is None:
            raise UsageError(
                f"The score {name!r} comes with a count, and nobody says whether it is a mean or a "
                "sum.",
                advice='Pass reduction="mean" or reduction="sum" to run.evaluate().',
            )


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
