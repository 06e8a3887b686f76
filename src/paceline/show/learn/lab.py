"""The runs, and the names in the braces of questions, which are looked up in `NAMES`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from paceline.launcher import count_cores
from paceline.record import SamplePrediction, SampleStop, Stage, Trace, TrainedEpochs
from paceline.show.learn.runs import (
    CLASSES,
    EVERY,
    FEATURES,
    ISLAND_STEPS,
    NAP_S,
    LearnOptions,
    Runs,
)
from paceline.show.scaling.attribution import MEANINGS
from paceline.show.scaling.command import lines as study_lines
from paceline.show.trace.drawing import (
    WIDTH,
    draw_stage,
    name_of,
    numbers_of,
    short_number,
    training_lines,
)
from paceline.telemetry import count_text, shape_text

PLACES = ("torch.distributed", "torch.utils.data", "torch.nn", "torch.optim")
FATES = (
    "all of them wait forever",
    "training continues with different models",
    "an error on the last worker alone",
    "an error on every worker",
)
GROUPED = "This model does something that depends on how rows are grouped."


class Lab(Runs):
    """The values that questions use."""

    def named(self, name: str) -> Any:
        """The value of a name in a question's braces, `choices_of` or `needs`."""
        return NAMES[name](self) if name in NAMES else getattr(self, name)

    @cached_property
    def smaller(self) -> Lab:
        """A lab with fewer rows and another number of workers, for a hint."""
        workers = 2 if self.workers != 2 else 3
        return Lab(LearnOptions(seed=self.seed, workers=workers, batch=2 * workers + 1))

    @property
    def model_name(self) -> str:
        return f"your {self.dp.model.name}" if self.is_own else f"Linear({FEATURES}, {CLASSES})"

    @property
    def few_rows(self) -> int:
        """Fewer rows than devices."""
        return self.workers - 1

    def draw(self, place: Sequence[str], width: int = WIDTH) -> list[str]:
        """Draw one stage of a recorded step; `place` names both."""
        trace, stage = place
        return draw_stage(getattr(self, trace), stage, width=width)

    @property
    def updates(self) -> list[int]:
        """The updates in an epoch: with the batch of one device, and with as many rows on each."""
        rows = len(self.make_pipeline_task().dataset)
        return [-(-rows // min(rows, self.single_batch * n)) for n in (1, self.many)]

    @property
    def nap_choices(self) -> list[str]:
        return [f"about {times * NAP_S * 1e3:.0f} ms" for times in (1, self.workers)]

    def sample_at(self, stage: str) -> SampleStop:
        """The followed sample at a stage of DataParallel's step."""
        assert self.dp.sample is not None  # its batch is chosen to have the sample
        return next(stop for stop in self.dp.sample.stops if stop.stage == stage)

    @property
    def own_count(self) -> int:
        """How many rows of a worker a question asks for."""
        return min(3, -(-self.batch // self.workers))

    @property
    def training(self) -> TrainedEpochs:
        assert self.pipeline.training is not None  # it was recorded with epochs
        return self.pipeline.training

    @property
    def epoch_table(self) -> list[str]:
        return list(training_lines(self.training, 74))

    @property
    def prediction(self) -> SamplePrediction:
        assert self.pipeline.prediction is not None  # it was recorded with one
        return self.pipeline.prediction

    @property
    def prediction_way(self) -> list[str]:
        """The predicted row from the batch to the joined outputs, a line for each stage."""
        lines = []
        for stop in self.prediction.stops:
            where = "" if stop.worker is None else f" of {self.devices[stop.worker]}"
            values = " ".join(map(short_number, (stop.values or [])[:4]))
            lines.append(f"{stop.stage:<8} row {stop.row}{where}: {values}")
        return lines

    @property
    def minutes(self) -> tuple[int, int]:
        """Minutes on one device and on many: 100 and 30 on four, or random by the seed."""
        if self.seed == 0 and self.many == 4:
            return 100, 30
        rng = random.Random(self.seed)
        one = 5 * rng.randint(12, 60)
        return one, max(1, round(one / self.many / rng.uniform(0.55, 0.95)))

    @property
    def study_table(self) -> list[str]:
        left_out: dict[str, Any] = {"check": {"text": ""}, "suggestion": None, "islands": []}
        lines = list(study_lines({**self.study, **left_out}))
        return lines[lines.index("") + 1 :]  # without the heading, which is about several studies


def stage_of(trace: Trace, name: str) -> Stage:
    return next(stage for stage in trace.stages if stage.name == name)


def rows_of(stage: Stage) -> list[int]:
    """How many rows each part of a stage has."""
    return [part.tensors[0].shape[0] for part in stage.parts]


def verdict_of(trace: Trace) -> tuple[bool, str]:
    """Whether the step is that of a single process, and the sentence of the check."""
    check = trace.check
    said = " ".join(filter(None, (check.text, check.reason))) if check else "not compared"
    return bool(check and check.is_same and check.how == "whole batch"), said


def _shape(trace: Trace, stage: str) -> str:
    """A stage's shape as text; only the rows where the dataset's shape is unknown."""
    tensors = stage_of(trace, stage).parts[0].tensors
    return str(tuple(tensors[0].shape)) if tensors else f"({trace.dataset_rows}, ...)"


def _output_text(lab: Lab) -> str:
    """Shape and type of all outputs, as numbers to multiply."""
    facts = stage_of(lab.dp, "gather").parts[0].tensors[0]
    width = facts.bytes // max(1, math.prod(facts.shape))
    return f"{shape_text(facts.shape)} numbers of {facts.dtype}, {width} bytes each"


def _script_steps(lab: Lab) -> list[str]:
    """The steps of the prepared script, shuffled by the seed."""
    steps = list(lab.meeting[0]["steps"])
    random.Random(lab.seed).shuffle(steps)
    return steps


def _order_text(lab: Lab) -> str:
    """The first rows of an epoch's order, before they are dealt."""
    rounds = zip(*lab.deal(lab.batch), strict=True)
    return ", ".join(str(row) for one in list(rounds)[:4] for row in one)


def _first_accuracy(lab: Lab) -> str:
    """The accuracy before training; empty where there is none."""
    share = lab.training.epochs[0].accuracy
    return "" if share is None else f"{share:.0%}"


def _name_choices(lab: Lab) -> list[str]:
    bare = lab.saved.bare[0]
    return [bare, f"module.{bare}", f"model.{bare}", f"{bare}.module"]


NAMES: dict[str, Callable[[Lab], Any]] = {
    "few_rows_text": lambda lab: count_text(lab.few_rows, "row"),
    "input_shape": lambda lab: _shape(lab.dp, "batch"),
    "output_text": _output_text,
    "dataset_shape": lambda lab: _shape(lab.pipeline, "data"),
    "sample_row": lambda lab: lab.sample_at("batch").row,
    "sample_device": lambda lab: lab.devices[lab.sample_at("split").worker or 0],
    "sample_own_row": lambda lab: lab.sample_at("split").row,
    "weight_name": lambda lab: name_of(lab.ddp.weight) if lab.ddp.weight else "a weight",
    "contributions": lambda lab: [*map(short_number, numbers_of(lab.dp, "gradient"))],
    "own_gradients": lambda lab: [*map(short_number, numbers_of(lab.ddp, "gradient"))],
    "first_weights": lambda lab: [short_number(each["before"]) for each in lab.meeting],
    "script_steps": _script_steps,
    "order_text": _order_text,
    "first_loss": lambda lab: short_number(lab.training.epochs[0].loss),
    "first_accuracy": _first_accuracy,
    "predicted_row": lambda lab: lab.prediction.index,
    "predicted_in_batch": lambda lab: next(
        stop.row for stop in lab.prediction.stops if stop.stage == "batch"
    ),
    "name_choices": _name_choices,
    "places": lambda _lab: PLACES,
    "fates": lambda _lab: FATES,
    "cores": lambda _lab: count_cores(),
    "every": lambda _lab: EVERY,
    "island_steps": lambda _lab: ISLAND_STEPS,
    "island_weights": lambda lab: [f"{each:.6g}" for each in lab.train_apart(EVERY).locals],
    "losses": lambda _lab: [*MEANINGS.values(), "nothing was lost"],
}
