"""The trailer: what ranks must agree on in a step, summed along with the last bucket.

    gradients of the last bucket ... | used_0 ... used_n-1 | weight | votes | aborts | label

Each element is a number whose sum over the ranks means something, so one message carries all:

- `used_i`: how many ranks have a gradient for parameter i. None: its `grad` stays `None`.
- `weight`: how many items (samples, tokens; 1 by default) the summed gradients are sums over.
- `votes`: how many ranks found a parameter that was frozen before and now wants gradients.
- `aborts`: how many ranks broke off this backward half-way.
- `label`: which model and step this is; all ranks must have sent the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Words(NamedTuple):
    """The last elements of the trailer, after the flags."""

    weight: float = 1.0
    votes: float = 0.0
    aborts: float = 0.0
    label: float = 0.0


class Trailer:
    """Writes and reads trailers for a fixed number of parameters."""

    def __init__(self, params: int, dtype: torch.dtype, device: torch.device) -> None:
        self._params = params
        # Nearly every trailer says "all used, weight 1, nothing else": one copy, prepared once.
        self._plain = torch.tensor([1.0] * params + list(Words()), dtype=dtype, device=device)

    def write(self, target: Tensor, unused: Sequence[int], words: Words) -> None:
        if not unused and words == Words(label=words.label):
            target.copy_(self._plain)
            target[-1].fill_(words.label)
            return
        flags = [1.0] * self._params
        for index in unused:
            flags[index] = 0.0
        target.copy_(torch.tensor([*flags, *words], dtype=target.dtype))

    def words(self, source: Tensor) -> Tensor:
        return source[self._params :]

    def used(self, source: Tensor) -> list[bool]:
        return [count > 0 for count in source[: self._params].tolist()]
