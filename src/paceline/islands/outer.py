"""The outer loop: averages the parameters of several islands.

    anchor --(inner steps)--> local          difference = local - anchor, packed and sent
    average of the differences of all islands, weighted by their samples
    next = anchor + lr * step(average)       the same bits on every worker of every island

The rounding error of packing is kept and added to the next difference (error feedback). A delayed
exchange adds its change to the current parameters, so the steps in between are kept.

All of it runs on the device of the parameters, and nothing waits for the device. Values are
processed in pieces, so that temporary tensors are small and their memory is reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.islands.bits import pack, packed_bytes, unpack
from paceline.islands.options import Islands
from paceline.torch_private import foreach_add_, foreach_copy_

PIECE = 2**20
"""How many values are packed together. Equal on all islands: it decides the order of the bytes."""
DEVICE_PIECE = 2**24
"""The same on a GPU, for which a small piece is all launches; not with 8 bits, whose order of the
bytes it would change."""


class ExchangeStats(NamedTuple):
    """Statistics of one exchange, on the device."""

    drift: Tensor
    """How far the islands are apart: root mean square distance from their average."""
    length: Tensor
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
        self.velocity = None if self._is_plain else torch.zeros_like(self.anchor)
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

    def begin(self, out: Tensor) -> None:
        """Begin an exchange; writes the packed difference since the last one to `out`."""
        self.local = self.read()
        for piece, place in self._pieces():
            out[place].copy_(pack(self._difference(piece), self.bits))

    def finish(
        self,
        weights: Sequence[float],
        sent: Sequence[Tensor],
        own: int,
        momentum: float,
        *,
        has_moved: bool,
    ) -> ExchangeStats:
        """Apply the differences of all islands, in the same order on every worker.

        `has_moved`: the parameters have changed since the exchange began.
        """
        assert self.local is not None
        total, zero = sum(weights), self.anchor.new_zeros(())
        apart, lengths = [zero], [zero]
        for piece, place in self._pieces():
            moves = [unpack(each[place], self.anchor[piece], self.bits) for each in sent]
            average = torch.zeros_like(self.anchor[piece])
            for weight, move in zip(weights, moves, strict=True):
                average.add_(move, alpha=weight / total)
            if self.rest is not None:
                # Before the anchor moves, from which the difference is taken.
                self.rest[piece] = self._difference(piece).sub_(moves[own])
            distances = [(move - average).square_().sum() for move in moves]
            apart.append(torch.stack(distances).mean())
            lengths.append(average.square().sum())
            self._step(piece, average, momentum)
        self._write(has_moved=has_moved)
        return _total(apart, lengths)

    def finish_alone(self, momentum: float) -> ExchangeStats:
        """`finish` for a single island, whose parameters are the average."""
        assert self.local is not None
        zero = self.anchor.new_zeros(())
        lengths = [zero]
        for piece, _ in self._pieces():
            average = self.local[piece] - self.anchor[piece]
            lengths.append(average.square().sum())
            if not self._is_plain:
                self._step(piece, average, momentum)
        if self._is_plain:
            self.anchor, self.local = self.local, None
        else:
            self._write(has_moved=False)
        return _total([zero], lengths)

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """For each piece, the range of its values and that of its packed bytes."""
        count, at = self.anchor.numel(), 0
        size = PIECE if self.anchor.is_cpu or self.bits == 8 else DEVICE_PIECE
        for start in range(0, count, size):
            stop = min(start + size, count)
            end = at + packed_bytes(stop - start, self.dtype, self.bits)
            yield slice(start, stop), slice(at, end)
            at = end

    def _difference(self, piece: slice) -> Tensor:
        assert self.local is not None
        difference = self.local[piece] - self.anchor[piece]
        return difference if self.rest is None else difference.add_(self.rest[piece])

    def _step(self, piece: slice, step: Tensor, momentum: float) -> None:
        """Step the outer optimizer for one piece, of which `step` is the average difference."""
        if self.velocity is not None:
            velocity = self.velocity[piece].mul_(momentum).add_(step)
            is_nesterov = self._options.outer == "nesterov"
            step = (
                step + velocity * momentum if is_nesterov else velocity
            ) * self._options.outer_lr
        self.anchor[piece] += step

    def _write(self, *, has_moved: bool) -> None:
        """Move to the common parameters, keeping the steps since the exchange began."""
        assert self.local is not None
        values = self.local.neg_().add_(self.anchor) if has_moved else self.anchor
        tensors = [tensor.detach() for tensor in self.tensors]
        flats = torch.split(values, [tensor.numel() for tensor in tensors])
        parts = [flat.view_as(tensor) for flat, tensor in zip(flats, tensors, strict=True)]
        (foreach_add_ if has_moved else foreach_copy_)(tensors, parts)
        self.local = None


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
        self.highest_rate = 0.0
        """The highest learning rate of this island at the start of an exchange."""
        self.rate = 1.0
        """The learning rate where the last exchange began, relative to the highest."""
        self.payload: Tensor | None = None
        """The bytes of the exchange in flight; never written to again."""

    def anchor_here(self) -> None:
        """Take the current parameters as the common ones, with which all islands begin."""
        for fragment in self.fragments:
            fragment.anchor = fragment.read()

    def begin(
        self, step: int, numbers: Sequence[int], rate: float = 0.0, *, is_last: bool = False
    ) -> Tensor:
        """Begin to exchange fragments after a step with this learning rate; the bytes to send."""
        self.step, self.highest_rate = step, max(self.highest_rate, rate)
        # After the last round no island trains on: it counts as one at the highest rate.
        self.rate = 1.0 if is_last or not self.highest_rate else rate / self.highest_rate
        found = self.select(numbers)
        sizes = [each.packed_bytes for each in found]
        device = found[0].anchor.device
        self.payload = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for fragment, out in zip(found, torch.split(self.payload, sizes), strict=True):
            fragment.begin(out)
        return self.payload

    def select(self, numbers: Sequence[int]) -> list[Fragment]:
        """The fragments with these numbers; statistics come with the last one."""
        found = [self.fragments[number] for number in numbers]
        if numbers and numbers[-1] == self.options.fragments - 1:
            found += self.fragments[self.options.fragments :]
        return found

    def finish(
        self,
        numbers: Sequence[int],
        weights: Sequence[Sequence[float]],
        sent: Sequence[Tensor],
        own: int,
        *,
        rate: float = 1.0,
        has_moved: bool = False,
    ) -> ExchangeStats:
        """Apply an exchange. `weights` by island and fragment; `sent` by island, on any device.

        `rate`: the learning rate on the islands, relative to its highest.
        """
        found, start, shifts = self.select(numbers), 0, []
        momentum = self.options.momentum_at(rate)
        device = found[0].anchor.device
        here = [each.to(device, non_blocking=True) for each in sent]
        for place, fragment in enumerate(found):
            stop = start + fragment.packed_bytes
            # Statistics have the weight of the fragment that they come with.
            own_weights = [each[min(place, len(each) - 1)] for each in weights]
            parts = [each[start:stop] for each in here]
            shifts.append(fragment.finish(own_weights, parts, own, momentum, has_moved=has_moved))
            start = stop
        self.payload = None
        return _join(shifts)

    def finish_alone(self, numbers: Sequence[int]) -> ExchangeStats:
        momentum = self.options.momentum_at(self.rate)
        shifts = [fragment.finish_alone(momentum) for fragment in self.select(numbers)]
        self.payload = None
        return _join(shifts)

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
        names = ("anchor", "velocity", "rest", "local")
        kept = [{name: getattr(each, name) for name in names} for each in self.fragments]
        return {
            "step": self.step,
            "must_join": self.must_join,
            "payload": self.payload,
            "rates": (self.highest_rate, self.rate),
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
                if copy is None and name in ("velocity", "rest"):
                    # The checkpoint had other outer options: begin with zeros.
                    copy = None if getattr(fragment, name) is None else torch.zeros_like(like)
                if name in ("velocity", "rest") and getattr(fragment, name) is None:
                    copy = None
                setattr(fragment, name, copy)
        self.step, self.must_join = state["step"], state["must_join"]
        self.highest_rate, self.rate = state["rates"]
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


def _total(apart: Sequence[Tensor], lengths: Sequence[Tensor]) -> ExchangeStats:
    drift, length = (torch.stack([each.float() for each in some]) for some in (apart, lengths))
    return ExchangeStats(drift.sum().sqrt(), length.sum().sqrt())


def _join(shifts: Sequence[ExchangeStats]) -> ExchangeStats:
    return _total([each.drift.square() for each in shifts], [e.length.square() for e in shifts])
