"""One recorded step of a task on a real engine, and the epochs around it.

Both engines get the same batches: the order of an epoch is a function of the seed. The recorded
step is the one whose batch contains the followed sample, else the first. Without epochs to train it
is the only step.
"""

from __future__ import annotations

import copy
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from paceline.data import DistributedBatchSampler
from paceline.dp import DataParallel
from paceline.errors import UsageError, check_whole
from paceline.group import all_reduce, find_tensors, init_process_group, map_tensors
from paceline.launcher import launch
from paceline.record import (
    Epoch,
    SamplePrediction,
    Stage,
    StepRecording,
    Trace,
    find_weight,
    from_json,
    record_step,
    to_json,
    trained_parameters,
)
from paceline.show.trace.prediction import observe, trace_prediction
from paceline.show.trace.preparation import place_replicas, wrap_on_worker
from paceline.show.trace.task import Task
from paceline.telemetry import seconds_text

FIRST_STEPS, TIMED_STEPS = 3, 7
PREDICTION_STAGES = {"sampler", "batch", "split", "forward", "gather"}
"""The stages of a step that also belong to a prediction."""
BUSY = 2
"""If the slowest timed step takes this many times as long as the fastest, the machine is busy."""


def trace_task(task: Task, options: Namespace) -> Trace:
    """Record the step, train and predict as the flags of `paceline trace` say."""
    _check(task, options)
    if options.engine == "ddp":
        if options.device == "cpu":
            # The first optimizer imports the compiler: here once, and not in each forked worker.
            # Not where workers will use CUDA, whose driver must not be initialised before the fork.
            task.optimizer([nn.Parameter(torch.zeros(1))])
        first, *_ = launch(_work, task, options, workers=options.workers, label=False)
        return from_json(first)
    places: list[Any] = [f"cpu:{i}" for i in range(options.workers)]
    if options.device == "cuda":
        places = [i % torch.accelerator.device_count() for i in range(options.workers)]
        task.model.to(f"cuda:{places[0]}")
    main = f"cuda:{places[0]}" if options.device == "cuda" else places[0]
    before = place_replicas(task.model, main)
    return _Loop(task, options, DataParallel(task.model, places), None, before).run()


def _work(task: Task, options: Namespace) -> dict[str, Any]:
    chosen = torch.device("cpu") if options.device == "cpu" else None
    begin_s = time.perf_counter()
    with init_process_group(device_id=chosen) as world:
        met_s = time.perf_counter() - begin_s
        model, before = wrap_on_worker(
            task.model, world, met_s=met_s, seed=options.seed, values=options.values
        )
        trace = _Loop(task, options, model, world.group, before).run()
        return to_json(trace) if world.rank == 0 else {}


def _check(task: Task, options: Namespace) -> None:
    """Refuse what cannot be traced before any worker is started."""
    rows, batch = len(task.dataset), options.batch
    check_whole("--workers", options.workers)
    check_whole("--epochs", options.epochs, 0)
    if not options.workers <= batch <= rows:
        problem = f"which cannot be shared among --workers {options.workers}"
        if batch > rows:
            problem = f"more than the dataset has: {rows:,} rows"
        advice = f"Pass a number from {options.workers} to {rows}."
        raise UsageError(f"--batch is {batch}, {problem}.", advice=advice)
    # device_count(), because is_available() initialises CUDA's driver, which then fails in forks.
    if options.device == "cuda" and not torch.accelerator.device_count():
        raise UsageError("--device is cuda, but this machine has none.", advice="Use --device cpu.")
    for flag, number in (("--sample", options.sample), ("--predict", options.predict)):
        if number is not None and not 0 <= number < rows:
            raise UsageError(f"{flag} is {number}, but the dataset has rows 0 to {rows - 1:,}.")
    trained = trained_parameters(task.model)
    if not trained:
        raise UsageError(f"The {type(task.model).__name__} has nothing to train.")
    find_weight(options.weight, trained)
    _choose_step(task, options)
    first = task.dataset[0]
    if not isinstance(first, (tuple, list)) or len(first) != 2:
        raise UsageError(
            f"A row of the dataset is a {type(first).__name__}, not a pair of input and target.",
            advice="Return (input, target) from the dataset; an input may be a tuple.",
        )


def deal_batches(
    task: Task, options: Namespace, epoch: int, size: int = 1, rank: int = 0
) -> Iterator[list[int]]:
    """One rank's rows of every batch of an epoch; all rows where there is one rank."""
    whole = BatchSampler(RandomSampler(task.dataset), options.batch, drop_last=True)
    parts = DistributedBatchSampler(whole, size, rank, seed=options.seed, split=True)
    parts.set_epoch(epoch)
    yield from parts


