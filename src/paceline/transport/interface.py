"""What a transport can do: the part of it that the reducer knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.gradients.backward import Reduction
from paceline.gradients.plan import BucketPlan


class Transport(Protocol):
    """Sums buckets over all ranks and copies tensors from one rank to the others."""

    description: str
    """What it is and why it was chosen, in words."""

    @property
    def applies_weights(self) -> bool:
        """Whether sums come divided by the ranks' mean weight already."""
        ...

    has_cheap_messages: bool
    """Whether one bucket more costs next to nothing."""

    def divides(self, dtype: torch.dtype) -> bool:
        """Whether sums of this dtype come divided by the number of ranks already."""
        ...

    def place(self, plans: Sequence[BucketPlan], what: str) -> Sequence[Tensor | None]:
        """Memory for the buckets of a new layout, or None where any memory is as good.

        All ranks call it at the same point, with the same plans.
        """
        ...

    def start(self, number: int, buffer: Tensor, weight: float, what: str) -> Reduction:
        """Start summing a bucket in place; all ranks start the same buckets in the same order."""
        ...

    def broadcast(self, tensor: Tensor, root: int, what: str) -> None:
        """Overwrite `tensor`, flat and contiguous, with that of rank `root`."""
        ...
