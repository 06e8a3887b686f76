"""What torch's class has besides averaging: names that libraries use, `join()`, mixed precision.

The names do no work; they say what the engine is doing, or ask it for what it does anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook
from torch.func import functional_call

from paceline.comm import tree
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.ddp import DistributedDataParallel
    from paceline.gradients.reducer import Reducer


class TorchSurface:
    """Mixed into `DistributedDataParallel`."""

    _reducer: Reducer
    _syncs_buffers_next: bool
    broadcast_buffers: bool
    logger = None
    """torch's class logs here; ours does not."""

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
        return self._reducer

    def will_sync_module_buffers(self) -> bool:
        return self._will_broadcast_buffers()

    def _will_broadcast_buffers(self) -> bool:
        raise NotImplementedError

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


class UnevenInputs(JoinHook):
    """One model in torch's `Join` context: ranks that run out of inputs keep the others company.

    They repeat the collectives of the others' steps, with gradients of zero, until the last one is
    done; then all take the last one's model.
    """

    def __init__(
        self, model: DistributedDataParallel, *, divide_by_initial_world_size: bool
    ) -> None:
        super().__init__()
        self._model = model
        # A rank without inputs counts like one that has, unless asked otherwise: torch's default.
        self._weight = 1.0 if divide_by_initial_world_size else 0.0

    def main_hook(self) -> None:
        """Repeat the collectives of one step of the ranks that still have inputs."""
        self._model.shadow_step(self._weight)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give everybody the model of a rank that was there to the end."""
        self._model.take_final_model(is_last_joiner)


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
        inputs, kwargs = tree.map_tensors(self._cast, (inputs, kwargs))
        low = {name: self._cast(param) for name, param in module.named_parameters()}
        return functional_call(module, low, inputs, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype)
