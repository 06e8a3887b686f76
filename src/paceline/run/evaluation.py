"""Evaluation: every sample counted once, at any number of workers.

The dataset is cut into batches that do not depend on the workers; rank r of W takes batches r,
r + W and so on. Each gives means or sums and over how many items they are; sums and counts are
added up over all batches and all workers, and divided once. What is no mean, such as an AUC, is
computed by rank 0 from the predictions of all, put back into the order of the dataset.

What score functions and encoders return has one item per sample: a tensor or a list, or a tuple or
dictionary of such. It is put together for all batches and handed to a function, a tuple as its
arguments and a dictionary as its named ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data import Files, Shard
from paceline.errors import DesyncError, UsageError, check_choice, check_whole, shown
from paceline.files import decode, encode
from paceline.group import gather_bytes, map_tensors
from paceline.run.config import Collate, check_dataset
from paceline.run.forks import LivingBatches
from paceline.run.loader import ShardFetcher, make_loader, refuse_other_samples, sum_up_samples
from paceline.run.metrics import ExactSums, Metrics, Number, add_all, means, round_sum
from paceline.run.parts import RunParts
from paceline.run.same_bits import fixed_arithmetic
from paceline.telemetry import Summary


def check_rows(value: Any, rows: int, who: str) -> None:
    """Refuse what has not one item per sample of a batch of `rows`; `who` returned it."""
    for leaf in value.values() if isinstance(value, dict) else _arguments(value):
        if not isinstance(leaf, Tensor | list) or (isinstance(leaf, Tensor) and not leaf.dim()):
            problem = f"returned {shown(leaf, 60)}"
        elif len(leaf) != rows:
            problem = f"returned {len(leaf)} items for a batch of {rows} samples"
        else:
            continue
        raise UsageError(
            f"{who} {problem}.",
            advice="Return tensors or lists with one item per sample, alone, in a tuple or in a "
            "dictionary, such as (out.softmax(1), y).",
        )


def join(parts: list[Any]) -> Any:
    """The values of all samples, from those of batches."""
    match parts[0]:
        case dict():
            return {name: join([part[name] for part in parts]) for name in parts[0]}
        case tuple():
            return tuple(join(list(items)) for items in zip(*parts, strict=True))
        case Tensor():
            return torch.cat(parts)
    return [item for part in parts for item in part]


def call(function: Callable[..., Any], value: Any) -> Any:
    """What the function makes of the values of all samples."""
    if isinstance(value, dict):
        return function(**value)
    return function(*_arguments(value))


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


Score = Callable[[Any], Mapping[str, Number | tuple[Number, Number]]]
"""Takes a batch; gives, by name, a mean or a sum, alone or with the number of its items."""

Collect = Any
"""A function of all predictions that gives numbers by name, or an object of torchmetrics."""
SAMPLES = ""
"""The name under which the sums hold how many samples were scored."""

_ADVICE = (
    'Return means by name, such as {"accuracy": (out.argmax(1) == y).float().mean()}; or pairs '
    'with the number of items, and pass reduction="mean" or reduction="sum" to run.evaluate().'
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The arguments of `Run.evaluate`; None is what a run has for it."""

    score: Any
    dataset: Any
    reduction: str | None
    """None where scores have no counts, and so are means over samples."""
    batch: int | None
    collate_fn: Collate | None
    loader_workers: int
    ema: bool
    collect: Collect | None


