"""Autograd's private state of tensors and backward passes, and operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from paceline.torch_private.lookup import find

foreach_add_: Any = find("torch._foreach_add_")
foreach_copy_: Any = find("torch._foreach_copy_")
foreach_mul_: Any = find("torch._foreach_mul_")
foreach_norm: Any = find("torch._foreach_norm")


at_backward_end: Callable[[Callable[[], object]], None] = find(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Have autograd call a function at the end of the backward pass that runs on this thread."""

is_view: Callable[[Tensor], bool] = find("torch.Tensor._is_view")
sparse_values: Callable[[Tensor], Tensor] = find("torch.Tensor._values")
"""The values of a sparse tensor that need not be coalesced."""

_use_count: Any = find("torch._C._storage_Use_Count")
_below_autograd: Any = find("torch._C._AutoDispatchBelowAutograd")
_exclude: Any = find("torch._C._ExcludeDispatchKeyGuard")
_view_keys: Any = find("torch._C.DispatchKeySet")(find("torch._C.DispatchKey.ADInplaceOrView"))
_functorch_level: Callable[[], int | None] = find("torch._C._functorch.maybe_current_level")
for _path in (
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.autograd.forward_ad._current_level",
    "torch.UntypedStorage._cdata",
):
    find(_path)


def tensor_hooks(tensor: Tensor) -> Mapping[int, Callable[..., Any]]:
    """The hooks that receive, and may change, the gradient of this tensor."""
    return tensor._backward_hooks or {}


def accumulated_grad_hooks(param: Tensor) -> dict[int, Callable[..., Any]] | None:
    """Autograd's own dictionary of hooks that run when `param.grad` is complete, or None."""
    hooks: dict[int, Callable[..., Any]] | None = param._post_accumulate_grad_hooks
    return hooks


def count_storage_uses(tensor: Tensor) -> Callable[[], int]:
    """A function that counts the tensors sharing the storage; its own reference counts as one."""
    storage = tensor.untyped_storage()
    count: Any = partial(_use_count, storage._cdata)
    count.storage = storage  # keeps the storage alive, so that the address stays valid
    asked: Callable[[], int] = count
    return asked


@contextmanager
def views_unknown_to_autograd() -> Iterator[None]:
    """Views made inside share memory with their base, but no autograd state.

    They can be detached in place, and writing to one does not change the version of another.
    """
    with _below_autograd(), _exclude(_view_keys):
        yield


def mark_as_parameters(tensors: Iterable[Tensor]) -> None:
    """Make `isinstance(tensor, nn.Parameter)` true, which some layers check."""
    for tensor in tensors:
        tensor._is_param = True


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is active here."""
    return _functorch_level() is not None or forward_ad._current_level >= 0


has_rpc_agent: Callable[[], bool] = bool
"""Whether `torch.distributed.rpc` is in use here."""
if hasattr(find("torch._C"), "_rpc_init"):
    has_rpc_agent = find("torch._C._distributed_rpc._is_current_rpc_agent_set")


def is_in_distributed_autograd() -> bool:
    """Whether `torch.distributed.autograd` collects the gradients, and not the parameters.

    Only where there is an agent of `torch.distributed.rpc`.
    """
    autograd = find("torch._C._distributed_autograd")
    try:
        autograd._current_context()
    except RuntimeError:  # no context on this thread; threads of a backward pass have none either
        return int(autograd._get_debug_info()["num_current_backward_passes"]) > 0
    return True
