"""What is written down of a live step: its forward passes, its tensors, what its caller says.

Live tensors come in here; what leaves it for a trace are `TensorFacts`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import lt
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import tree
from paceline.errors import UsageError
from paceline.record.stages import Stats, TensorFacts, Trace

FIRST_VALUES = 6
"""How many values of a tensor are kept, where values are asked for."""
FEWEST_FOR_STATS = 8
"""Statistics of fewer values would nearly be the values."""

Memory = tuple[str, int]
"""Device and address of a storage: two tensors with the same one share bytes."""


@dataclass(slots=True, kw_only=True)
class Piece:
    """The rows of one forward pass and what the loss said of them: enough to compute it again."""

    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    """Of the loss, by output."""
    random_state: list[Tensor] = field(default_factory=list)
    """Of the generators before the pass; empty where it drew no random numbers."""
    targets: list[Tensor] = field(default_factory=list)
    """What the loss compares the outputs with, where that is known."""

    @property
    def rows(self) -> int:
        return next((tensor.shape[0] for tensor in self.inputs if tensor.dim()), 0)


@dataclass(slots=True, kw_only=True)
class ForwardPass(Piece):
    """One call of the module, of a replica, or of `DataParallel` with the whole batch."""

    module: nn.Module
    arguments: Any
    """args and kwargs, whose tensors are the inputs."""
    output: Any = None
    memories: list[Memory]
    """Of the inputs."""
    weights: set[Memory]
    """Of the parameters that were used."""
    replica: int
    """Which one it is, 0 without replicas."""
    turn: int = 0
    """How many times this module, or this replica, was called before in the step."""
    arrive_ns: int
    """Before anything was written down."""
    begin_ns: int = 0
    end_ns: int = 0
    leave_ns: int = 0
    """After everything was written down."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(slots=True, kw_only=True)
class StepRecording:
    """One step being recorded: what the caller wants to know of it, and says about it.

    `trace` is there when the block has ended.
    """

    step: int
    dataset: Any
    values: bool
    sample: int | None
    weight: WeightRef | None
    weight_before: float | None
    """The followed weight's value before the step."""
    loss_fn: Callable[[Any, Any], Tensor] | None
    check: bool
    """Whether the step is computed again, for which tensors are kept."""
    indices: list[int] | None = None
    """Which rows of the dataset this process has."""
    loss: Tensor | None = None
    """The sum of all losses."""
    loss_weight: float | None = None
    """Over how many items it is a sum; None where nobody said."""
    targets: list[Any] = field(default_factory=list)
    """One for each loss."""
    trace: Trace | None = None

    def note_batch(self, indices: Sequence[int]) -> None:
        """Say which rows of the dataset this worker's batch has, in order."""
        self.indices = [int(index) for index in indices]

    def note_loss(self, loss: Tensor, weight: float | None = None, targets: Any = None) -> None:
        """Say what the loss is, before backward; of several, their sum is shown.

        `weight` is over how many items it is a sum, where it is not what `weighted()` was told.
        With `targets`, and a `loss_fn` for the whole step, the check computes the loss of the whole
        batch too.
        """
        self.targets.append(tree.map_tensors(lambda tensor: tensor.detach().clone(), targets))
        value = loss.detach().clone()
        self.loss = value if self.loss is None else self.loss + value
        if weight is not None:
            self.loss_weight = (self.loss_weight or 0.0) + weight

    def read_weight(self, tensors: Mapping[str, Tensor]) -> float | None:
        """The followed weight in one of several tensors by name."""
        return None if self.weight is None else self.weight.read(tensors)


