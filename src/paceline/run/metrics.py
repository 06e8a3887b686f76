"""What a run logs: sums and counts, kept where they were computed and read late.

A metric of a step is a weighted mean, kept as a sum and a count so that steps and workers can be
put together exactly. Tensors stay on their device until the step is long over; then its event is
written, and its sums are added to those of the epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.host_copy import Late

Sums = dict[str, list[float]]
"""Name to [sum, count]."""

_MOST_PENDING = 64


@dataclass(slots=True)
class _Part:
    """The sum, or the count, of one metric of one step: numbers and tensors apart."""

    number: float = 0.0
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, value: float | Tensor) -> None:
        if isinstance(value, Tensor):
            self.tensors.append(value.detach())
        else:
            self.number += float(value)


@dataclass(slots=True)
class _Pending:
    facts: dict[str, Any]
    entries: dict[str, tuple[_Part, _Part]]
    """Name to sum and count."""
    values: Late | None
    """Those of all tensors, in the order of the entries."""


class Metrics:
    """The metrics of the step under way, of steps whose numbers are on their way, of the epoch."""

    def __init__(self, write: Callable[[dict[str, Any], Sums], None]) -> None:
        """`write(facts, sums)` is called once per step, in order, some time after it."""
        self.epoch: Sums = {}
        self.last: Sums = {}
        """Those of the newest step whose numbers have arrived."""
        self._write = write
        self._now: dict[str, tuple[_Part, _Part]] = {}
        self._pending: deque[_Pending] = deque()

    def add(self, name: str, value: float | Tensor, weight: float | Tensor) -> None:
        """Add a mean over `weight` items."""
        is_plain = not isinstance(weight, Tensor) and weight == 1
        self.add_sum(name, value if is_plain else value * weight, weight)

    def add_sum(self, name: str, value: float | Tensor, count: float | Tensor) -> None:
        """Add a sum over `count` items."""
        entry = self._now.get(name)
        if entry is None:
            entry = self._now[_checked(name)] = _Part(), _Part()
        for part, each in zip(entry, (value, count), strict=True):
            if isinstance(each, Tensor) and each.numel() != 1:
                raise UsageError(
                    f"The metric {name!r} has {each.numel()} elements.",
                    advice="Log one number: a mean, and over how many items as weight=.",
                )
            part.add(each)

    def forget(self) -> None:
        """The step under way will not be finished."""
        self._now = {}

    def end_step(self, facts: dict[str, Any]) -> None:
        """Close the step under way; write those that have arrived."""
        entries, self._now = self._now, {}
        tensors = [each for entry in entries.values() for part in entry for each in part.tensors]
        self._pending.append(_Pending(facts, entries, _together(tensors)))
        self.flush(wait=len(self._pending) > _MOST_PENDING)

    def flush(self, *, wait: bool) -> None:
        """Write the steps whose numbers have arrived, or, with `wait`, all of them."""
        while self._pending:
            first = self._pending[0]
            if not wait and first.values is not None and not first.values.is_here:
                return
            self._pending.popleft()
            sums = _sums(first)
            self.last = sums
            merge(self.epoch, sums)
            self._write(first.facts, sums)

    def take_epoch(self) -> Sums:
        """This worker's sums of the epoch, which is over."""
        self.flush(wait=True)
        taken, self.epoch = self.epoch, {}
        return taken


def merge(into: Sums, sums: Mapping[str, Any]) -> None:
    """Add sums and counts by name."""
    for name, (total, count) in sums.items():
        have = into.setdefault(name, [0.0, 0.0])
        have[0] += total
        have[1] += count


def means(sums: Mapping[str, Any]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sums.items() if count}


def _together(tensors: list[Tensor]) -> Late | None:
    """One message to the host for all of them."""
    if not tensors:
        return None
    device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
    wide = torch.float64 if device.type in {"cpu", "cuda"} else torch.float32
    return Late(torch.stack([t.to(device, wide, non_blocking=True).reshape(()) for t in tensors]))


def _sums(pending: _Pending) -> Sums:
    values = iter([] if pending.values is None else pending.values.read().tolist())
    return {
        name: [part.number + sum(islice(values, len(part.tensors))) for part in entry]
        for name, entry in pending.entries.items()
    }


def _checked(name: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        raise UsageError(f"A metric cannot be named {name!r}.", advice="Use a short string.")
    return name
