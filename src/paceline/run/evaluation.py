"""Evaluation: every sample counted once, at any number of workers.

The dataset is cut into batches that do not depend on the workers; rank r of W takes batches r,
r + W and so on. Each gives means or sums and over how many items they are; sums and counts are
added up over all batches and all workers, and divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.files import Files
from paceline.errors import UsageError, check_choice, check_whole
from paceline.run.config import Collate
from paceline.run.context import StepContext
from paceline.run.loader import ShardFetcher, make_loader
from paceline.run.metrics import Metrics, Number, Sums
from paceline.run.plan import Shard
from paceline.update import WeightAverage

Score = Callable[[Any], Mapping[str, Number | tuple[Number, Number]]]
"""Takes a batch; gives, by name, a mean or a sum, alone or with the number of its items."""

_ADVICE = (
    'Return means by name, such as {"accuracy": (out.argmax(1) == y).float().mean()}; or pairs '
    'with the number of items, and pass reduction="mean" or reduction="sum" to run.evaluate().'
)


def evaluate(
    context: StepContext,
    score: Score,
    dataset: Any,
    *,
    batch: int,
    collate_fn: Collate,
    workers: int,
    step: int,
    reduction: str | None,
    average: WeightAverage | None,
) -> Sums:
    """The sums and counts of this worker's share, by name; of the averaged weights, if given.

    `reduction` is None where scores have no counts, and so are means over samples.
    """
    check_choice("reduction", reduction, ("mean", "sum", None))
    check_whole("batch", batch)
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        batches = _load(context, dataset, batch, collate_fn, workers, step)
    else:
        batches = _read(context, dataset, batch, collate_fn)
    metrics = Metrics(lambda _report, _sums: None)
    add = metrics.add_sum if reduction == "sum" else metrics.add
    weights: AbstractContextManager[None] = nullcontext()
    prefix = ""
    if average is not None:
        weights, prefix = average.in_use(), "ema_"
    kept, mode = context.generators.kept(), _in_evaluation_mode(context.module)
    with kept, mode, weights, torch.no_grad(), context.precision.forward:
        for number, rows, each in batches:
            if context.device.type != "cpu":
                each = context.to_device(each)
            context.generators.seed(context.config.seed, "evaluation", step, number)
            for name, value, items in _checked(score(each), rows, reduction):
                add(prefix + name, value, items)
            metrics.end_step(None)
    return metrics.sums_of_epoch()


def _load(
    context: StepContext, dataset: Any, batch: int, collate_fn: Collate, workers: int, step: int
) -> Iterator[tuple[int, int, Any]]:
    """One worker's batches of the dataset in its own order: number, samples, batch."""
    total = len(dataset)
    rank, size, batches = context.membership.rank, context.size, -(-total // batch)
    numbers = range(rank, batches, size)
    if isinstance(dataset, Files):  # neighbours, so that nobody skips what others read
        numbers = range(batches * rank // size, batches * (rank + 1) // size)
        workers = min(workers, 1)

    def cut(number: int) -> range:
        return range(number * batch, min((number + 1) * batch, total))

    shards = (Shard(step, -1, number, list(cut(number))) for number in numbers)
    # The dataset keeps the epoch that it was told in training.
    fetcher = ShardFetcher(dataset, context.config.seed, tells_epoch=False)
    loader = make_loader(fetcher, context.loading(workers), collate_fn, shards)
    for number, each in zip(numbers, loader, strict=True):
        yield number, len(cut(number)), each


def _read(
    context: StepContext, dataset: Any, batch: int, collate_fn: Collate
) -> Iterator[tuple[int, int, Any]]:
    """The same of a stream, all of which every worker reads."""
    samples = iter(dataset)
    for number in count():
        if not (part := list(islice(samples, batch))):
            return
        if number % context.size == context.membership.rank:
            yield number, len(part), collate_fn(part)


def _checked(scores: Any, rows: int, reduction: str | None) -> Iterator[tuple[str, Number, Number]]:
    """Name, value and number of items of each score of a batch of `rows` samples."""
    if not isinstance(scores, Mapping):
        raise UsageError(f"The scores are a {type(scores).__name__}.", advice=_ADVICE)
    for name, score in scores.items():
        match score:
            case int() | float() | Tensor():
                yield name, score, rows
            case [int() | float() | Tensor(), int() | float() | Tensor()] if reduction:
                value, items = score
                # A mean over nothing is NaN, and says nothing.
                yield name, value if reduction == "sum" or items else 0.0, items
            case _:
                raise UsageError(
                    f"The score {name!r} is {score!r:.60}, and not a number; or it comes with a "
                    "count, and nobody says whether it is a mean or a sum.",
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
