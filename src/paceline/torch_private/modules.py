"""Internals of modules, optimizers, data loaders and the compiler.

`torch.compiler.disable` keeps functions out of graphs too, but imports the compiler, which takes
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from types import CodeType
from typing import Any, TypeVar

from torch import nn
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