def evaluate(parts: RunParts, wanted: Evaluation) -> dict[str, float]:
    """The scores of all workers together, kept and told."""
    begin_s = time.perf_counter()
    config, position = parts.config, parts.progress.position
    if not callable(wanted.score):
        kind = type(wanted.score).__name__
        raise UsageError(
            f"run.evaluate() takes a function that scores a batch, not {kind}.",
            advice="Call run.evaluate(score, dataset).",
        )
    if wanted.ema and parts.training.average is None:
        raise UsageError(
            "run.evaluate(ema=True) was called in a run that averages no weights.",
            advice="Pass ema=0.999 in RunOptions.",
        )
    if wanted.dataset is None and config.dataset is None:
        raise UsageError(
            "There is no dataset to evaluate on: this run has a loader.",
            advice="Pass one to run.evaluate(), of which every worker takes its share.",
        )
    if wanted.batch is None:  # once: who tries again scores the same batches
        wanted = replace(wanted, batch=-(-config.global_batch // parts.progress.shards))

    def task() -> list[Any]:
        return [score_share(parts, wanted, position.step), _sum_up(parts, wanted)]

    with fixed_arithmetic() if config.options.same_bits else nullcontext():
        everyone = parts.exchanges.exchange(task, "Adding up the evaluation")
    _refuse_other_datasets([dataset for _, dataset in everyone])
    total = add_all([sums for sums, _ in everyone])
    samples = int(round_sum(total.pop(SAMPLES)[1]))
    scores = means(total)
    if parts.recovery.step_abandoned:
        return scores  # of a step that is done again, and then for all to see
    parts.progress.scores |= scores
    # After the last step of an epoch the next one has begun, but has nothing to show yet.
    epoch = max(position.epoch - (position.step_of_epoch == 0), 0)
    seconds = time.perf_counter() - begin_s
    summary = Summary(epoch, position.step, scores, seconds, samples)
    parts.outlets.sinks.tell("evaluation", summary)
    return scores


def _sum_up(parts: RunParts, wanted: Evaluation) -> tuple[int, dict[str, Any]] | None:
    """What all workers should have alike: the length of the dataset, and some of its samples when
    one of this length is evaluated for the first time."""
    dataset, config, seen = wanted.dataset, parts.config, parts.feed.evaluated
    is_alone = parts.place.membership.size == 1 or parts.recovery.step_abandoned
    if is_alone or not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
        return None
    size = len(dataset)
    if size in seen or isinstance(dataset, Files):
        return size, {}
    seen.add(size)
    # It may be the one that is trained on, which keeps its epoch.
    processes = wanted.loader_workers
    return size, sum_up_samples(dataset, size, config.seed, processes, tells_epoch=False)


def _refuse_other_datasets(everyone: Sequence[Any]) -> None:
    """Raise if workers do not evaluate the same dataset, of which each scores its share."""
    for rank, theirs in enumerate(everyone):
        if theirs is None or everyone[0] is None:
            continue
        (size, samples), (others, their_samples) = everyone[0], theirs
        if size != others:
            raise DesyncError(
                f"The dataset to evaluate has {size} samples on rank 0, and {others} on rank "
                f"{rank}.",
                advice="Pass the whole dataset on every worker: each of them scores its share.",
            )
        refuse_other_samples(samples, their_samples, "on rank 0", f"on rank {rank}")


def score_share(parts: RunParts, wanted: Evaluation, step: int) -> ExactSums:
    """The sums and counts of this worker's share, by name.

    With `collect` the scores are predictions, and rank 0's sums are what it makes of all of them.
    """
    config, members, recovery = parts.config, parts.place.membership, parts.recovery
    # A worker whose step was abandoned scores all of it, so that its script sees the same numbers.
    rank, size = (0, 1) if recovery.step_abandoned else (members.rank, members.size)
    score, reduction, collect = wanted.score, wanted.reduction, wanted.collect
    check_choice("reduction", reduction, ("mean", "sum", None))
    batch: Any = wanted.batch
    check_whole("batch", batch)
    dataset = config.dataset if wanted.dataset is None else wanted.dataset
    check_dataset(dataset, "Pass what the loader reads; batch= and collate_fn= make batches of it.")
    collate_fn = wanted.collate_fn or config.collate_fn
    if isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"):
        batches = _load(parts, dataset, batch, collate_fn, wanted.loader_workers, step, rank, size)
    else:
        batches = _read(dataset, batch, collate_fn, rank, size)
    metrics = Metrics(lambda _report, _sums: None, members)
    add = metrics.add_sum if reduction == "sum" else metrics.add
    weights: AbstractContextManager[None] = nullcontext()
    prefix = ""
    training = parts.training
    if wanted.ema and training.average is not None:
        weights, prefix = training.average.in_use(), "ema_"
    if training.buffers is not None and not recovery.step_abandoned:
        # Buffers that shard 0 changed late are with one worker only; all are to score the same
        # model.
        training.buffers.agree()
    kept, mode = training.generators.kept(), _in_evaluation_mode(training.module)
    buffers = nullcontext() if training.buffers is None else training.buffers.untouched()
    samples, predictions = 0, []
    with kept, mode, buffers, weights, torch.no_grad(), training.precision.forward:
        for number, rows, each in batches:
            if parts.place.device.type != "cpu":
                each = parts.place.to_device(each)
            samples += rows

            def score_rows(start: int, part: Any, number: int = number) -> Any:
                # The first part draws what the whole batch would, so a batch that is not cut is
                # seeded alike.
                key = (number, start) if start else (number,)
                training.generators.seed(parts.config.seed, "evaluation", step, *key)
                return score(part)

            for count_of_rows, found in training.fit.evaluate(score_rows, each, rows):
                if collect is not None:
                    check_rows(found, count_of_rows, "With collect= the score function")
                    predictions.append([number, map_tensors(lambda t: t.detach().cpu(), found)])
                    continue
                for name, value, items in _checked(found, count_of_rows, reduction):
                    add(prefix + name, value, items)
            # As after a step: numbers on a device are read while the next batches are scored.
            metrics.end_step(None)
    sums = {SAMPLES: [[], [float(samples)]], **metrics.sums_of_epoch()}
    if collect is not None:
        every = predictions
        if size > 1:
            what, sent = "Collecting predictions", encode(predictions)
            gathered = gather_bytes(members.group, sent, members.word_device, what)
            every = [each for data in gathered for each in decode(data)] if rank == 0 else []
        if every and rank == 0:
            # By number alone, and stable: parts of one batch, which share it, stay in their order.
            joined = join([rows for _, rows in sorted(every, key=lambda each: each[0])])
            # On rank 0 alone, and once more if a worker dies before all have the numbers.
            with training.generators.kept():
                training.generators.seed(config.seed, "evaluation", step, -1)
                numbers = _call(collect, joined)
            sums |= {prefix + name: [[value], [1.0]] for name, value in numbers.items()}
    return sums


def _call(collect: Collect, predictions: Any) -> dict[str, float]:
    """What `collect` makes of all predictions: numbers by name."""
    if all(hasattr(collect, name) for name in ("update", "compute", "reset")):  # torchmetrics
        collect.reset()
        call(collect.update, predictions)
        found = collect.compute()
        collect.reset()
        if isinstance(found, Tensor):
            found = {type(collect).__name__: found}
    else:
        found = call(collect, predictions)
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"collect= gave {shown(found)}, and not numbers by name.",
            advice='Return a dictionary, such as {"auc": roc_auc_score(y, p)}.',
        ) from None


def _load(
    parts: RunParts,
    dataset: Any,
    batch: int,
    collate_fn: Collate,
    workers: int,
    step: int,
    rank: int,
    size: int,
) -> Iterator[tuple[int, int, Any]]:
    """One worker's batches of the dataset in its own order: number, samples, batch."""
    total = len(dataset)
    batches = -(-total // batch)
    numbers = range(rank, batches, size)
    if isinstance(dataset, Files):  # neighbours, so that no worker skips what others read
        numbers = range(batches * rank // size, batches * (rank + 1) // size)
        workers = min(workers, 1)

    def cut(number: int) -> range:
        return range(number * batch, min((number + 1) * batch, total))

    shards = (Shard(step, -1, number, list(cut(number))) for number in numbers)
    # The dataset keeps the epoch that it was told in training.
    fetcher = ShardFetcher(dataset, parts.config.seed, tells_epoch=False)
    loading = parts.feed.loading(workers)
    loaded = LivingBatches(lambda left: make_loader(fetcher, loading, collate_fn, left), shards)
    for number, each in zip(numbers, loaded, strict=True):
        yield number, len(cut(number)), each


def _read(
    dataset: Any, batch: int, collate_fn: Collate, rank: int, size: int
) -> Iterator[tuple[int, int, Any]]:
    """The same of a stream, all of which every worker reads."""
    samples = iter(dataset)
    for number in count():
        if not (part := list(islice(samples, batch))):
            return
        if number % size == rank:
            yield number, len(part), collate_fn(part)


def _checked(scores: Any, rows: int, reduction: str | None) -> Iterator[tuple[str, Number, Number]]:
    """Name, value and number of items of each score of a batch of `rows` samples."""
    if not isinstance(scores, Mapping):
        raise UsageError(f"The scores are {shown(scores)}, not a dictionary.", advice=_ADVICE)
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
                    f"The score {name!r} is {shown(score, 60)}, and not a number; or it comes with "
                    "a count, and it is not said whether it is a mean or a sum.",
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
