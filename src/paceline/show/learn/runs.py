"""The runs behind lessons: real steps, workers and files, each run once, when first needed.

Recorded steps are `Trace` objects, as drawn by `paceline trace`. All runs depend only on the seed,
the workers, the batch and the model, so other values make other questions.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import TensorDataset, default_collate

from paceline.data import DistributedSampler
from paceline.dp import DataParallel
from paceline.errors import PacelineError, UsageError, check_whole
from paceline.islands import Islands
from paceline.launcher import count_cores, launch
from paceline.record import Trace, from_json, record_step
from paceline.show.learn import scripts
from paceline.show.scaling.command import Study, make_study
from paceline.show.scaling.measure import Profile, combine, read_run
from paceline.show.trace import task as tasks
from paceline.show.trace.command import add_arguments
from paceline.show.trace.task import Task
from paceline.show.trace.training import deal_batches, trace_task

MOST_WORKERS, MOST_ROWS = 8, 2_000
FEATURES, CLASSES, ROWS = 10, 5, 1_000
EPOCHS = 5
NAP_S, SLOW_S = 0.05, 0.02
ISLANDS, EVERY, ISLAND_STEPS = 2, 4, 12
TRIES = 4
"""How many times something is measured at most, until the result is clear."""
STEADY = 0.25
"""The two fastest runs may differ by this share; otherwise the measurement is unreliable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnOptions:
    """The numbers in the questions; None means the lesson's default."""

    seed: int = 0
    workers: int | None = None
    batch: int | None = None
    model: str | None = None
    """FILE:FUNCTION, as for `paceline trace`."""

    def __post_init__(self) -> None:
        check_whole("--seed", self.seed, 0, most=2**32 - 1)
        # One worker has nothing to share, and more than eight take too long.
        check_whole("--workers", self.workers, 2, or_none=True, most=MOST_WORKERS)
        if self.batch is not None and not (self.workers or 4) <= self.batch <= MOST_ROWS:
            raise UsageError(
                f"--batch is {self.batch}, for {self.workers or 'up to 4'} workers.",
                advice=f"Use at least a row for each worker, and at most {MOST_ROWS:,}.",
            )


