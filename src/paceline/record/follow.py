"""Which sample and which weight are followed: from text to numbers, and where they are found."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.errors import UsageError
from paceline.record.facts import first_values
from paceline.record.watch import Call


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

    @property
    def text(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.index))}]" if self.index else self.name


def find_weight(text: str | None, parameters: Mapping[str, Tensor]) -> WeightRef | None:
    """The weight that `name[1,2]` means; without text the first of all, and None without any."""
    if text is None:
        real = ((n, p) for n, p in parameters.items() if p.numel() and not p.is_complex())
        first = next(real, None)
        return None if first is None else WeightRef(first[0], (0,) * first[1].dim())
    match = re.fullmatch(r"(.+?)(?:\[([\d,\s-]*)\])?", text.strip())
    name = match[1] if match else ""
    if name not in parameters:
        near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.4)
        raise UsageError(
            f"The model has no trained parameter {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "."),
            advice=f"Its parameters are {_list(parameters)}.",
        )
    shape = tuple(parameters[name].shape)
    said = (match[2] if match else None) or ""
    numbers = re.fullmatch(r"\s*(-?\d+\s*(,\s*-?\d+\s*)*)?,?\s*", said)
    index = tuple(int(part) for part in said.split(",") if part.strip()) if numbers else (-1,)
    if said.strip() == "":
        index = (0,) * len(shape)
    is_inside = all(0 <= i < n for i, n in zip(index, shape, strict=False))
    if len(index) != len(shape) or not is_inside:
        example = f"{name}[{', '.join('0' for _ in shape)}]" if shape else name
        raise UsageError(
            f"{text!r} is not one element of {name!r}, whose shape is {shape}.",
            advice=f"Write it like {example}.",
        )
    return WeightRef(name, index)


def _list(names: Mapping[str, Tensor]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")


@dataclass(frozen=True, slots=True)
class SampleSeen:
    """The followed sample at one worker: its row, what went in there and what came out."""

    row: int
    input: list[float] | None
    output: list[float] | None


def find_sample(row: int, calls: Sequence[Call], *, values: bool) -> SampleSeen | None:
    """The sample at a row of what one worker was given, counted over all its forward passes."""
    left = row
    for call in calls:
        rows = rows_of(call)
        if left < rows:
            return SampleSeen(
                row=row,
                input=_row(call.inputs, left, rows) if values else None,
                output=_row(call.outputs, left, rows) if values else None,
            )
        left -= rows
    return None


def rows_of(call: Call) -> int:
    first = next((tensor for tensor in call.inputs if tensor.dim()), None)
    return 0 if first is None else first.shape[0]


def _row(tensors: Sequence[Tensor], row: int, rows: int) -> list[float] | None:
    """The first values of one row of the first tensor that has so many rows."""
    found = next((t for t in tensors if t.dim() and t.shape[0] == rows), None)
    return None if found is None else first_values(found[row])
