"""Gradients that take fewer bytes on their way: torch's own hooks, with weights kept exact.

    "bf16"      half the bytes, float32's range, 8 bits of precision
    "fp16"      half the bytes, 11 bits of precision, values under 6e-8 vanish
    "powersgd"  a few columns instead of each matrix; what is left out is sent later

A hook gets local gradients and returns their mean over the ranks; the reducer turns that into a
weighted mean where losses are weighted. See Note [Weights].
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Membership
from paceline.errors import UsageError, check_whole

__all__ = ["Compression", "PowerSGD", "hook", "parse"]

_NAMES = ["bf16", "fp16", "powersgd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Every large matrix travels as two thin ones; what they miss is added to the next step."""

    rank: int = 4
    """Columns of the thin matrices: more are closer to the gradient, and more bytes."""
    start_step: int = 10
    """Steps at the beginning that are sent as they are, while gradients change fastest."""
    min_ratio: float = 2.0
    """A tensor that would not shrink by at least this factor is sent as it is."""

    def __post_init__(self) -> None:
        check_whole("PowerSGD: rank", self.rank)
        check_whole("PowerSGD: start_step", self.start_step, 2)
        if not self.min_ratio >= 0:
            raise UsageError(
                f"PowerSGD: min_ratio is {self.min_ratio!r}.", advice="Pass a number from 0 up."
            )


def parse(spec: str | PowerSGD) -> str | PowerSGD:
    """What a name stands for, or an error if there is no such compression."""
    if spec in ("bf16", "fp16") or isinstance(spec, PowerSGD):
        return spec
    if spec == "powersgd":
        return PowerSGD()
    close = difflib.get_close_matches(str(spec).lower(), _NAMES, n=1, cutoff=0.5)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(
        f"compression is {spec!r}.{meant}",
        advice=f"Pass one of {', '.join(map(repr, _NAMES))}, or compress.PowerSGD(...).",
    )


