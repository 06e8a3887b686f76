"""The training task of a trace: the built-in model and data, or the user's own.

The built-in task is 1,000 rows of 10 numbers with a yes or no for each, learned by a small network;
the data is generated, so nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from paceline.errors import PacelineError, UsageError, did_you_mean, summarize
from paceline.show.trace.prediction import Kind
from paceline.telemetry import line_of_error

ROWS, NEW_ROWS, FEATURES, HIDDEN = 1_000, 200, 10, 32
NOISE = 0.26
"""With this much noise, nearly a tenth of the rows cannot be predicted from their features."""
OFFSET = 0.27
"""With this offset six rows in ten are "yes", so a constant answer is right for six in ten."""


@dataclass(frozen=True, slots=True)
class Task:
    """A model, its data, loss and optimizer; a user's dictionary has these keys."""

    model: nn.Module
    dataset: Any
    """Pairs of input and target."""
    loss_fn: Callable[[Any, Any], Tensor]
    """The mean over the rows of an output and their targets."""
    optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, lr=0.1)
    """Makes an optimizer for parameters."""
    evaluation: Any = None
    """A dataset of rows that are not trained on."""
    kind: Kind | None = None
    """What outputs mean; None: whole numbers as targets are classes, others are values."""

    def kind_of(self, targets: Any) -> Kind:
        is_whole = isinstance(targets, Tensor) and not targets.is_floating_point()
        return self.kind or ("classes" if is_whole else "value")

    def count_right(self, output: Any, targets: Any) -> int | None:
        """How many rows are predicted correctly; None where outputs are not classes."""
        kind = self.kind_of(targets)
        if kind == "value" or not isinstance(output, Tensor) or not isinstance(targets, Tensor):
            return None
        if kind == "binary":
            return int(((output > 0) == (targets > 0.5)).sum())
        if output.dim() != 2 or targets.shape != output.shape[:1]:
            return None
        return int((output.argmax(dim=1) == targets).sum())


def built_in(seed: int) -> Task:
    """The 10-feature task: on which side of a plane does a row lie?

    Before training the network answers "yes" for most rows, so accuracy begins at about 0.6.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = ROWS + NEW_ROWS
    x = torch.randn(rows, FEATURES, generator=generator)
    direction = F.normalize(torch.randn(FEATURES, generator=generator), dim=0)
    noise = NOISE * torch.randn(rows, generator=generator)
    y = (x @ direction + noise + OFFSET > 0).float().unsqueeze(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden, last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)
    nn.init.constant_(last.bias, math.log(0.6 / 0.4))  # the odds of "yes"
    return Task(
        model=nn.Sequential(hidden, nn.ReLU(), last),
        dataset=TensorDataset(x[:ROWS], y[:ROWS]),
        loss_fn=F.binary_cross_entropy_with_logits,
        optimizer=lambda parameters: SGD(parameters, lr=0.3),
        evaluation=TensorDataset(x[ROWS:], y[ROWS:]),
        kind="binary",
    )


def load(target: str, seed: int) -> Task:
    """The task that `FILE:function` makes, with torch's random numbers seeded."""
    function = find_function(target)
    torch.manual_seed(seed)
    return _as_task(function(), target)


def find_function(target: str) -> Callable[[], Any]:
    """The function that `FILE:function` or `package.module:function` names."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(
            f"{target!r} does not name a function.",
            advice="Write it as FILE:function, such as train.py:make, or package.module:make.",
        )
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"{place!r} has no function {name!r}.{did_you_mean(name, own)}",
            advice="Write one that returns (model, dataset, loss function).",
        )
    try:
        inspect.signature(function).bind()
    except TypeError:
        advice = "Name a function that can be called without."
        raise UsageError(f"{target!r} needs arguments.", advice=advice) from None

    def call() -> Any:
        with _refused(f"{target!r} failed when it was called"):
            return function()

    return call


def _module(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix == ".py" and not path.is_file():
        raise UsageError(f"There is no file {place!r}.", advice=f"Looked for it in {Path.cwd()}.")
    with _refused(f"{place!r} cannot be imported"):
        if path.suffix != ".py":
            return import_module(place)
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # as for a script
        name = f"paceline_traced_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into an error that says where it was raised."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        advice = 'The file is imported: start a training only under `if __name__ == "__main__":`.'
        where = f"It was raised at {line_of_error(error)}."
        raise UsageError(f"{what}: {summarize(error)}.", where, advice) from error


def _as_task(made: Any, target: str) -> Task:
    keys = [field.name for field in fields(Task)]
    if isinstance(made, tuple) and len(made) == 3:
        made = dict(zip(keys, made, strict=False))
    advice = f"Return (model, dataset, loss_fn), or a dictionary with keys of {', '.join(keys)}."
    if not isinstance(made, Mapping):
        raise UsageError(f"{target!r} returned {type(made).__name__}.", advice=advice)
    # A key whose value is None counts as missing.
    parts = {str(key): value for key, value in made.items() if value is not None}
    for name in {"dataset", "evaluation"} & parts.keys():
        parts[name] = _as_dataset(parts[name], name, target)
    try:
        task = Task(**parts)
    except TypeError as error:
        raise UsageError(f"{target!r} did not return a task: {error}.", advice=advice) from None
    for name, is_right in (
        ("model", isinstance(task.model, nn.Module)),
        ("loss_fn", callable(task.loss_fn)),
        ("optimizer", callable(task.optimizer)),
        ("kind", task.kind is None or task.kind in get_args(Kind)),
    ):
        if not is_right:
            raise UsageError(f"The {name} of {target!r} is {getattr(task, name)!r:.100}.")
    return task


def _as_dataset(value: Any, name: str, target: str) -> Any:
    """A pair of tensors is a dataset too."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if is_pair and all(isinstance(part, Tensor) for part in value):
        if len(value[0]) != len(value[1]):
            raise UsageError(
                f"The {name} of {target!r} has {len(value[0])} inputs and {len(value[1])} targets."
            )
        return TensorDataset(*value)
    if not hasattr(value, "__getitem__") or not hasattr(value, "__len__"):
        raise UsageError(
            f"The {name} of {target!r} is a {type(value).__name__} without rows to pick from.",
            advice="Use a torch Dataset with a length, or a pair of tensors.",
        )
    return value