def _choose_step(task: Task, options: Namespace) -> tuple[int, int]:
    """Which step of the first epoch to record, counted from 0, and the sample to follow in it."""
    for number, rows in enumerate(deal_batches(task, options, epoch=0)):
        if options.sample is None or options.sample in rows:
            return number, rows[0] if options.sample is None else options.sample
    raise UsageError(
        f"--sample is {options.sample}, a row that is left over in the first epoch.",
        f"{len(task.dataset):,} rows are not a whole number of batches of {options.batch}.",
        "Follow another one, or choose another --batch or --seed.",
    )


class _Loop:
    """The training in one process: all of it for replicas, one rank's part otherwise."""

    def __init__(
        self, task: Task, options: Namespace, model: Any, group: Any, before: list[Stage]
    ) -> None:
        self.task, self.options, self.model, self.group = task, options, model, group
        self.before = before
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self.device = next(model.parameters()).device
        self.optimizer = task.optimizer(model.parameters())
        self.chosen, self.sample = _choose_step(task, options)
        self.trace: Trace | None = None

    def run(self) -> Trace:
        self.model.train()
        rows = next(islice(self._batches(0), self.chosen, None))
        timed = self._time_step(rows) if self.options.rehearse else []
        epochs = []
        if self.options.epochs == 0:
            self._record(rows, step=1)  # the only step, so it is number 1 whatever its batch
        else:
            untrained = self._rated(0, *self._evaluate(self.task.dataset), 0.0)
            epochs = [untrained, *map(self._epoch, range(self.options.epochs))]
        assert self.trace is not None  # the chosen step is one of the first epoch
        trace = with_median_times(self.trace, timed) if timed else self.trace
        first, *later = map(self._with_epoch, trace.stages)
        return replace(
            trace,
            stages=[first, *self.before, *later],
            training=observe(epochs) if epochs else None,
            prediction=None if self.options.predict is None else self._predict(),
        )

    def _with_epoch(self, stage: Stage) -> Stage:
        """Add the sampler's totals over an epoch, which one step does not show."""
        if stage.name != "sampler":
            return stage
        dealt = [
            row
            for rank in range(self.size)
            for rows in deal_batches(self.task, self.options, 0, self.size, rank)
            for row in rows
        ]
        overlap, left = len(dealt) - len(set(dealt)), len(self.task.dataset) - len(set(dealt))
        said = f"In a whole epoch {len(dealt):,}: overlap {overlap:,}, left over {left:,}."
        return replace(stage, text=f"{stage.text} {said}")

    def _batches(self, epoch: int) -> Iterator[list[int]]:
        return deal_batches(self.task, self.options, epoch, self.size, self.rank)

    def _time_step(self, rows: list[int]) -> list[Trace]:
        """Take the step several times to time it, and restore all state afterwards.

        The first ones are not counted: they do one-time work, such as agreeing on the order of
        buckets.
        """
        state = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        timed = []
        with torch.random.fork_rng(devices=[]):
            for _ in range(FIRST_STEPS + TIMED_STEPS):
                self._record(rows, step=1, check=False)
                assert self.trace is not None
                timed.append(self.trace)
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
        return timed[FIRST_STEPS:]

    def _rated(self, epoch: int, loss: float, accuracy: float | None, seconds: float) -> Epoch:
        """The epoch with loss and accuracy on rows that are not trained on."""
        rated = Epoch(epoch=epoch, loss=loss, accuracy=accuracy, seconds=seconds)
        if self.task.evaluation is None:
            return rated
        new_loss, new_accuracy = self._evaluate(self.task.evaluation)
        return replace(rated, evaluation_loss=new_loss, evaluation_accuracy=new_accuracy)

    def _epoch(self, number: int) -> Epoch:
        sums = torch.zeros(3, dtype=torch.float64)
        seconds = 0.0
        for step, rows in enumerate(self._batches(number)):
            if number == 0 and step == self.chosen:
                sums += self._record(rows, step + 1)  # not timed, because recording is slow
            else:
                begin_s = time.perf_counter()
                sums += self._step(rows)
                seconds += time.perf_counter() - begin_s
        return self._rated(number + 1, *self._means(sums), seconds)

    def _record(self, rows: list[int], step: int, check: bool = True) -> Tensor:
        with record_step(
            self.model,
            self.optimizer,
            step=step,
            dataset=self.task.dataset,
            sample=self.sample,
            weight=self.options.weight,
            values=self.options.values,
            loss_fn=self.task.loss_fn,
            check=check,
        ) as recording:
            recording.note_batch(rows)
            sums = self._step(rows, recording)
        self.trace = recording.trace
        return sums

    def _step(self, rows: list[int], recording: StepRecording | None = None) -> Tensor:
        """Forward, loss, backward, update; the sums of losses and hits, and the rows."""
        self.optimizer.zero_grad()
        inputs, targets = self._load(rows)
        # The engine divides by the rows of all workers, so pass it a sum instead of the mean.
        items = 1 if self.group is None else len(rows)
        with nullcontext() if self.group is None else self.model.weighted(items):
            output = self.model(*inputs)
            loss = self.task.loss_fn(output, targets)
            if recording is not None:
                recording.note_loss(loss * items, targets=targets)
            torch.autograd.backward(loss * items)
        self.optimizer.step()
        return self._score(output, targets, loss)

    def _score(self, output: Any, targets: Any, loss: Tensor) -> Tensor:
        rows = len(next(find_tensors(targets)))
        right = self.task.count_right(output, targets)
        hits = float("nan") if right is None else right
        return torch.tensor([loss.item() * rows, hits, rows], dtype=torch.float64)

    def _means(self, sums: Tensor) -> tuple[float, float | None]:
        """Loss and accuracy over the rows of all workers."""
        if self.group is not None:
            sums = sums.to(self.device)
            all_reduce(self.group, sums, "Adding up an epoch")
        loss, right, rows = sums.tolist()
        return loss / rows, None if right != right else right / rows

    def _evaluate(self, data: Any) -> tuple[float, float | None]:
        """Loss and accuracy on rows of a dataset, each counted once; nothing is trained."""
        sums = torch.zeros(3, dtype=torch.float64)
        own = range(self.rank, len(data), self.size)
        self.model.eval()
        with torch.no_grad():
            loader: DataLoader[Any] = DataLoader(data, self.options.batch, sampler=list(own))
            for batch in loader:
                inputs, targets = self._place(batch)
                output = self.model.module(*inputs)
                sums += self._score(output, targets, self.task.loss_fn(output, targets))
        self.model.train()
        return self._means(sums)

    def _predict(self) -> SamplePrediction:
        index = self.options.predict
        inputs, targets = self._load([index])
        expected = next(find_tensors(targets), None)
        alone = trace_prediction(
            self.model,
            inputs,
            index=index,
            expected=expected.item() if expected is not None and expected.numel() == 1 else None,
            kind=self.task.kind_of(targets),
            values=self.options.values,
        )
        way = self._predict_in_batch(index)
        stops = way.sample.stops if way.sample else []
        return replace(
            alone, stages=[s for s in way.stages if s.name in PREDICTION_STAGES], stops=stops
        )

    def _predict_in_batch(self, index: int) -> Trace:
        """The row again, in a batch of its neighbours that the engine divides."""
        batch = self.options.batch
        start = min(index - index % batch, len(self.task.dataset) - batch)
        own = list(range(start, start + batch))[self.rank :: self.size]
        self.model.eval()
        with torch.no_grad():
            with record_step(
                self.model, sample=index, values=self.options.values, check=False
            ) as recording:
                recording.note_batch(own)
                self.model(*self._load(own)[0])
        self.model.train()
        assert recording.trace is not None
        return recording.trace

    def _load(self, rows: list[int]) -> tuple[tuple[Any, ...], Any]:
        return self._place(default_collate([self.task.dataset[row] for row in rows]))

    def _place(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """Inputs as arguments of the model, and targets, on the device."""
        inputs, targets = map_tensors(lambda t: t.to(self.device), tuple(batch))
        return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), targets


def with_median_times(trace: Trace, timed: Sequence[Trace]) -> Trace:
    """The step with the median times of several repetitions."""

    def median_of(times: Iterable[float | None]) -> float | None:
        known = [seconds for seconds in times if seconds is not None]
        return median(known) if known else None

    stages = []
    for stage, *same in zip(trace.stages, *(each.stages for each in timed), strict=True):
        parts = [
            replace(part, seconds=median_of(s.parts[number].seconds for s in same))
            if part.seconds is not None
            else part
            for number, part in enumerate(stage.parts)
        ]
        took = median_of(each.seconds for each in same)
        if trace.engine == "DistributedDataParallel":  # the slowest worker's
            took = max((p.seconds for p in parts if p.seconds is not None), default=took)
        stages.append(replace(stage, parts=parts, seconds=took))
    seconds = sorted(each.seconds for each in timed)
    rough = ": a busy machine, so take them as rough" if seconds[-1] > BUSY * seconds[0] else ""
    times = (
        f"Times are medians of {len(timed)} steps, of {seconds_text(seconds[0])} to "
        f"{seconds_text(seconds[-1])}{rough}."
    )
    return replace(trace, stages=stages, seconds=median(seconds), times=times)
