"""The outer loop: averages the parameters of several islands.

    anchor --(inner steps)--> local          difference = local - anchor, packed and sent
    average of the differences of all islands, weighted by their samples
    next = anchor + lr * step(average)       the same bits on every worker of every island

The rounding error of packing is kept and added to the next difference (error feedback). A delayed
exchange adds its change to the current parameters, so the steps in between are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.islands.bits import pack, packed_bytes, unpack
from paceline.islands.options import Islands


class Shift(NamedTuple):
    """Statistics of one exchange."""

    drift: float
    """How far the islands are apart: root mean square distance from their average."""
    length: float
    """How far their average has moved."""


class Fragment:
    """Tensors that are exchanged together, as one flat vector."""

    def __init__(self, tensors: Sequence[Tensor], options: Islands, *, is_plain: bool) -> None:
        """`is_plain`: tensors such as statistics, which are only averaged."""
        self.tensors, self._options = tensors, options
        self.bits = 32 if is_plain else options.bits
        self._is_plain = is_plain or options.assigns_average
        dtypes = {tensor.dtype for tensor in tensors}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.anchor = self.read()
        self.momentum = None if self._is_plain else torch.zeros_like(self.anchor)
        self.rest = None if self.bits == 32 else torch.zeros_like(self.anchor)
        """The rounding error of packing, for error feedback."""
        self.local: Tensor | None = None
        """The parameters as they were when the exchange began."""

    @property
    def packed_bytes(self) -> int:
        return packed_bytes(self.anchor.numel(), self.dtype, self.bits)

    def read(self) -> Tensor:
        """The current parameters as one flat vector."""
        return torch.cat([t.detach().reshape(-1).to(self.dtype) for t in self.tensors])

    def write(self, values: Tensor) -> None:
        start = 0
        for tensor in self.tensors:
            stop = start + tensor.numel()
            tensor.detach().copy_(values[start:stop].view_as(tensor))
            start = stop

    def begin(self) -> Tensor:
        """Begin an exchange; returns the packed difference since the last one."""
        self.local = self.read()
        return pack(self._difference(self.local), self.bits)

    def _difference(self, local: Tensor) -> Tensor:
        difference = local - self.anchor
        return difference if self.rest is None else difference.add_(self.rest)

    def finish(self, weights: Sequence[float], sent: Sequence[Tensor], own: int) -> Shift:
        """Apply the differences of all islands, in the same order on every worker."""
        assert self.local is not None
        moves = [unpack(each, self.anchor, self.bits) for each in sent]
        total = sum(weights)
        average = torch.zeros_like(self.anchor)
        for weight, move in zip(weights, moves, strict=True):
            average.add_(move, alpha=weight / total)
        if self.rest is not None:
            self.rest = self._difference(self.local).sub_(moves[own])
        apart = torch.stack([(move - average).square().sum() for move in moves]).mean().sqrt()
        shift = Shift(float(apart), float(average.norm()))
        self._move(self.anchor + average if self._is_plain else self._step(average))
        return shift

    def finish_alone(self) -> Shift:
        """`finish` for a single island, whose parameters are the average."""
        assert self.local is not None
        average = self.local - self.anchor
        self._move(self.local if self._is_plain else self._step(average))
        return Shift(0.0, float(average.norm()))

    def _step(self, average: Tensor) -> Tensor:
        options = self._options
        assert self.momentum is not None
        self.momentum = self.momentum * options.inertia + average
        step = self.momentum
        if options.outer == "nesterov":
            step = average + self.momentum * options.inertia
        return self.anchor + step * options.lr

    def _move(self, new: Tensor) -> None:
        """Move to the common parameters, keeping the steps since the exchange began."""
        assert self.local is not None
        now = self.read()
        if torch.equal(now, self.local):
            if new is not self.local:
                self.write(new)
        else:
            self.write(now + (new - self.local))
        self.anchor, self.local = new, None


class Outer:
    """All fragments and the exchange in flight; a part of the run's state."""

    def __init__(
        self, params: Sequence[Tensor], statistics: Sequence[Tensor], options: Islands
    ) -> None:
        """`statistics` are averaged with the last fragment."""
        self.options = options
        groups = cut(params, options.fragments)
        self.fragments = [Fragment(group, options, is_plain=False) for group in groups]
        if statistics:
            self.fragments.append(Fragment(statistics, options, is_plain=True))
        self.must_join = True
        """Whether this island must join the others before it trains."""
        self.step = 0
        """The step after which the last exchange began."""
        self.payload: Tensor | None = None
        """The bytes of the exchange in flight."""

    def anchor_here(self) -> None:
        """Take the current parameters as the common ones, with which all islands begin."""
        for fragment in self.fragments:
            fragment.anchor = fragment.read()

    def begin(self, step: int, numbers: Sequence[int]) -> Tensor:
        """Begin to exchange fragments; returns the bytes to send."""
        self.step = step
        self.payload = torch.cat([each.begin() for each in self.select(numbers)])
        return self.payload

    def select(self, numbers: Sequence[int]) -> list[Fragment]:
        """The fragments with these numbers; statistics come with the last one."""
        found = [self.fragments[number] for number in numbers]
        if numbers and numbers[-1] == self.options.fragments - 1:
            found += self.fragments[self.options.fragments :]
        return found

    def finish(
        self, numbers: Sequence[int], weights: Sequence[Sequence[float]], sent: Tensor, own: int
    ) -> Shift:
        """Apply an exchange. `weights` by island and fragment; `sent` concatenates the islands."""
        found, start, shifts = self.select(numbers), 0, []
        of_islands = sent.view(len(weights), -1)
        for place, fragment in enumerate(found):
            stop = start + fragment.packed_bytes
            # Statistics have the weight of the fragment that they come with.
            own_weights = [each[min(place, len(each) - 1)] for each in weights]
            shifts.append(fragment.finish(own_weights, list(of_islands[:, start:stop]), own))
            start = stop
        self.payload = None
        return _total(shifts)

    def finish_alone(self, numbers: Sequence[int]) -> Shift:
        shifts = [fragment.finish_alone() for fragment in self.select(numbers)]
        self.payload = None
        return _total(shifts)

    def drop(self) -> None:
        """Abandon the exchange in flight: the others have continued without it."""
        self.payload = None
        for fragment in self.fragments:
            fragment.local = None

    def forget_rest(self) -> None:
        """Clear the rounding errors: they belong to parameters that were replaced."""
        for fragment in self.fragments:
            if fragment.rest is not None:
                fragment.rest = torch.zeros_like(fragment.rest)

    def state_dict(self) -> dict[str, Any]:
        names = ("anchor", "momentum", "rest", "local")
        kept = [{name: getattr(each, name) for name in names} for each in self.fragments]
        return {
            "step": self.step,
            "must_join": self.must_join,
            "payload": self.payload,
            "fragments": kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state["fragments"]
        if len(saved) != len(self.fragments):
            raise ValueError(f"it has {len(saved)} fragments, and there are {len(self.fragments)}")
        for fragment, each in zip(self.fragments, saved, strict=True):
            if each["anchor"].numel() != fragment.anchor.numel():
                raise ValueError("its fragments are cut in another way")
            like = fragment.anchor
            for name, value in each.items():
                copy = None if value is None else value.to(like.device, like.dtype).clone()
                if copy is None and name in ("momentum", "rest"):
                    # The checkpoint had other outer options: begin with zeros.
                    copy = None if getattr(fragment, name) is None else torch.zeros_like(like)
                if name in ("momentum", "rest") and getattr(fragment, name) is None:
                    copy = None
                setattr(fragment, name, copy)
        self.step, self.must_join = state["step"], state["must_join"]
        self.payload = None if state["payload"] is None else state["payload"].clone()


def cut(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Split into `count` consecutive groups of about equally many elements, none empty."""
    total, done = sum(tensor.numel() for tensor in tensors), 0
    groups: list[list[Tensor]] = []
    group: list[Tensor] = []
    for place, tensor in enumerate(tensors):
        group.append(tensor)
        done += tensor.numel()
        left = len(tensors) - place - 1
        is_full = done * count >= total * (len(groups) + 1) and len(groups) < count - 1
        if is_full or (left and left == count - len(groups) - 1):
            groups.append(group)
            group = []
    return [*groups, group]


def _total(shifts: Sequence[Shift]) -> Shift:
    drift = sum(each.drift**2 for each in shifts) ** 0.5
    return Shift(drift, sum(each.length**2 for each in shifts) ** 0.5)
