"""Summing through `torch.distributed`: any device, any number of hosts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline import comm
from paceline.comm import Group
from paceline.gradients.backward import Reduction
from paceline.gradients.plan import BucketPlan


class C10d:
    """Leaves every bucket to one all-reduce of the process group."""

    applies_weights = False
    has_cheap_messages = False

    def __init__(self, group: Group, why: str) -> None:
        self.description = f"c10d: {why}"
        self._group = group

    def divides(self, _dtype: torch.dtype) -> bool:
        return False

    def place(self, plans: Sequence[BucketPlan], _what: str) -> Sequence[Tensor | None]:
        return [None] * len(plans)

    def start(self, _number: int, buffer: Tensor, _weight: float, what: str) -> Reduction:
        return comm.start_all_reduce(self._group, buffer, what)

    def broadcast(self, tensor: Tensor, root: int, what: str) -> None:
        comm.broadcast(self._group, tensor, root, what)
