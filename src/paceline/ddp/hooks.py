"""Communication hooks: the caller's own way of reducing a bucket.

A hook is written against `torch.distributed.GradBucket`, a class only C++ can create, so the
`GradBucket` here has its methods. The hook gets local gradients, not yet divided by anything, and
returns a future whose value becomes the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.ddp.buffer import Bucket
from paceline.errors import HookError
from paceline.torch_private import Future

Hook = Callable[[Any, Any], Any]


class GradBucket:
    """One bucket as a hook sees it; the interface of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        # Another tensor, so that memory which a hook keeps counts as looked at.
        self._buffer = bucket.flat.detach()

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """The gradients as tensors of their parameters' shapes, views of the buffer."""
        return [view.detach() for view in self._bucket.views]

    def is_last(self) -> bool:
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        self._buffer = tensor

    def parameters(self) -> list[Tensor]:
        return [param for param in self._bucket.params if param is not None]


def check_hook(hook: object) -> None:
    """Refuse a hook that could not work, by its signature."""
    if not callable(hook):
        raise HookError(
            f"A communication hook must be callable, not {type(hook).__name__}.",
            advice="Pass a function hook(state, bucket) that returns a future.",
        )
    try:
        parameters = list(inspect.signature(hook).parameters.values())
        hints = get_type_hints(hook)
    except (TypeError, ValueError, NameError):
        return  # a builtin or an unreadable annotation: judged when it is called
    bucket = parameters[1] if len(parameters) > 1 else None
    torchs: Any = dist.GradBucket  # type: ignore[attr-defined]
    hint = hints.get(bucket.name, torchs) if bucket else torchs
    if hint not in (torchs, GradBucket, Any):
        raise HookError(
            f"Communication hook: the bucket is annotated {hint!r}.",
            advice="Annotate it with torch.distributed.GradBucket, or not at all.",
        )
    result = hints.get("return", inspect.Signature.empty)
    allowed = (inspect.Signature.empty, Any, torch.futures.Future, torch.futures.Future[Tensor])
    if result not in allowed:
        raise HookError(
            f"Communication hook: the return annotation is {result!r}.",
            advice="Return torch.futures.Future[torch.Tensor].",
        )


class HookCall:
    """A hook that has started on one bucket; `wait()` puts its result into the bucket."""

    __slots__ = ("_bucket", "_future", "_what")

    def __init__(self, hook: Hook, state: Any, bucket: Bucket, index: int, last: int) -> None:
        self._bucket = bucket
        self._what = f"Communication hook on bucket {index}"
        self._future: Any = None
        future = hook(state, GradBucket(bucket, index, is_last=index == last))
        if not isinstance(future, Future):  # collectives return the base class
            raise HookError(
                f"{self._what}: it returned {type(future).__name__}, not a future.",
                advice="Return a torch.futures.Future whose value is the reduced buffer.",
            )
        self._future = future

    def wait(self) -> None:
        if self._future is None:
            return
        result = self._future.wait()
        self._future = None
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]
        target = self._bucket.flat
        if not isinstance(result, Tensor):
            raise HookError(
                f"{self._what}: its future holds {type(result).__name__}, not a tensor.",
                advice="The value must be the reduced buffer.",
            )
        if result.numel() != target.numel():
            raise HookError(
                f"{self._what}: its result has {result.numel():,} elements, "
                f"but the bucket has {target.numel():,}.",
                advice="Return a tensor of the shape of bucket.buffer().",
            )
        if result.data_ptr() != target.data_ptr() or result.dtype != target.dtype:
            with torch.no_grad():
                target.copy_(result.view(-1))
