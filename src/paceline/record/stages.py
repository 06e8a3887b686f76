"""One recorded step as plain data: stages, a sample and a weight followed through them, a check.

The terminal, the report and the JSON file show exactly this data; nothing else is kept of the step.
Its fields are also the file format, strict JSON: `from_json` checks a document against them and
names the first mistake; unknown keys are ignored, so that later versions may add some. Floats that
JSON cannot represent are the strings "nan", "inf" and "-inf". Starts without torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.files import (
    check_schema,
    make_private,
    open_plain,
    plain_json,
    read_json,
    read_value,
    replace_file,
)

SCHEMA = 1
FILE_LIMIT_BYTES = 16 * 2**20
EngineName = Literal["DataParallel", "DistributedDataParallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Statistics of a tensor's values."""

    min: float
    mean: float
    max: float
    zeros: float
    """The share of zeros, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """One tensor as it was recorded."""

    name: str
    shape: list[int]
    dtype: str
    device: str
    bytes: int
    stats: Stats | None = None
    """None where statistics would reveal the few values, or without real numbers."""
    first: list[float] | None = None
    """The first values; None unless values were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one worker, one replica or one bucket has at a stage."""

    title: str
    worker: int | None = None
    """The rank, or the number of the replica; None for what belongs to all."""
    device: str = ""
    tensors: list[TensorFacts] = field(default_factory=list)
    seconds: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One thing that happens to a batch."""

    name: str
    """`data`, `batch`, `split` …: fixed identifiers, for programs."""
    title: str
    text: str
    """What happens here, in one sentence with the numbers of this step."""
    parts: list[Part] = field(default_factory=list)
    bytes_moved: int = 0
    """How much was copied from one memory, device or process to another, all parts together."""
    seconds: float | None = None
    """From the first worker's start to the last one's end; None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStop:
    """The followed sample at one stage."""

    stage: str
    worker: int | None
    row: int
    """Its row in the tensor of that worker."""
    values: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of the batch, followed."""

    index: int
    """Its number in the dataset, or in the batch where `note_batch` was not called."""
    stops: list[SampleStop] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStop:
    """The followed weight's value or gradient at one stage."""

    stage: str
    what: Literal["value", "gradient", "averaged gradient", "summed gradient", "new value"]
    by_worker: list[float] | None = None
    """By worker, or a single one where all share it; None unless values were asked for."""
    is_equal: bool | None = None
    """Whether all workers have the same bits; None for values that differ by design."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One element of one parameter, followed."""

    name: str
    index: list[int]
    bucket: int | None = None
    position: int | None = None
    """Its element in the bucket."""
    stops: list[WeightStop] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The step computed again in one process, and its difference from the engine's result."""

    how: Literal["whole batch", "part by part", "not computed"]
    text: str
    """One sentence, such as "same as one process on the whole batch: difference 3e-08"."""
    is_same: bool | None = None
    """Whether rounding explains the difference; None where nothing was compared."""
    difference: float | None = None
    """The largest of the differences below."""
    tolerance: float | None = None
    """The largest difference that rounding explains, for numbers of this size and dtype."""
    outputs: float | None = None
    loss: float | None = None
    """Compared only where the loss function is known."""
    gradients: float | None = None
    parameters: float | None = None
    is_equal_on_all: bool | None = None
    """Whether all workers ended with the same bits; None with a single copy of the parameters."""
    reason: str = ""
    """Why it differs or could not be computed, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One row of the training table; evaluation is on rows that were not trained on."""

    epoch: int
    loss: float
    seconds: float
    accuracy: float | None = None
    evaluation_loss: float | None = None
    evaluation_accuracy: float | None = None
    observation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedEpochs:
    """The epochs after the recorded step, and a sentence about them."""

    epochs: list[Epoch] = field(default_factory=list)
    observation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer in the prediction for one sample."""

    name: str
    kind: str
    output: TensorFacts
    parameters: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The model's prediction: a class with its probability, or a value."""

    kind: Literal["class", "value"]
    text: str
    label: int | None = None
    probability: float | None = None
    value: float | None = None
    expected: float | None = None
    """The target in the dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePrediction:
    """One sample through every layer."""

    index: int
    input: list[TensorFacts] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    answer: Answer | None = None
    """None unless values were asked for."""
    stages: list[Stage] = field(default_factory=list)
    """The stages of a batch with that row: split, devices and gather."""
    stops: list[SampleStop] = field(default_factory=list)
    """The row's position in those stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The trained model."""

    name: str
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded step of one model."""

    engine: EngineName
    step: int
    """Counted from 1, as in the run folder."""
    created: float
    """Seconds since 1970."""
    workers: int
    devices: list[str]
    """By worker."""
    model: Model
    batch_rows: int
    dataset_rows: int | None = None
    has_values: bool = False
    seconds: float = 0.0
    """The recorded step as a whole, without the check."""
    times: str = ""
    """How times were measured, in a sentence; empty where they are of this step only."""
    stages: list[Stage] = field(default_factory=list)
    sample: Sample | None = None
    weight: Weight | None = None
    check: Check | None = None
    training: TrainedEpochs | None = None
    prediction: SamplePrediction | None = None
    schema: int = SCHEMA


def to_json(trace: Trace) -> dict[str, Any]:
    """The document that `from_json` reads."""
    document: dict[str, Any] = plain_json(asdict(trace))
    return document


def from_json(document: Any) -> Trace:
    """Read a trace from a document; a WireError names what is wrong with it."""
    check_schema(document, SCHEMA, "The recorded step")
    trace: Trace = read_value(Trace, document, "step")
    return trace


def write(trace: Trace, path: Path) -> None:
    """Replace the file atomically, readable by this user only."""
    make_private(path.parent)
    replace_file(path, [json.dumps(to_json(trace), allow_nan=False, indent=1), "\n"])


def read(path: Path) -> Trace:
    """Read a recorded step from a file."""
    return from_json(read_document(path))


def read_document(path: Path) -> Any:
    """The JSON of a file; one that is too large is refused."""
    with open_plain(path) as file:
        return read_json(file, FILE_LIMIT_BYTES, path)
