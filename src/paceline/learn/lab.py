"""The runs with names for what questions say: what stands in braces there is an attribute here."""

from __future__ import annotations

import math
import random
from typing import Any

from paceline.explain.scaling.attribution import MEANINGS
from paceline.explain.scaling.command import lines as study_lines
from paceline.explain.trace.drawing import short_number, training_lines
from paceline.launcher import count_cores
from paceline.learn.runs import CLASSES, FEATURES, NAP_S, Runs
from paceline.observe.units import shape_text
from paceline.record.stages import Epoch, SampleStop, Stage, Trace

TRACES = ("dp", "ddp", "pipeline", "uneven", "same_rows")
"""Recorded steps that questions refer to."""


class Lab(Runs):
    """Everything that questions ask for."""

    # The split and the copies.

    @property
    def model_name(self) -> str:
        return f"your {self.dp.model.name}" if self.is_own else f"Linear({FEATURES}, {CLASSES})"

    @property
    def parameters(self) -> int:
        return self.dp.model.parameters

    @property
    def model_bytes(self) -> int:
        return self.dp.model.bytes

    @property
    def input_shape(self) -> str:
        return _shape(self.dp, "batch")

    @property
    def output_text(self) -> str:
        """Shape and type of all outputs, as numbers to multiply."""
        facts = stage_of(self.dp, "gather").parts[0].tensors[0]
        width = facts.bytes // max(1, math.prod(facts.shape))
        return f"{shape_text(facts.shape)} numbers of {facts.dtype}, {width} bytes each"

    @property
    def dataset_shape(self) -> str:
        return _shape(self.pipeline, "data")

    @property
    def pipeline_batch(self) -> int:
        return self.pipeline.batch_rows

    @property
    def few_rows(self) -> int:
        return self.workers - 1

    @property
    def other_workers(self) -> int:
        return self.uneven.workers

    def sample_at(self, stage: str) -> SampleStop:
        stops = self.dp.sample.stops if self.dp.sample else []
        return next(stop for stop in stops if stop.stage == stage)

    @property
    def sample_row(self) -> int:
        return self.sample_at("batch").row

    @property
    def sample_device(self) -> str:
        return self.devices[self.sample_at("split").worker or 0]

    @property
    def sample_own_row(self) -> int:
        return self.sample_at("split").row

    @property
    def nap_choices(self) -> list[str]:
        return [f"about {times * NAP_S * 1e3:.0f} ms" for times in (1, self.workers)]

    # Gradients and the meeting.

    @property
    def weight_name(self) -> str:
        weight = self.ddp.weight
        return f"{weight.name}{weight.index}" if weight else "a weight"

    @property
    def contributions(self) -> list[str]:
        return [short_number(each) for each in numbers_of(self.dp, "gradient")]

    @property
    def own_gradients(self) -> list[str]:
        return [short_number(each) for each in numbers_of(self.ddp, "gradient")]

    @property
    def first_weights(self) -> list[str]:
        return [short_number(each["before"]) for each in self.meeting]

    @property
    def script_steps(self) -> list[str]:
        """The steps of the prepared script, shuffled by the seed."""
        steps = list(self.meeting[0]["steps"])
        random.Random(self.seed).shuffle(steps)
        return steps

    @property
    def order_text(self) -> str:
        """The first rows of an epoch's order, before they are dealt."""
        rounds = zip(*self.deal(self.batch), strict=True)
        return ", ".join(str(row) for one in list(rounds)[:4] for row in one)

    @property
    def own_count(self) -> int:
        """How many rows of a short order a worker can be asked for."""
        return min(3, -(-self.batch // self.workers))

    # Learning.

    @property
    def epochs(self) -> list[Epoch]:
        return self.pipeline.training.epochs if self.pipeline.training else []

    @property
    def first_loss(self) -> str:
        return short_number(self.epochs[0].loss)

    @property
    def first_accuracy(self) -> str:
        """Empty where rows are not right or wrong."""
        share = self.epochs[0].accuracy
        return "" if share is None else f"{share:.0%}"

    @property
    def epoch_table(self) -> list[str]:
        training = self.pipeline.training
        return [] if training is None else list(training_lines(training, 74))

    @property
    def predicted_row(self) -> int:
        return self.pipeline.prediction.index if self.pipeline.prediction else 0

    @property
    def predicted_in_batch(self) -> int:
        return next(stop.row for stop in self.prediction_stops if stop.stage == "batch")

    @property
    def prediction_way(self) -> list[str]:
        """The predicted row from the batch to the joined outputs, a line for each stage."""
        told = []
        for stop in self.prediction_stops:
            where = "" if stop.worker is None else f" of {self.devices[stop.worker]}"
            values = " ".join(map(short_number, (stop.values or [])[:4]))
            told.append(f"{stop.stage:<8} row {stop.row}{where}: {values}")
        return told

    @property
    def prediction_stops(self) -> list[SampleStop]:
        return self.pipeline.prediction.stops if self.pipeline.prediction else []

    # Numbers to reckon with.

    @property
    def minutes(self) -> tuple[int, int]:
        """On one device and on many: 100 and 30 on four, or drawn by the seed."""
        if self.seed == 0 and self.many == 4:
            return 100, 30
        rng = random.Random(self.seed)
        one = 5 * rng.randint(12, 60)
        return one, max(1, round(one / self.many / rng.uniform(0.55, 0.95)))

    @property
    def one_minutes(self) -> int:
        return self.minutes[0]

    @property
    def many_minutes(self) -> int:
        return self.minutes[1]

    @property
    def bare_name(self) -> str:
        return self.saved.bare[0]

    @property
    def name_choices(self) -> list[str]:
        bare = self.bare_name
        return [bare, f"module.{bare}", f"model.{bare}", f"{bare}.module"]

    @property
    def tensors(self) -> int:
        return len(self.saved.bare)

    @property
    def cores(self) -> int:
        return count_cores()

    @property
    def study_table(self) -> list[str]:
        return list(study_lines({**self.study, "check": {"text": ""}, "suggestion": None}))

    @property
    def losses(self) -> list[str]:
        return [*MEANINGS.values(), "nothing was lost"]


def stage_of(trace: Trace, name: str) -> Stage:
    return next(stage for stage in trace.stages if stage.name == name)


def rows_of(stage: Stage) -> list[int]:
    """How many rows each part of a stage has."""
    return [part.tensors[0].shape[0] for part in stage.parts]


def numbers_of(trace: Trace, what: str) -> list[float]:
    """The followed weight's numbers by worker, such as its gradient."""
    stops = trace.weight.stops if trace.weight else []
    return next((stop.by_worker or [] for stop in stops if stop.what == what), [])


def _shape(trace: Trace, stage: str) -> str:
    """As Python writes it; a dataset that does not say has only its rows."""
    tensors: list[Any] = stage_of(trace, stage).parts[0].tensors
    return str(tuple(tensors[0].shape)) if tensors else f"{trace.dataset_rows} rows long"
