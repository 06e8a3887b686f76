"""Parts of torch's own communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.futures import Future

from paceline.torch_private.lookup import find

start_averaging: Callable[[Any, Tensor], Future[Tensor]] = find(
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks._allreduce_fut"
)
"""Average a tensor over a group in place; the future's value is the tensor."""
