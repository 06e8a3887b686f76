"""Memory that runs out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Full(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise torch.OutOfMemoryError(TEXT)