def _run(task: Task, flags: Namespace) -> Trace:
    """Trace a task with one thread for each replica: models of this size do not use more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return trace_task(task, flags)
    finally:
        torch.set_num_threads(threads)


class Runs:
    """Runs what questions need, and keeps the results.

    `trouble` is the error with which the reader's own model failed; then the built-in one is used.
    """

    def __init__(self, options: LearnOptions) -> None:
        self.options = options
        self.seed = options.seed
        self.workers = options.workers or 3
        self.batch = options.batch or 16
        self.trouble = ""
        self.is_own = options.model is not None
        if self.is_own:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _ = self.dp, self.ddp
            except Exception as error:
                self.leave_own_model(error)

    @property
    def about(self) -> str:
        """Identifies the set of questions, for saved progress."""
        return f"{self.seed} {self.workers} {self.many} {self.options.batch} {self.is_own}"

    def leave_own_model(self, error: Exception) -> None:
        """Continue with the built-in model, because the reader's own has failed."""
        said = str(error) if isinstance(error, PacelineError) else repr(error)
        self.trouble = f"{self.options.model} cannot be used here: {said}"
        self.is_own = False
        kept = ("options", "seed", "workers", "batch", "trouble", "is_own")
        self.__dict__ = {name: self.__dict__[name] for name in kept}  # drop cached runs

    def make_task(self) -> Task:
        """The reader's own, or `Linear(10, 5)` on rows of five classes; the same at every call."""
        if self.is_own:
            return tasks.load(self.options.model or "", self.seed)
        rows = -(-ROWS // self.batch) * self.batch  # whole batches, so that none is left over
        x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(self.seed))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = nn.Linear(FEATURES, CLASSES)
        data = TensorDataset(x, x[:, :CLASSES].argmax(1))
        return Task(model, data, F.cross_entropy, lambda parameters: SGD(parameters, lr=0.5))

    def make_pipeline_task(self) -> Task:
        """The reader's own, or the built-in one of `paceline trace`."""
        return self.make_task() if self.is_own else tasks.built_in(self.seed)

    @cached_property
    def task(self) -> Task:
        return self.make_task()

    @property
    def rows(self) -> int:
        return len(self.task.dataset)

    @property
    def devices(self) -> list[str]:
        return [f"cpu:{number}" for number in range(self.workers)]

    def load(self, rows: list[int]) -> tuple[Any, ...]:
        """The inputs of some rows, as arguments of the model."""
        inputs = default_collate([self.task.dataset[row] for row in rows])[0]
        return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)

    # Recorded steps.

    def _flags(self, **others: Any) -> Namespace:
        """The flags of `paceline trace` for this lab."""
        parser = ArgumentParser()
        add_arguments(parser)
        own = {"workers": self.workers, "batch": self.batch, "seed": self.seed}
        usual = {"engine": "dp", "values": True, "rehearse": False}
        return Namespace(**{**vars(parser.parse_args([])), **own, **usual, **others})

    def _trace(self, task: Task, **others: Any) -> Trace:
        """Record one step; it follows a sample other than the first."""
        flags = self._flags(**others)
        if flags.workers <= flags.batch <= len(task.dataset):  # else `trace_task` raises
            rows = next(deal_batches(task, flags, epoch=0))
            flags.sample = rows[len(rows) * 2 // 3]
        return _run(task, flags)

    @cached_property
    def dp(self) -> Trace:
        return self._trace(self.make_task())

    @cached_property
    def ddp(self) -> Trace:
        return self._trace(self.make_task(), engine="ddp")

    @cached_property
    def pipeline(self) -> Trace:
        """A step of the built-in task, five epochs around it, and a prediction after them."""
        task = self.make_pipeline_task()
        rows = len(task.dataset)
        batch, predict = min(self.options.batch or 100, rows), (7 * self.seed + 70) % rows
        workers = self.options.workers or 2
        return self._trace(task, workers=workers, batch=batch, epochs=EPOCHS, predict=predict)

    @cached_property
    def uneven(self) -> Trace:
        """The same step on a number of devices that does not divide the batch."""
        parts = torch.arange(self.batch)
        more = range(self.workers + 1, min(MOST_WORKERS, self.batch) + 1)
        uneven = [n for n in more if len({len(part) for part in parts.chunk(n)}) > 1]
        return self._trace(self.make_task(), workers=[*uneven, max(2, self.workers - 1)][0])

    @cached_property
    def same_rows(self) -> Trace:
        """A step without a sampler, in which all workers have the same rows."""
        first, *_ = self._launch(scripts.without_sampler, self.make_task(), self.rows_each)
        return from_json(first)

    @property
    def rows_each(self) -> int:
        return max(1, self.batch // self.workers)

    # One process.

    @cached_property
    def calls(self) -> list[list[int]]:
        """The modules that compute: in two calls without an update, and in a call of `.module`."""
        model = DataParallel(self.make_task().model, self.devices)
        inputs = self.load(list(range(self.batch)))
        seen: list[list[int]] = []
        for call in (model, model, model.module):
            with record_step(model, check=False) as recording:
                call(*inputs)
                seen.append([id(each.module) for each in recording.calls])
        return seen

    @cached_property
    def nap_s(self) -> float:
        """How long sleeping in all copies takes together."""

        class Nap(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                time.sleep(NAP_S)
                return x

        model, x = DataParallel(Nap(), self.devices), torch.zeros(self.workers, 1)
        best_s = float("inf")
        for _ in range(TRIES):  # the first one starts the threads; other load only adds time
            begin_s = time.perf_counter()
            model(x)
            best_s = min(best_s, time.perf_counter() - begin_s)
        return best_s

    def count_calls(self, rows: int) -> scripts.Counting:
        """A module that has counted its calls by DataParallel on this many rows."""
        counting = scripts.Counting()
        DataParallel(counting, self.devices)(torch.zeros(rows, 1))
        return counting

    @cached_property
    def displaced(self) -> str:
        """torch's error for weights on one device and rows on another."""
        elsewhere = nn.Linear(FEATURES, CLASSES, device="meta")
        return scripts.raised(lambda: elsewhere(torch.zeros(2, FEATURES)).sum().item())

    # Several processes.

    def _launch(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        SGD([nn.Parameter(torch.zeros(1))])  # imports the compiler: once here, not per worker
        return launch(function, *arguments, workers=self.workers, threads=1, label=False)

    @cached_property
    def meeting(self) -> list[dict[str, Any]]:
        """The ranks and weights of each worker of a prepared script, by rank."""
        with tempfile.TemporaryDirectory(prefix="paceline-learn-") as folder:
            return self._launch(scripts.prepared, self.make_task(), self.seed, folder)

    @cached_property
    def other_model(self) -> list[str]:
        """Each worker's error when the last one builds another model; empty without one."""
        return self._launch(scripts.with_another_model)

    @cached_property
    def not_averaged(self) -> list[str]:
        """Each worker's error after a step whose gradients were not averaged."""
        return self._launch(scripts.without_averaging, self.seed)

    @cached_property
    def python_s(self) -> tuple[float, float]:
        """How long two loops of plain Python take at once: in threads, in processes.

        The best of some tries: other load only adds time, and threads that take turns need at least
        twice the time of one.
        """
        best_s = [float("inf")] * 2
        for _ in range(TRIES):
            with ThreadPoolExecutor(2) as pool:
                threads_s = max(each.result() for each in [pool.submit(scripts.spin) for _ in "ab"])
            processes_s = max(launch(scripts.spin, workers=2, threads=1, label=False))
            best_s = [*map(min, best_s, (threads_s, processes_s))]
            if best_s[0] > 1.5 * best_s[1]:
                break
        return best_s[0], best_s[1]

    # Sampling.

    def deal(self, rows: int, **options: Any) -> list[list[int]]:
        """The sampler's indices, by rank."""
        found = []
        for rank in range(self.workers):
            sampler = DistributedSampler(range(rows), self.workers, rank, seed=self.seed, **options)
            sampler.set_epoch(0)
            found.append(list(sampler))
        return found

    # Learning, files, time.

    @cached_property
    def epoch_losses(self) -> dict[str, float]:
        """Losses after one epoch with the same learning rate: one worker, and many in two ways."""
        rows = len(self.make_pipeline_task().dataset)
        small = min(self.single_batch, rows)
        large = min(small * self.many, rows)

        def after(batch: int, workers: int) -> float:
            flags = self._flags(batch=batch, workers=min(workers, batch), epochs=1)
            training = _run(self.make_pipeline_task(), flags).training
            return training.epochs[-1].loss if training else float("nan")

        return {
            "one": after(small, 1),
            "kept": after(small, self.many),
            "grown": after(large, self.many),
        }

    def train_apart(self, every: int, islands: int = ISLANDS) -> scripts.Apart:
        """Train some steps on islands; a round assigns their average."""
        options = Islands(every=every, outer="sgd")
        return scripts.train_apart(self.make_task, self.batch, ISLAND_STEPS, options, islands)

    def compare_with_one(self, every: int) -> tuple[float, float]:
        """The distance of islands from one training on the same batches, and how far that moved."""
        one, apart = self.train_apart(1, 1).weights, self.train_apart(every).weights
        begin = scripts.flat_weights(self.make_task().model)
        return float((apart - one).norm()), float((one - begin).norm())

    @property
    def single_batch(self) -> int:
        return self.options.batch or 32

    @property
    def many(self) -> int:
        return self.options.workers or 4

    @cached_property
    def saved(self) -> scripts.SavedFile:
        return scripts.save_and_load(self.make_task)

    @cached_property
    def study(self) -> Study:
        """A short training on one worker and on several, with attributed losses."""
        runs: dict[int, list[Profile]] = {1: [], self.workers: []}
        for _ in range(TRIES):
            for workers, profiles in runs.items():
                profiles.append(self._profile(workers)[0])
            times_s = [[profile.step_s for profile in profiles] for profiles in runs.values()]
            if len(runs[1]) > 1 and all(map(are_near, times_s)):
                break
        sizes = [combine(profiles) for profiles in runs.values()]
        return make_study(sizes, name="this training", cores=count_cores(), mode="strong")

    @property
    def is_quiet(self) -> bool:
        """Whether the two fastest runs of each size are similar, so that the study is reliable."""
        return all(are_near(size["runs_s"]) for size in self.study["sizes"])

    @cached_property
    def slow_run(self) -> tuple[Profile, list[str]]:
        """The same with a slow last worker, and the message about it."""
        return self._profile(self.workers, SLOW_S)

    def _profile(self, workers: int, slow_s: float = 0.0) -> tuple[Profile, list[str]]:
        with tempfile.TemporaryDirectory(prefix="paceline-learn-") as folder:
            arguments = (folder, self.seed, slow_s)
            said = launch(scripts.timed_steps, *arguments, workers=workers, threads=1, label=False)
            return read_run(Path(folder), workers), said[0].splitlines()[:1]


def are_near(seconds: Iterable[float]) -> bool:
    """Whether the two fastest runs are similar; other load makes runs longer, never shorter."""
    first, second, *_ = [*sorted(seconds), math.inf]
    return second <= (1 + STEADY) * first