class Compression:
    """Shrinks the buckets of one model on their way and counts what was sent; state of `hook`."""

    def __init__(self, spec: str | PowerSGD, membership: Membership) -> None:
        self.spec = parse(spec)
        self.weight: Callable[[], float] | None = None
        """How many items this rank's loss is a sum over; None where losses have no weights."""
        self.steps = 0
        """How many steps have begun."""
        self.bytes_before = 0
        """Bytes of all gradients that were reduced, as they would have been sent."""
        self.bytes_sent = 0
        """Bytes that this rank gave to sums over the ranks instead."""
        self._membership = membership
        self._scale: Tensor | None = None
        self._names: dict[int, list[str]] = {}
        self._low_rank: Any = None if isinstance(self.spec, str) else _low_rank_state(self.spec)

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 before any step."""
        return self.bytes_before / self.bytes_sent if self.bytes_sent else 1.0

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to continue with the same bits: PowerSGD's memory is its own."""
        memory = [
            {index: tensor.clone() for index, tensor in each.items()} for each in self._memory()
        ]
        return {"steps": self.steps, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved state of the same model, wrapped the same way, stopped."""
        self.steps = int(state["steps"])
        if self._low_rank is not None:
            self._low_rank.iter = self.steps
        for mine, saved in zip(self._memory(), state["memory"], strict=True):
            mine.update({index: tensor.clone() for index, tensor in saved.items()})

    def _memory(self) -> list[dict[int, Tensor]]:
        """By bucket: what was left out, and the last factors."""
        low_rank = self._low_rank
        if low_rank is None:
            return []
        return [low_rank.error_dict, low_rank.p_memory_dict, low_rank.q_memory_dict]

    def start(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Send a bucket on its way; what is waited for is the mean over the ranks."""
        flat: Tensor = bucket.buffer()
        if bucket.index() == 0:
            self.steps += 1
            self._agree_on_scale(flat.device)
        if self._scale is not None:
            flat.div_(self._scale)
        self.bytes_before += flat.nbytes
        future = self._send(bucket, flat)
        scale = self._scale
        if scale is None:
            return future
        return future.then(lambda done: done.value().mul_(scale))

    def _send(self, bucket: Any, flat: Tensor) -> torch.futures.Future[Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        group = self._membership.group
        if flat.is_complex():  # torch's hooks would lose the imaginary parts
            self.bytes_sent += flat.nbytes
            whole = torch.view_as_real(flat).view(-1)
            return default_hooks._allreduce_fut(group, whole).then(lambda _: flat)
        if self._low_rank is not None:
            return self._send_low_rank(bucket, flat)
        if flat.element_size() <= 2:
            self.bytes_sent += flat.nbytes
            return default_hooks.allreduce_hook(group, bucket)
        self.bytes_sent += flat.numel() * 2
        cast = getattr(default_hooks, f"{self.spec}_compress_hook")
        return cast(group, bucket)  # type: ignore[no-any-return]

    def _send_low_rank(self, bucket: Any, flat: Tensor) -> torch.futures.Future[Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        state, index = self._low_rank, bucket.index()
        if self._names.setdefault(index, bucket.names()) != bucket.names():
            self._forget(index)  # other gradients than before: the buckets were laid out anew
        self._names[index] = bucket.names()
        state.process_group = self._membership.group
        left_out, before = state.error_dict.get(index), state.total_numel_after_compression
        is_exact = state.iter < state.start_powerSGD_iter
        future = powerSGD_hook(state, _AsMatrices(bucket))
        sent = flat.numel() if is_exact else state.total_numel_after_compression - before
        self.bytes_sent += sent * flat.element_size()

        def keep_memory_finite(done: Any) -> Tensor:
            mean: Tensor = done.value()
            if not is_exact and not bool(torch.isfinite(mean).all()):  # the same on all ranks
                self._forget(index)
                if left_out is not None:
                    state.error_dict[index] = left_out
            return mean

        return future.then(keep_memory_finite)

    def _forget(self, index: int) -> None:
        for memory in self._memory():
            memory.pop(index, None)

    def _agree_on_scale(self, device: torch.device) -> None:
        if self.weight is None or self.spec == "bf16":
            return
        size, group = self._membership.size, self._membership.group
        mean = torch.tensor([self.weight() / size], dtype=torch.float64, device=device)
        comm.all_reduce(group, mean, "The sum of the weights")
        self.bytes_sent += mean.nbytes
        self._scale = torch.where(mean > 0, mean, 1.0)[0]


class _AsMatrices:
    """A bucket whose gradients torch's hook can see as matrices, whatever their shape."""

    def __init__(self, bucket: Any) -> None:
        self.index, self.buffer, self.is_last = bucket.index, bucket.buffer, bucket.is_last
        self._bucket = bucket

    def gradients(self) -> list[Tensor]:
        """In the order in which they lie in memory: those of channels-last layers are not dense
        in any other."""
        found = []
        for gradient in self._bucket.gradients():
            order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
            if gradient.numel():
                dense = gradient if gradient.is_contiguous() else gradient.permute(order)
                found.append(dense if dense.dim() else dense.view(1))
        return found


def _low_rank_state(spec: PowerSGD) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    try:
        return PowerSGDState(
            None,
            matrix_approximation_rank=spec.rank,
            start_powerSGD_iter=spec.start_step,
            min_compression_rate=spec.min_ratio,
            orthogonalization_epsilon=1e-8,
        )
    except ImportError as error:
        raise UsageError(
            "torch's PowerSGD needs NumPy, which is not installed.", advice="pip install numpy"
        ) from error


def hook(state: Compression, bucket: Any) -> torch.futures.Future[Tensor]:
    """The communication hook: `model.register_comm_hook(compression, hook)`."""
    return state.start(bucket)


# Note [Weights]
# Where losses are weighted, a rank's gradient is a sum over its items, a hook returns the sum of
# these divided by the number of ranks, and the reducer multiplies by ranks / items at the end, when
# the trailer has told it the number of all items. Two ways of compressing have to know it before:
# float16 because a sum over thousands of tokens leaves its range where the mean does not, and
# PowerSGD because what was left out in a step of 1,000 items must not count 1,000 times in a
# step of one. So there the weights are summed in a message of 8 bytes before the first bucket, and
# torch's hook sees gradients divided by the mean weight of a rank.