def facts_of(name: str, tensor: Tensor, *, values: bool) -> TensorFacts:
    """What is kept of a tensor; of its values only the first, and only if `values` were asked for.

    Without them, statistics of a few values are left out too.
    """
    has_stats = values or tensor.numel() >= FEWEST_FOR_STATS
    return TensorFacts(
        name=name,
        shape=list(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        bytes=bytes_of(tensor),
        stats=_stats(tensor) if has_stats else None,
        first=first_values(tensor) if values else None,
    )


def tree_facts(name: str, value: Any, *, values: bool) -> list[TensorFacts]:
    """The facts of every tensor in a tree; a single one has the tree's own name."""
    named = list(tree.named_tensors(value, name))
    if len(named) == 1:
        named = [(name, named[0][1])]
    return [facts_of(path, tensor, values=values) for path, tensor in named]


def flat_facts(name: str, tensors: Mapping[str, Tensor], *, values: bool) -> list[TensorFacts]:
    """All tensors as one row of numbers; none where there are no real ones."""
    parts = [t.detach().reshape(-1) for t in tensors.values() if not t.is_complex()]
    if not parts:
        return []
    flat = torch.cat([part.to(parts[0].device, parts[0].dtype) for part in parts])
    return [facts_of(name, flat, values=values)]


def dataset_rows(dataset: Any) -> int | None:
    """Its length; None where there is no dataset, or one that does not know."""
    try:
        return None if dataset is None else len(dataset)
    except TypeError:
        return None


def dataset_facts(dataset: Any, like: Sequence[TensorFacts], *, values: bool) -> list[TensorFacts]:
    """The dataset as one tensor; none where it cannot be told from its rows, which are `like`."""
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, (tuple, list)) and tensors and isinstance(tensors[0], Tensor):
        return [facts_of("inputs", tensors[0], values=values)]
    rows = dataset_rows(dataset)
    if rows is None or not like or not like[0].shape:
        return []
    one, *extents = like[0].shape
    size = like[0].bytes // max(1, one) * rows
    dtype, shape = like[0].dtype, [rows, *extents]
    return [TensorFacts(name="inputs", shape=shape, dtype=dtype, device="", bytes=size)]


@torch.no_grad()
def _stats(tensor: Tensor) -> Stats | None:
    """Smallest, mean and largest value and the share of zeros; None without numbers to order."""
    if tensor.numel() == 0 or not _has_real_numbers(tensor):
        return None
    numbers = tensor.detach().double()
    zeros = (numbers == 0).double().mean()
    known = torch.stack([numbers.min(), numbers.mean(), numbers.max(), zeros]).tolist()
    return Stats(min=known[0], mean=known[1], max=known[2], zeros=known[3])


def first_values(tensor: Tensor) -> list[float] | None:
    """The first few values in row order; None where they are not real numbers."""
    if not _has_real_numbers(tensor):
        return None
    return [float(v) for v in tensor.detach().reshape(-1)[:FIRST_VALUES].double().tolist()]


def row_values(tensors: Sequence[Tensor], row: int, rows: int) -> list[float] | None:
    """The first values of one row of the first tensor that has so many rows."""
    found = next((t for t in tensors if t.dim() and t.shape[0] == rows), None)
    return None if found is None else first_values(found[row])


def bytes_of(value: Any) -> int:
    """The bytes of all tensors in a tree."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.tensors(value))


def _has_real_numbers(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_plain and not tensor.is_complex()


@dataclass(frozen=True, slots=True)
class WeightRef:
    """One element of one parameter."""

    name: str
    index: tuple[int, ...]

    def read(self, tensors: Mapping[str, Tensor]) -> float | None:
        """Its value in one of several tensors by name; None where there is no real number."""
        tensor = tensors.get(self.name)
        if tensor is None or tensor.is_complex():
            return None
        return float(tensor.detach()[self.index])

    def position_in(self, tensor: Tensor) -> int:
        """Which element it is, in row order."""
        position = 0
        for i, extent in zip(self.index, tensor.shape, strict=True):
            position = position * extent + i
        return position


def find_weight(text: str | None, parameters: Mapping[str, Tensor]) -> WeightRef | None:
    """The weight that `name[1,2]` means; without text the first of all, and None without any."""
    if text is None:
        real = ((n, p) for n, p in parameters.items() if p.numel() and not p.is_complex())
        first = next(real, None)
        return None if first is None else WeightRef(first[0], (0,) * first[1].dim())
    name, bracket, rest = text.strip().partition("[")
    if name not in parameters:
        near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.4)
        listed = list(parameters)
        raise UsageError(
            f"The model has no trained parameter {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "."),
            advice=f"Its parameters are {', '.join(listed[:8])}{', ...' if listed[8:] else ''}.",
        )
    shape = tuple(parameters[name].shape)
    index = tuple(map(int, re.findall(r"\d+", rest))) or (0,) * len(shape)
    is_written_well = not bracket or re.fullmatch(r"[\d,\s]*\]", rest)
    is_inside = len(index) == len(shape) and all(map(lt, index, shape))
    if not is_written_well or not is_inside:
        example = f"{name}[{', '.join('0' for _ in shape)}]" if shape else name
        raise UsageError(
            f"{text!r} is not one element of {name!r}, whose shape is {shape}.",
            advice=f"Write it like {example}.",
        )
    return WeightRef(name, index)
