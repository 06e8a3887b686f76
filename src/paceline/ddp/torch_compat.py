"""Names of torch's class that scripts and libraries use besides its documented ones.

None of them does the work; they say what the engine is doing, or ask it for what it does anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from paceline.errors import UsageError

if TYPE_CHECKING:
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
