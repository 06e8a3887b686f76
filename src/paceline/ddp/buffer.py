"""The flat buffers of the buckets: filled from gradients, handed back as gradients.

After a reduction each `param.grad` is a view of its bucket, so nothing is copied back. That is
invisible to the caller because of two rules: memory that other code still looks at is never
overwritten (Note [Whose memory]), and a gradient tensor that other code owns stays in place.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import DeviceError, UsageError
from paceline.torch_private import (
    count_storage_uses,
    foreach_copy_,
    foreach_mul_,
    is_view,
    views_unknown_to_autograd,
)
from paceline.transport import dense_layout

if TYPE_CHECKING:
    from paceline.ddp.layout import BucketPlan

# From about this size on, one fused copy-and-scale per gradient beats a batched copy and a
# second pass over the whole buffer: the second pass costs memory traffic, the first a call.
_LARGE_NUMEL = 32_768
_WORTH_GIVING_BACK_BYTES = 2**20
_requires_grad = attrgetter("requires_grad")
_NO_MEMORY = torch.empty(0)


class ParamRef:
    """A parameter by name, held weakly: see Note [Who keeps whom alive] in `reducer`."""

    __slots__ = ("get", "name")

    def __init__(self, name: str, param: Parameter) -> None:
        self.name = name
        self.get: Callable[[], Parameter | None] = weakref.ref(param)
        """The parameter, or None when the model has dropped it."""

    @property
    def requires_grad(self) -> bool:
        param = self.get()
        return param is not None and param.requires_grad


class Bucket:
    """One flat buffer and the gradients in it.

        empty --(fill)--> local gradients --(reduced by the owner)--> averages --(hand_out)--> empty
        empty --(lend)--> without memory, until the next fill

    `views[i]` is the place of the i-th gradient, with its parameter's own strides.
    With `always_views` even a gradient tensor that other code owns is replaced by its view.
    """

    def __init__(
        self, plan: BucketPlan, params: Sequence[ParamRef], always_views: bool = False
    ) -> None:
        self.plan = plan
        self.indices = [slot.param for slot in plan.slots]
        self.names = [params[index].name for index in self.indices]
        self.views: list[Tensor] = []
        self._refs = [params[index].get for index in self.indices]
        self._layouts = [
            (torch.Size([0]), (1,)) if param is None else dense_layout(param)
            for param in self.params
        ]
        self._always_views = always_views
        self.home: Tensor | None = None
        """Memory to live in, given by a transport; see Note [Whose memory]."""
        self._count_home_uses: Callable[[], int] = int
        self._count_uses: Callable[[], int] = int
        self._home_uses = 0
        self.scale = 1.0
        """What gradients are multiplied with when they are filled in."""
        self.buffer = self.flat = self.trailer = _NO_MEMORY
        """The whole buffer, the part that holds gradients, and the rest; none before `fill`."""
        self._storage_uses = 0
        self._geometry: list[Any] = []
        self._is_lent = False
        self._is_plain = False
        self._has_gaps = sum(slot.stop - slot.start for slot in plan.slots) < plan.numel
        """Between gradients, where zeros are."""
        is_cpu = plan.device.type == "cpu"
        self._is_large = is_cpu and plan.numel > _LARGE_NUMEL * len(plan.slots)
        self._is_new = is_cpu and plan.nbytes >= _WORTH_GIVING_BACK_BYTES
        """Whether its memory is used for the first time; see Note [The first fill]."""

    @property
    def params(self) -> list[Parameter | None]:
        """The parameters, with None for each that the model has dropped since."""
        return [get() for get in self._refs]

    @torch.no_grad()
    def fill(self) -> list[int]:
        """Bring every local gradient into the buffer, scaled; list the unused parameters."""
        params = self.params
        grads: list[Any] = [None if param is None else param.grad for param in params]
        self._make_ready()
        is_alone = self._is_unwatched() and _are_unshared(grads)
        # A `backward(create_graph=True)` gives gradients graphs.
        self._is_plain = is_alone and not any(map(_requires_grad, grads))
        if self._is_plain:  # the usual case, without a Python loop over hundreds of gradients
            self._copy(grads, self.views)
            del grads  # or they would outlive being replaced
            self._hand_out_all(params)
            if self._is_new:
                self._is_new = False
                give_back_freed_memory()
            return []
        if self._is_watched(grads):
            self._allocate()
        pairs = list(zip(grads, self.views, strict=True))
        in_place = [view for grad, view in pairs if grad is view]
        if in_place and self.scale != 1.0:
            foreach_mul_(in_place, self.scale)
        moved = [(grad, view) for grad, view in pairs if grad is not None and grad is not view]
        if moved:
            self._copy([grad for grad, _ in moved], [view for _, view in moved])
        for grad, view in pairs:
            if grad is None:
                view.zero_()
        return [index for index, grad in zip(self.indices, grads, strict=True) if grad is None]

    def _copy(self, grads: list[Any], views: list[Tensor]) -> None:
        scale = self.scale
        try:
            if self._is_large and scale != 1.0:
                for grad, view in zip(grads, views, strict=True):
                    torch.mul(grad, scale, out=view)
                return
            foreach_copy_(views, grads)
        except RuntimeError:
            for grad, view in zip(grads, views, strict=True):
                # Such as a sparse gradient, which the batched copy does not take.
                view.copy_(grad.to_dense() if grad.layout is not torch.strided else grad)
        if scale == 1.0:
            return
        if len(views) == len(self.views):
            self.flat.mul_(scale)
        else:
            foreach_mul_(views, scale)

    def fill_zeros(self) -> list[int]:
        """Fill the buffer as if no parameter had a gradient; list them all."""
        self.fill_from(None)
        return self.indices

    def fill_from(self, flat: Tensor | None) -> None:
        """Take over what another buffer of this layout holds; zeros where there is none."""
        self._make_ready()
        if self._is_watched([None] * len(self.views)):
            self._allocate()
        if flat is None:
            self.flat.zero_()
        else:
            self.buffer.copy_(flat)
        self._is_plain = False

    def copy_to(self, flat: Tensor) -> None:
        """Bring every local gradient into another buffer of this layout; zeros without one."""
        grads = self._grads()
        if any(grad is None for grad in grads):
            flat.zero_()
        views = self._make_views(flat)
        pairs = [(g, v) for g, v in zip(grads, views, strict=True) if g is not None]
        self._copy([grad for grad, _ in pairs], [view for _, view in pairs])

    def hand_out(self, used: Sequence[bool], is_untouched: bool = False) -> None:
        """Make the averages the parameters' gradients.

        `used` says which parameters have a gradient on any rank; it may be empty where this rank
        has one for each. A parameter without any keeps `grad is None`. `is_untouched` is the word
        that no code of others has run since the bucket was filled.
        """
        if self._is_plain and is_untouched:
            return  # done already
        if not self._is_intact():  # a hook of the caller's has rebound a gradient
            self.views = self._make_views(self.buffer)
        elif all(map(is_, self._grads(), self.views)):
            return
        try:
            self._hand_out(used)
        except RuntimeError as error:
            raise self._why_refused() from error

    def _hand_out_all(self, params: Sequence[Parameter | None]) -> None:
        """Make the views the gradients as soon as they hold what the gradients held."""
        # That frees the gradients' own memory in the middle of backward, where the next layers
        # can have it. The views are what they should be only when backward has ended, but nobody
        # looks before.
        try:
            for param, view in zip(params, self.views, strict=True):
                if param is not None:
                    param.grad = view
        except RuntimeError as error:
            raise self._why_refused() from error

    def _hand_out(self, used: Sequence[bool]) -> None:
        for index, param, view in zip(self.indices, self.params, self.views, strict=True):
            if param is None:
                continue
            grad = param.grad
            if grad is view:
                continue
            if grad is None:
                if not used or used[index]:
                    param.grad = view
            elif not grad.requires_grad and (self._always_views or _are_unshared((grad,), held=1)):
                param.grad = view
            else:
                set_value(grad, view)

    def is_handed_out(self) -> bool:
        """Whether every parameter's gradient is its place in the buffer, at this moment."""
        if not self._is_intact():
            return False
        return all(map(is_, self._grads(), self.views))

    def _grads(self) -> list[Any]:
        return [None if param is None else param.grad for param in self.params]

    def release(self) -> None:
        """Give the memory up to the gradients that are views of it."""
        self.buffer = self.flat = self.trailer = _NO_MEMORY
        self.views = []
        self._count_uses = int
        self._is_lent = False

    def lend(self) -> None:
        """Let a forward pass have the memory, if nothing refers to it: see Note [Lent memory]."""
        if self._is_lent or not self._is_intact() or not self._is_unwatched():
            return
        self.buffer.untyped_storage().resize_(0)
        self._is_lent = True

    def _make_ready(self) -> None:
        """See to it that there is memory, and that the views are views of it."""
        if self._is_lent:
            self._is_lent = False
            self.buffer.untyped_storage().resize_(self.plan.nbytes)
            if self._has_gaps:
                self.buffer.zero_()
            self._geometry = geometry(self.views)  # the memory is another
        elif not self._is_intact() or (self.buffer is not self.home and self._is_home_free()):
            self._allocate()

    def _why_refused(self) -> DeviceError:
        """torch takes a gradient only in its parameter's dtype and on its device."""
        for name, param, view in zip(self.names, self.params, self.views, strict=True):
            if param is not None and (param.dtype, param.device) != (view.dtype, view.device):
                return DeviceError(
                    f"Parameter {name!r} is {param.dtype} on {param.device}, but was {view.dtype} "
                    f"on {view.device} when the model was wrapped.",
                    advice="Move or convert the model first, then wrap it.",
                )
        return DeviceError("A parameter has changed since the model was wrapped.")

    def use_memory(self, home: Tensor | None) -> None:
        """Use this memory from the next fill on, once nothing refers to the present one."""
        self.release()
        self.home = home
        self._count_home_uses = int if home is None else count_storage_uses(home)
        self._home_uses = self._count_home_uses()

    def _is_home_free(self) -> bool:
        return self.home is not None and self._count_home_uses() <= self._home_uses

    def _allocate(self) -> None:
        plan = self.plan
        self.release()
        if self.home is not None and self._is_home_free():
            self.buffer = self.home
        else:
            make = torch.zeros if self._has_gaps else torch.empty
            self.buffer = make(plan.length, dtype=plan.dtype, device=plan.device)
        self.flat, self.trailer = self.buffer[: plan.numel], self.buffer[plan.numel :]
        self.views = self._make_views(self.buffer)
        self._geometry = geometry(self.views)
        self._count_uses = count_storage_uses(self.buffer)
        self._storage_uses = self._count_uses()

    def _make_views(self, buffer: Tensor) -> list[Tensor]:
        offset = buffer.storage_offset()
        with views_unknown_to_autograd():
            return [
                buffer.as_strided(size, stride, offset + slot.start)
                for slot, (size, stride) in zip(self.plan.slots, self._layouts, strict=True)
            ]

    def _is_intact(self) -> bool:
        """Whether there is memory, and every view still is its place in it.

        The views are what users have as `param.grad`, and `p.grad.data = ...`, `p.grad.set_(...)`
        or `module._apply(...)` make such a tensor another one, without a trace in the object.
        """
        has_memory = self.buffer is not _NO_MEMORY and not self._is_lent
        return has_memory and geometry(self.views) == self._geometry

    def _is_unwatched(self) -> bool:
        """Whether nothing at all, not even a parameter, refers to anything in the buffer."""
        references = max(map(sys.getrefcount, self.views), default=0)
        is_shared = self._count_uses() > self._storage_uses
        return references <= _REFERENCES_TO_A_CACHED_VIEW and not is_shared

    def _is_watched(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether other code still holds a gradient of an earlier step that lives in the buffer."""
        if self._count_uses() > self._storage_uses:
            return True
        references = list(map(sys.getrefcount, self.views))
        return any(
            count > _REFERENCES_TO_A_CACHED_VIEW
            for count, grad, view in zip(references, grads, self.views, strict=True)
            if grad is not view
        )


def geometry(views: Sequence[Tensor]) -> list[Any]:
    """Where each tensor lies, and how: address, strides, number of elements."""
    return [*map(Tensor.data_ptr, views), *map(Tensor.stride, views), *map(Tensor.numel, views)]


def _are_unshared(grads: Sequence[Any], held: int = 0) -> bool:
    """Whether only their parameters refer to these gradients and share their memory.

    `held` is how many references the caller itself holds to each, besides the sequence. None is
    referred to from everywhere, so a parameter without a gradient gives False.
    """
    references = max(map(sys.getrefcount, grads), default=0) - held
    return references <= _REFERENCES_TO_A_GRAD and not any(map(is_view, grads))


def set_value(grad: Tensor, average: Tensor) -> None:
    """Write an average into a gradient that stays, with its graph if it has one.

    See Note [Gradients of averages].
    """
    with torch.no_grad():
        grad.copy_(average)
    if grad.requires_grad:
        grad.register_hook(_refuse_third_order)  # type: ignore[no-untyped-call]


def _refuse_third_order(_grad: Tensor) -> None:
    if torch.is_grad_enabled():
        raise UsageError(
            "backward(create_graph=True) went through an averaged gradient, whose graph is only "
            "that of this rank's part.",
            advice="Differentiate a penalty on averaged gradients once, without create_graph.",
        )


def give_back_freed_memory() -> None:
    """Return to the system what this process has freed, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _count_references() -> tuple[int, int]:
    """What `sys.getrefcount` says here of a gradient without other references, and of a cached
    view."""
    # Asked as everywhere here, by `map`: how one asks adds references of its own.
    param = Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    return max(map(sys.getrefcount, (param.grad,))), max(map(sys.getrefcount, [torch.zeros(1)]))


_REFERENCES_TO_A_GRAD, _REFERENCES_TO_A_CACHED_VIEW = _count_references()

# Note [Whose memory]
# A training loop may keep last step's gradients (`old = [p.grad for p in ...]`) and run the next
# backward after `zero_grad()`. In plain torch the new gradients are new tensors. Ours live in
# the bucket, which would be the same memory again. So before the buffer is overwritten, two counts
# are compared with what they are when only the bucket and `param.grad` know its views: references
# to the view objects, and tensors that share the storage (a script's `p.grad.view(-1)`). If
# either is higher, the old buffer is left to its holders and a new one is allocated. A bucket with
# a home (shared memory) comes back to it when its holders have let go.
# Views still in place as `param.grad` are exempt: there autograd itself adds in place.

# Note [Gradients of averages]
# After `backward(create_graph=True)` a gradient has a graph, for a penalty on it. The average is
# written into that tensor, so that it has the average's value and the graph of this rank's part. A
# penalty is then differentiated at the average, through this rank's rows; the mean of that over the
# ranks is what one process gets. With weighted losses it is not, nor are derivatives of a higher
# order: both are refused.

# Note [Lent memory]
# On a GPU memory is dearer than on a host, and a forward pass needs the most when there are no
# gradients. So when one begins and no gradient is alive, a bucket there gives its memory to the
# allocator and gets some back when it is filled. The views stay, without memory: making new ones
# takes longer than many a small layer.

# Note [The first fill]
# Before the first backward it is not known how gradients come, so that all of them are there when
# the first bucket is filled, and memory for the buckets comes on top. The allocator would keep what
# the gradients leave behind, for steps in which only a few are alive at a time. So each bucket's
# first fill gives that back to the system: the peak is the gradients and one bucket, not twice the
# gradients. Later fills leave it to the allocator, since the next layer's gradients want it. With
# 32 MiB of gradients this takes 10 ms in each of the first two steps, and none after.
