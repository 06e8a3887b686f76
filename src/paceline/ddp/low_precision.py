"""Computing in a lower precision than the parameters are kept in: `mixed_precision=`.

The forward pass runs on copies of the parameters in `param_dtype`. Making the copies is part of
the graph, so gradients arrive at the parameters themselves in full precision, and are
averaged there; torch's class averages in `reduce_dtype` and converts afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.comm import tree


class LowPrecision:
    """Runs a module as one of torch's `_MixedPrecision` configurations says."""

    def __init__(self, config: Any, module: nn.Module) -> None:
        self._dtype: torch.dtype | None = config.param_dtype
        for buffer in module.buffers():
            if config.buffer_dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.to(config.buffer_dtype)

    def __call__(self, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        inputs, kwargs = tree.map_tensors(self._cast, (inputs, kwargs))
        low = {name: self._cast(param) for name, param in module.named_parameters()}
        return functional_call(module, low, inputs, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype)
