"""Gradients that take fewer bytes on their way: torch's own hooks, with weights kept exact.

    "bf16"      half the bytes, float32's range, 8 bits of precision
    "fp16"      half the bytes, 11 bits of precision, values under 6e-8 vanish

A hook gets local gradients and returns their mean over the ranks; the reducer turns that into a
weighted mean where losses are weighted. See Note [Weights].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import check_choice
from paceline.group import Membership, all_reduce
from paceline.torch_private import start_averaging

__all__ = ["Compression", "hook"]

NAMES = ("bf16", "fp16")


class Compression:
    """Shrinks the buckets of one model on their way and counts what was sent; state of `hook`."""

    def __init__(self, name: str, membership: Membership) -> None:
        check_choice("compression", name, NAMES)
        self.name = name
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

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent; 1 before any step."""
        return self.bytes_before / self.bytes_sent if self.bytes_sent else 1.0

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
            return start_averaging(group, whole).then(lambda _: flat)
        if flat.element_size() <= 2:
            self.bytes_sent += flat.nbytes
            return default_hooks.allreduce_hook(group, bucket)
        self.bytes_sent += flat.numel() * 2
        cast = getattr(default_hooks, f"{self.name}_compress_hook")
        return cast(group, bucket)  # type: ignore[no-any-return]

    def _agree_on_scale(self, device: torch.device) -> None:
        if self.weight is None or self.name == "bf16":
            return
        size, group = self._membership.size, self._membership.group
        mean = torch.tensor([self.weight() / size], dtype=torch.float64, device=device)
        all_reduce(group, mean, "The sum of the weights")
        self.bytes_sent += mean.nbytes
        self._scale = torch.where(mean > 0, mean, 1.0)[0]


def hook(state: Compression, bucket: Any) -> torch.futures.Future[Tensor]:
    """The communication hook: `model.register_comm_hook(compression, hook)`."""
    return state.start(bucket)


# Note [Weights]
# Where losses are weighted, a rank's gradient is a sum over its items, a hook returns the sum of
# these divided by the number of ranks, and the reducer multiplies by ranks / items at the end, when
# the trailer has told it the number of all items. float16 has to know it before, because a sum over
# thousands of tokens leaves its range where the mean does not. So there the weights are summed in a
# message of 8 bytes before the first bucket, and torch's hook sees gradients divided by the mean
# weight of a rank.
