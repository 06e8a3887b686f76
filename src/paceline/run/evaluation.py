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

from paceline.comm import tree
from paceline.errors import UsageError, check_choice, check_whole
from paceline.run.config import Collate
from paceline.run.context import StepContext
from paceline.run.loader import ShardFetcher, make_loader
from paceline.run.metrics import Metrics, Number, Sums, gather
from paceline.run.plan import Shard

Score = Callable[[Any], Mapping[str, Number | tuple[Number, Number]]]
"""Takes a batch; gives, by name, a mean or a sum, alone or with the number of its items."""

_ADVICE = 'Return means by name, such as {"accuracy": (out.argmax(1) == y).float().mean()}.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is to be scored, and how it is loaded."""

    dataset: Any
    batch: int
    collate_fn: Collate
    workers: int
    step: int
    reduction: str | None
    """Whether scores are means or sums; None where they have no counts and so are means."""

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, ("mean", "sum", None))
        check_whole("batch", self.batch)

    def run(self, score: Score, context: StepContext) -> Sums:
        """The sums and counts of all workers, by name; every worker calls this."""
        generators, seed, device = context.generators, context.config.seed, context.device
        metrics = Metrics(lambda _report, _sums: None)
        add = metrics.add_sum if self.reduction == "sum" else metrics.add
        with generators.kept(), _in_evaluation_mode(context.module), torch.no_grad():
            for number, rows, batch in self._batches(context):
                if device.type != "cpu":
                    batch = tree.map_tensors(lambda t: t.to(device, non_blocking=True), batch)
                generators.seed(seed, "evaluation", self.step, number)
                for name, value, items in self._checked(score(batch), rows):
                    add(name, value, items)
                metrics.end_step(None)
        return gather(context.membership, metrics.take_epoch(), "Adding up the evaluation")

    def _batches(self, context: StepContext) -> Iterator[tuple[int, int, Any]]:
        """One worker's batches of the dataset in its own order: number, samples, batch."""
        rank, size, batch = context.membership.rank, context.size, self.batch
        if not (isinstance(self.dataset, Sized) and hasattr(self.dataset, "__getitem__")):
            samples = iter(self.dataset)
            for number in count():
                if not (part := list(islice(samples, batch))):
                    return
                if number % size == rank:
                    yield number, len(part), self.collate_fn(part)
        total = len(self.dataset)
        numbers = range(rank, -(-total // batch), size)
        cuts = [range(number * batch, min((number + 1) * batch, total)) for number in numbers]
        shards = [Shard(self.step, -1, n, list(c)) for n, c in zip(numbers, cuts, strict=True)]
        # The dataset keeps the epoch that it was told in training.
        fetcher = ShardFetcher(self.dataset, context.config.seed, tells_epoch=False)
        loader = make_loader(fetcher, context.loading(self.workers), self.collate_fn, shards)
        yield from zip(numbers, map(len, cuts), loader, strict=True)

    def _checked(self, scores: Any, rows: int) -> Iterator[tuple[str, Number, Number]]:
        """Name, value and number of items of each score of a batch of `rows` samples."""
        if not isinstance(scores, Mapping):
            raise UsageError(f"The scores are a {type(scores).__name__}.", advice=_ADVICE)
        for name, score in scores.items():
            match score:
                case int() | float() | Tensor():
                    yield name, score, rows
                case [int() | float() | Tensor(), int() | float() | Tensor()] if self.reduction:
                    value, items = score
                    # A mean over nothing is NaN, and says nothing.
                    yield name, value if self.reduction == "sum" or items else 0.0, items
                case [_, _]:
                    raise UsageError(
                        f"The score {name!r} comes with a count, and nobody says whether it is a "
                        "mean or a sum.",
                        advice='Pass reduction="mean" or reduction="sum" to run.evaluate().',
                    )
                case _:
                    raise UsageError(
                        f"The score {name!r} is a {type(score).__name__}, and not a number with or "
                        "without the number of its items.",
                        advice=_ADVICE,
                    )


@contextmanager
def _in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Inside, every layer is in evaluation mode; afterwards each is in the mode it was in."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.training = True
