"""Gradients in half the bytes: every value is rounded to a 16-bit float and summed as one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm import Group
from paceline.gradients.compress.codec import Compression, NamedBucket
from paceline.gradients.compress.spec import BF16, FP16


class Cast(Compression):
    """Rounds buckets to a 16-bit float; those that have no wider values are sent as they are."""

    def __init__(self, spec: BF16 | FP16, group: Group) -> None:
        super().__init__(spec, group)
        self._dtype = spec.dtype

    @property
    def needs_scale(self) -> bool:
        return self._dtype is torch.float16

    def _start(self, bucket: NamedBucket, flat: Tensor) -> Callable[[], Tensor]:
        scale = self.scale
        real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        narrow = self._dtype if real.element_size() > self._dtype.itemsize else real.dtype
        # Divided before it is rounded, so that no partial sum is larger than the largest value.
        message = torch.empty_like(real, dtype=narrow)
        torch.div(real, scale.or_one * self.size, out=message)
        pending = self._sum(bucket.index(), message, f"{narrow} gradients")

        def finish() -> Tensor:
            pending.wait()
            with torch.no_grad():
                real.copy_(message)
                if not scale.is_one:
                    real.mul_(scale.or_one)
            return flat

        return finish
