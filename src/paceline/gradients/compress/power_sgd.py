"""PowerSGD: a gradient matrix travels as two thin ones, and what they miss travels later.

    M = gradient + what was left out before           n x m, different on every rank
    P = orthonormal(sum of M Q)                       n x r, first message, the same everywhere
    Q = mean of transposed(M) P                       m x r, second message, the same everywhere
    the averaged gradient is P transposed(Q); Q is where the next step starts looking

It is one step of power iteration on the mean of all M, whose steps add up because gradients
change slowly. After Vogels, Karimireddy and Jaggi, "PowerSGD", 2019. State is kept by parameter,
not by bucket, as buckets are laid out anew.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Group
from paceline.errors import UsageError
from paceline.gradients.compress.codec import Compression, NamedBucket, Scale
from paceline.gradients.compress.spec import PowerSGD


@dataclass(slots=True)
class Matrix:
    """One gradient on its way: `value` is what this rank wants the others to add."""

    name: str
    gradient: Tensor
    value: Tensor
    columns: int
    p: Tensor
    q: Tensor


class LowRank(Compression):
    """Sends thin factors of matrices; vectors, small matrices and the first steps as they are.

    Invariant: what was applied so far plus the mean over the ranks of what they have left out is
    the sum of all gradients so far, up to rounding.
    """

    spec: PowerSGD

    def __init__(self, spec: PowerSGD, group: Group) -> None:
        super().__init__(spec, group)
        self._left_out: dict[str, Tensor] = {}
        """By parameter, as a share of an averaged gradient: another on every rank."""
        self._directions: dict[str, Tensor] = {}
        """By parameter, the last Q: the same on every rank."""

    @property
    def needs_scale(self) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: `left_out` belongs to the rank, the rest is the same on all."""
        return {
            **super().state_dict(),
            "left_out": {name: tensor.clone() for name, tensor in self._left_out.items()},
            "directions": {name: tensor.clone() for name, tensor in self._directions.items()},
        }

    def averaged_state_dict(self) -> dict[str, Any]:
        """One state for all ranks: each goes on with the mean of what all have left out.

        Only that mean ever reaches the model, so nothing is lost, whatever the next size is.
        """
        state = self.state_dict()
        for name in sorted(state["left_out"]):
            tensor = state["left_out"][name].div_(self.size)
            comm.all_reduce(self.group, tensor, f"Averaging what was left out of {name!r}")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._left_out = {name: tensor.clone() for name, tensor in state["left_out"].items()}
        self._directions = {name: tensor.clone() for name, tensor in state["directions"].items()}

    def _start(self, bucket: NamedBucket, flat: Tensor) -> Callable[[], Tensor]:
        index = bucket.index()
        if self.steps <= self.spec.start_step or not flat.is_floating_point():
            flat.div_(self.size)
            pending = self._sum(index, flat, "the gradients")

            def finish_exact() -> Tensor:
                pending.wait()
                return flat

            return finish_exact

        matrices: list[Matrix] = []
        others: list[Tensor] = []
        for name, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
            shape = matrix_shape(gradient.shape, self.spec)
            if shape is None:
                others.append(gradient)
            else:
                matrices.append(self._matrix(name, gradient, *shape))
        first = [*(matrix.p for matrix in matrices), *(other / self.size for other in others)]
        message = _pack(first, flat.dtype)
        pending = self._sum(index, message, "first factors and small gradients")
        scale = self.scale

        def finish() -> Tensor:
            pending.wait()
            with torch.no_grad():
                received = _unpack(message, first)
                for other, mean in zip(others, received[len(matrices) :], strict=True):
                    other.copy_(mean)
                if matrices:
                    self._finish(index, matrices, received[: len(matrices)], flat.dtype, scale)
            return flat

        return finish

    def _matrix(self, name: str, gradient: Tensor, rows: int, columns: int) -> Matrix:
        wide = torch.float64 if gradient.dtype is torch.float64 else torch.float32
        value = gradient.reshape(rows, columns).to(wide, copy=True)
        left_out = self._left_out.get(name)
        if left_out is not None:
            self._check_shape(name, "left_out", left_out, value.shape)
            left_out = left_out.to(value)
            value.add_(left_out if self.scale.is_one else left_out * self.scale.or_one)
        rank = min(self.spec.rank, rows, columns)
        q = self._directions.get(name)
        if q is None:
            q = first_directions(name, columns, rank, self.spec.seed)
        self._check_shape(name, "directions", q, (columns, rank))
        q = orthonormal(q.to(value))
        return Matrix(name, gradient, value, columns, value @ q, q)

    def _finish(
        self,
        index: int,
        matrices: list[Matrix],
        factors: Sequence[Tensor],
        dtype: torch.dtype,
        scale: Scale,
    ) -> None:
        for matrix, factor in zip(matrices, factors, strict=True):
            matrix.p = orthonormal(factor.to(matrix.value))
        mine = [matrix.value.T @ matrix.p for matrix in matrices]
        message = _pack([q / self.size for q in mine], dtype)
        sent = [part.to(q) for part, q in zip(_unpack(message.clone(), mine), mine, strict=True)]
        self._sum(index, message, "second factors").wait()
        for matrix, part, q in zip(matrices, sent, _unpack(message, mine), strict=True):
            q = q.to(matrix.value)
            mean = matrix.p @ q.T
            matrix.gradient.copy_(mean.view(matrix.gradient.shape))
            self._remember(matrix, part.mul_(self.size), q, scale)

    def _remember(self, matrix: Matrix, sent: Tensor, q: Tensor, scale: Scale) -> None:
        """Keep what was left out, unless the step is spoiled: its values are not finite, or no
        rank had any item. Then all ranks know, and all go on from the step before."""
        name, value = matrix.name, matrix.value
        left_out = value.addmm_(matrix.p, sent.T, alpha=-1)
        if not scale.is_one:
            left_out.div_(scale.or_one)
        is_good = torch.isfinite(q).all() & scale.has_items
        before = self._left_out.get(name)
        before = torch.zeros_like(left_out) if before is None else before.to(left_out)
        self._left_out[name] = torch.where(is_good, left_out, before)
        self._directions[name] = torch.where(is_good, q, matrix.q)

    def _check_shape(self, name: str, what: str, tensor: Tensor, shape: Sequence[int]) -> None:
        if tuple(tensor.shape) != tuple(shape):
            raise UsageError(
                f"PowerSGD: {what} of {name!r} is {tuple(tensor.shape)} in the loaded state, "
                f"but {tuple(shape)} is needed.",
                advice="Load a state that was saved with this model and this rank of compression.",
            )


def matrix_shape(shape: Sequence[int], spec: PowerSGD) -> tuple[int, int] | None:
    """A gradient's rows and columns as a matrix, or None if it is to be sent as it is."""
    if len(shape) < 2 or 0 in shape:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(spec.rank, rows, columns)
    return (rows, columns) if rows * columns >= spec.min_ratio * (rows + columns) * rank else None


def first_directions(name: str, rows: int, rank: int, seed: int) -> Tensor:
    """Random numbers that depend on the parameter's name and the seed alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (seed & 0xFFFFFFFF))
    return torch.randn(rows, rank, generator=generator)


def orthonormal(matrix: Tensor) -> Tensor:
    """Orthonormal columns that span what the given ones span; of zeros too, and NaN of others.

    Householder reflections stay orthonormal where columns are dependent or of any size.
    """
    # LAPACK makes no promises about values that are not finite.
    is_finite = torch.isfinite(matrix).all()
    q: Tensor = torch.linalg.qr(torch.where(is_finite, matrix, 0.0)).Q
    return torch.where(is_finite, q, float("nan"))


def _pack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])


def _unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(message, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
