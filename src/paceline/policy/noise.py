"""The gradient noise scale: up to which size a larger batch helps.

A batch's gradient is the true gradient plus noise, and the noise shrinks with the batch. Their
ratio, the noise scale, is the batch size at which both are equal: far below it, twice the batch
halves the steps; far above it, twice the batch changes little. It is measured by comparing the
squared norms of the shards' gradients with that of the whole batch: docs/policy.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import check_whole
from paceline.group import Group, exchange, word_device
from paceline.torch_private import foreach_norm

HORIZON = 50.0
"""About how many measurements the running averages cover."""
_FEWEST = 5
"""With fewer measurements there is no estimate."""
_HELPS = 0.25
_SLOTS, _COLUMNS = 32, 5
"""How many measurements are kept until the next reading, and how many numbers each has."""
_SMALL = 2**14
"""Gradients of up to this many elements are measured together."""
_NARROW = {torch.float16, torch.bfloat16}


def from_shards(
    shards: int, rows: float, weighted_squares: float, whole_squared: float
) -> tuple[float, float]:
    """Unbiased estimates of the true gradient's squared norm, and of one row's variance.

    `weighted_squares` is the sum, over the two or more shards that have rows, of rows times the
    squared norm of the shard's mean gradient; `whole_squared` is the squared norm of the batch's.
    The first estimate may be negative: a single measurement is inaccurate.
    """
    noise = (weighted_squares - rows * whole_squared) / (shards - 1)
    return whole_squared - noise / rows, noise


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """The estimate from the measurements so far."""

    noise_scale: float
    """In rows, or in the items that losses were weighted by; infinite if the signal is too weak."""
    batch: float
    """The global batch that was measured with, in the same unit."""
    measurements: int

    @property
    def fewer_steps(self) -> float:
        """The share of the steps that a batch twice as large would save, from 0 to a half."""
        return 0.5 / (1.0 + self.batch / self.noise_scale) if self.noise_scale else 0.0

    @property
    def advice(self) -> str:
        """Whether more workers would still help, in words."""
        scale = "above anything measurable"
        if math.isfinite(self.noise_scale):  # an estimate should not look like a measurement
            scale = f"about {float(f'{self.noise_scale:.2g}'):,.0f}"
        helps = "still help" if self.fewer_steps >= _HELPS else "hardly help"
        return (
            f"The gradient noise scale is {scale}, the global batch {self.batch:,.0f}. "
            f"More workers {helps}: twice the batch would save about {self.fewer_steps:.0%} of the "
            "steps."
        )


class NoiseScale:
    """Averages signal and noise over time separately, then takes their ratio.

    The mean of the ratios would be wrong, and often infinite.
    """

    def __init__(self) -> None:
        self.measurements = 0
        self._signal = self._noise = self._batch = 0.0

    def add(self, signal: float, noise: float, batch: float) -> None:
        """Add one measurement; one that is not finite, as after an overflow, is ignored."""
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return
        self.measurements += 1
        share = 1.0 / min(self.measurements, HORIZON)
        self._signal += share * (signal - self._signal)
        self._noise += share * (noise - self._noise)
        self._batch += share * (batch - self._batch)

    def state_dict(self) -> dict[str, float]:
        names = ("measurements", "_signal", "_noise", "_batch")
        return {name.removeprefix("_"): getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.measurements = int(state["measurements"])
        self._signal, self._noise, self._batch = (state[n] for n in ("signal", "noise", "batch"))

    def estimate(self) -> NoiseEstimate | None:
        """None while there are too few measurements."""
        if self.measurements < _FEWEST:
            return None
        noise = max(self._noise, 0.0)
        scale = noise / self._signal if self._signal > 0.0 else math.inf
        return NoiseEstimate(scale, self._batch, self.measurements)


class NoiseMeter:
    """Measures the noise scale of one model on all ranks of a group.

        idle --begin (every so many steps)--> measuring --add, once per shard--> --end--> idle

    A hook on each parameter, registered only in measured steps, sees each shard's own gradient; the
    whole batch's gradient is the one that the optimizer gets. No gradient is copied, and nothing is
    read from the device until `read`.

    All ranks call `begin` with the same steps, so they measure in the same steps, and all call
    `read` together. In between there is no communication.
    """

    def __init__(self, parameters: Iterable[Parameter], *, every: int = 20) -> None:
        check_whole("every", every)
        self.every = every
        self.scale = NoiseScale()
        self._parameters: Sequence[Parameter] = list(parameters)
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._handles: list[Any] = []
        self._step = 0
        self._measured_by_slot: dict[int, Tensor] = {}
        self._added: list[Any] = []
        self.cancel()

    def cancel(self) -> None:
        """Forget the step that is being measured."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._measured: list[Parameter] = []
        self._seen: set[int] = set()
        self._is_invalid = False
        self._small: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._rows = 0.0

    def forget(self) -> None:
        """Ranks have changed: what is not read yet was measured on others, who may be gone."""
        self._measured_by_slot = {}

    @property
    def is_measuring(self) -> bool:
        return bool(self._handles)

    def begin(self, step: int) -> bool:
        """A step begins; whether it is measured: its number alone decides, so all ranks agree."""
        self.cancel()  # the step before may have failed between `begin` and `end`
        if step % self.every:
            return False
        self._step = step
        self._measured = [p for p in self._parameters if p.requires_grad]
        for number, parameter in enumerate(self._measured):
            hook = partial(self._on_grad, number)
            self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
        return self.is_measuring

    def add(self, rows: float, *, is_mean: bool = False) -> None:
        """Note that one shard's backward has ended; its loss was a sum over `rows`, or their mean.

        Between two calls there is one backward pass.
        """
        if not self.is_measuring:
            return
        norms = [*self._norms, *_norms(self._small)]
        self._norms, self._small, self._seen = [], [], set()
        if norms and rows > 0:
            self._squares.append(_rounded(_squared(norms) * (rows if is_mean else 1 / rows)))
            self._rows += rows

    @torch.no_grad()
    def end(self, *, scale: float = 1.0) -> None:
        """Measure the averaged gradients, before the optimizer changes them.

        `scale` is what a `GradScaler` has multiplied the losses with.
        """
        squares, rows = self._squares, self._rows
        grads = [p.grad for p in self._measured if p.grad is not None]
        is_usable = self.is_measuring and not self._is_invalid
        self.cancel()
        if not grads or not is_usable:
            return
        whole = _rounded(_squared(_norms(grads)))
        # Built on the device: a copy from the host would wait for everything before it.
        zero = torch.zeros_like(whole)
        weighted = sum((squared.to(whole.device) for squared in squares), zero) / scale**2
        counts = [zero + 1, whole / scale**2, zero + len(squares), zero + rows]
        words = torch.stack([*counts, weighted])
        self._measured_by_slot[self._step // self.every % _SLOTS] = words

    def read(self, group: Group | None) -> NoiseEstimate | None:
        """Combine the measurements of all ranks; None while there are too few.

        A collective: every rank calls it, at the same point. `None` is a world of one.
        """
        if group is None:
            return self.add_gathered([self.measurements()])
        where = word_device(group, self._device)
        return self.add_gathered(
            exchange(group, self.measurements(), where, "Adding up the gradient noise")
        )

    def measurements(self) -> list[list[float]]:
        """This rank's measurements since the last reading, for a caller that exchanges them."""
        table = torch.zeros(_SLOTS, _COLUMNS, dtype=torch.float64, device=self._device)
        for slot, words in self._measured_by_slot.items():
            table[slot] = words
        return table.tolist()

    def add_gathered(self, everyone: list[Any]) -> NoiseEstimate | None:
        """Like `read`, from the measurements of all ranks; adding the same twice has no effect."""
        if everyone != self._added:
            self._measured_by_slot, self._added = {}, everyone
            size, total = len(everyone), torch.tensor(everyone, dtype=torch.float64).sum(0)
            for ranks, whole, shards, rows, squares in total.tolist():
                # Skip a measurement in which a rank that joined later has no part.
                if ranks == size and shards >= 2 and rows > 0:
                    signal, noise = from_shards(int(shards), rows, squares, whole / size)
                    self.scale.add(signal, noise, batch=rows)
        return self.scale.estimate()

    def _on_grad(self, number: int, grad: Tensor) -> None:
        # A weight that several reentrant checkpoints share gets its gradient in pieces, whose norms
        # do not give the norm of their sum.
        self._is_invalid |= number in self._seen
        self._seen.add(number)
        if grad.numel() <= _SMALL and not grad.is_sparse:
            # Keeping a reference makes autograd copy the gradient; for small ones that is cheaper
            # than measuring each one separately.
            self._small.append(grad)
        else:
            self._norms += _norms([grad])


@torch.no_grad()
def _norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The norms of gradients, in a precision in which squares do not overflow."""
    values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
    wide = [value.float() if value.dtype in _NARROW else value for value in values]
    return list(foreach_norm(wide)) if wide else []


def _rounded(number: Tensor) -> Tensor:
    """Round to float32, so that a float64 sum of many is exact in any order of ranks."""
    return number.float().double()


def _squared(norms: Sequence[Tensor]) -> Tensor:
    """The squared norm of all together."""
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(norms[0].device, torch.float64) for norm in norms]
    return torch.stack(list(norms)).double().square().sum()
