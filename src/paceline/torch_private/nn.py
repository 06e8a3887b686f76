"""Internals of autograd, tensors, modules, optimizers, data loaders and the compiler.

`torch.compiler.disable` keeps functions out of graphs too, but imports the compiler, which takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from types import CodeType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim import Optimizer

from paceline.torch_private.lookup import find, named_if_missing

with named_if_missing():
    from torch._C import _remove_worker_pids, _set_worker_pids
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

BatchNorm = _BatchNorm
"""Batch norms of any dimension."""
NormBase = _NormBase
"""Layers with running statistics: batch and instance norms."""
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_load = find("torch.nn.Module._load_from_state_dict")


def has_loading_hooks(module: nn.Module) -> bool:
    """Whether hooks take part when a state dict is loaded."""
    return any(getattr(module, name) for name in _HOOKS)


def has_loading_code(kind: type[nn.Module]) -> bool:
    """Whether a class overrides how torch loads its tensors."""
    return (
        kind._load_from_state_dict is not _load
        or kind.set_extra_state is not nn.Module.set_extra_state
    )


def step_without_hooks(optimizer: Optimizer) -> None:
    """Call the optimizer's `step` without hooks, scheduler counters and profiling."""
    step = type(optimizer).step
    is_wrapped: bool = getattr(step, "hooked", False)
    (step.__wrapped__ if is_wrapped else step)(optimizer)  # type: ignore[attr-defined]


def can_skip(optimizer: Optimizer) -> bool:
    """Whether the device can decide that a step is left out, as it does for torch's loss scaler."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    return is_fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Any, is_bad: Tensor) -> None:
    """Step an optimizer that `can_skip`, unless `is_bad`, on the device, is true by then."""
    optimizer.grad_scale, optimizer.found_inf = None, is_bad.float()
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


PREFETCHING: CodeType = find(
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._reset"
).__code__
"""The code that fills the queues of a loader's processes, before the first batch is returned."""

BatchIterator: Any = find("torch.utils.data.dataloader._BaseDataLoaderIter")
"""The iterator of a loader; it has `_dataset` and `_index_sampler`."""


def follow_batches(note: Callable[[Any], bool]) -> None:
    """Call `note` with each `BatchIterator` that returns a batch, until `note` returns False."""
    get_batch = BatchIterator.__next__

    def get_and_note(batches: Any) -> Any:
        batch = get_batch(batches)
        if not note(batches):
            BatchIterator.__next__ = get_batch
        return batch

    BatchIterator.__next__ = get_and_note


def find_queue(batches: Iterator[Any]) -> Any:
    """The queue of batches from a loader's processes; None where it has none or cannot count."""
    queue = getattr(batches, "_data_queue", None)
    try:
        return None if queue is None or queue.qsize() is None else queue
    except NotImplementedError:  # as on macOS
        return None


def find_processes(batches: Any) -> list[BaseProcess]:
    """Those that load these batches."""
    return list(getattr(batches, "_workers", ())) if hasattr(batches, "_data_queue") else []


def end_processes(batches: Any) -> None:
    """Kill those that load these batches: one may wait for good for a lock that a dead one had."""
    for process in find_processes(batches):
        process.kill()
    batches._shutdown_workers()


def raise_at_death(batches: Any, is_raised: bool) -> None:
    """Whether torch's signal handler raises an error, wherever this process is, when one of the
    processes that load these batches is killed; it does from their start on."""
    if batches._worker_pids_set == is_raised:
        return
    if is_raised:
        _set_worker_pids(id(batches), tuple(process.pid for process in batches._workers))
    else:
        _remove_worker_pids(id(batches))
    batches._worker_pids_set = is_raised


F = TypeVar("F", bound=Callable[..., Any])

_eval_frame: Any = find("torch._C._dynamo.eval_frame")
_skip: Any = find("torch._C._dynamo.eval_frame._FrameAction").SKIP
_strategy: Any = find("torch._C._dynamo.eval_frame._FrameExecStrategy")(_skip, _skip)
find("torch._C._dynamo.eval_frame.set_code_exec_strategy")


def keep_out_of_graphs(function: Callable[..., Any]) -> None:
    """Make the compiler run this function, and all that it calls, uncompiled.

    Autograd may call hooks inside a compiled function, where the compiler would trace every call as
    part of the program.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _strategy)


def never_compiled(function: F) -> F:
    """A method at which a graph breaks; the compiler checks the mark when it traces the call."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: F) -> F:
    """Like `torch.compiler.disable`: a graph breaks at the call, and nothing inside is compiled."""
    keep_out_of_graphs(function)
    return never_compiled(function)


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
