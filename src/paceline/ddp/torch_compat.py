"""What torch's class has besides averaging: names that libraries use, mixed precision, `join()`.

The names do no work; they say what the engine is doing, or ask it for what it does anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.func import functional_call

from paceline.errors import UsageError
from paceline.group import Group, all_gather, all_reduce, map_tensors

if TYPE_CHECKING:
    from paceline.ddp.distributed import DistributedDataParallel
    from paceline.ddp.reducer import Reducer


class TorchReducer:
    """Mixed into `Reducer`."""

    def prepare_for_backward(self, _outputs: object = ()) -> None:
        """Nothing to do; libraries call it, and the two below, on torch's reducer."""

    def _rebuild_buckets(self) -> None: ...

    def _delay_all_reduce(self) -> None: ...


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


class JoinSurface(Joinable):
    """What torch's `Join` asks of a model; mixed into `DistributedDataParallel`."""

    device: torch.device
    process_group: Group

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for loops of different lengths: ranks that finish early keep company."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> UnevenInputs:
        divide = kwargs.get("divide_by_initial_world_size", True)
        model: Any = self
        return UnevenInputs(model, divide_by_initial_world_size=divide)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group


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
        model = self._model
        if model.will_sync_module_buffers():
            model._copy_buffers(agree_on_root(model.process_group, model.device, False))
        wants_sync = any_wants_sync(model.process_group, model.device, False)
        model.require_forward_param_sync = wants_sync
        if wants_sync:
            model.reducer.shadow(self._weight)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that was there to the end."""
        model = self._model
        root = agree_on_root(model.process_group, model.device, is_last_joiner)
        model._copy_model(root)


def any_wants_sync(group: Group, device: torch.device, mine: bool) -> bool:
    """Whether any rank will average the gradients of this forward pass."""
    wishes = torch.tensor([float(mine)], device=device)
    all_reduce(group, wishes, "Asking whether gradients will be averaged")
    return bool(wishes.item() > 0)


def agree_on_root(group: Group, device: torch.device, is_candidate: bool) -> int:
    """The highest rank that is a candidate."""
    mine = torch.tensor([int(is_candidate)], device=device)
    votes = all_gather(group, mine, "Agreeing on whose buffers count")
    return max((rank for rank, vote in enumerate(votes) if vote.item()), default=0)
