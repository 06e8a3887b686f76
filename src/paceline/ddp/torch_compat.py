"""What torch's class has besides averaging: names that libraries use, and mixed precision.

The names do no work; they say what the engine is doing, or ask it for what it does anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from paceline.errors import UsageError
from paceline.group import map_tensors

if TYPE_CHECKING:
    from paceline.ddp.reducer import Reducer


class TorchSurface:
    """Mixed into `DistributedDataParallel`."""

    _reducer: Reducer
    _syncs_buffers_next: bool
    broadcast_buffers: bool
    logger = None
    """torch's class logs here; ours does not."""
    require_manual_backward_finalization = False
    """Whether the caller calls `finalize_backward()`, which may be done in any case."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next forward's backward averages; loops that accumulate set it directly."""
        return self._reducer.wants_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._reducer.wants_sync = wanted

    @property
    def require_forward_param_sync(self) -> bool:
        return self._syncs_buffers_next

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, wanted: bool) -> None:
        self.__dict__["_syncs_buffers_next"] = wanted

    @property
    def forward_sync_buffers(self) -> bool:
        return self.broadcast_buffers

    @property
    def reducer(self) -> Reducer:
        """What averages the gradients; torch's class has one of this name too."""
        return self._reducer

    @property
    def should_finalize_after_backward(self) -> bool:
        """As torch's: whether `finalize_backward()` has to wait until backward has returned."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Nothing to do: gradients are averages when backward returns."""

    def _set_static_graph(self) -> None:
        """Nothing to do: any graph may change at any time."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, names: Iterable[str]
    ) -> None:
        module._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise NotImplementedError

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """torch's two hooks written in C++, by what they do."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,  # type: ignore[attr-defined]
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,  # type: ignore[attr-defined]
        }
        if kind not in hooks:
            raise UsageError(f"There is no built-in communication hook {kind!r}.")
        self.register_comm_hook(None, hooks[kind])


class LowPrecision:
    """Runs a module as one of torch's `_MixedPrecision` configurations says.

    The forward pass runs on copies of the parameters in `param_dtype`. Making the copies is part of
    the graph, so gradients arrive at the parameters themselves in full precision, and are
    averaged there; torch's class averages in `reduce_dtype` and converts afterwards.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        self._dtype: torch.dtype | None = config.param_dtype
        for buffer in module.buffers():
            if config.buffer_dtype is not None and buffer.is_floating_point():
                buffer.data = buffer.to(config.buffer_dtype)

    def __call__(self, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        inputs, kwargs = map_tensors(self._cast, (inputs, kwargs))
        low = {name: self._cast(param) for name, param in module.named_parameters()}
        return functional_call(module, low, inputs, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype)
