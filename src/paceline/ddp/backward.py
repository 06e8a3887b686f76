"""When a backward pass begins, and when it ends: autograd does not say.

Hooks tell that a gradient is there. That backward is over is known only through a callback that
must be queued while it runs; that it broke off shows only in the callback being freed unused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.ddp.layout import BucketLayout
from paceline.ddp.weight import LossWeight
from paceline.errors import FitError, UsageError
from paceline.telemetry import Observer, Phase
from paceline.torch_private import (
    accumulated_grad_hooks,
    at_backward_end,
    has_rpc_agent,
    is_in_distributed_autograd,
    keep_out_of_graphs,
    outside_graphs,
)
from paceline.transport import Reduction

_Hook = Callable[[Tensor], None]
_Hooks = MutableMapping[int, _Hook]


@dataclass(slots=True, eq=False)
class Backward:
    """One backward pass as it is followed."""

    skips: bool
    """Under `no_sync()`: gradients only accumulate."""
    missing: list[int] = field(default_factory=list)
    """By bucket, how many gradients have yet to come; never zero while the order is unknown."""
    is_shadow: bool = False
    """This rank has run out of inputs and only keeps the others company."""
    is_aborting: bool = False
    """It broke off here, and is completed only to tell the others."""
    is_short: bool = False
    """This rank ran out of memory, and takes part only to say so."""
    arrived: list[Tensor] = field(default_factory=list)
    """Parameters in the order in which their gradients came; empty again when it has ended."""
    awaited: Container[int] = ()
    """The ids of those whose gradients are expected last in their buckets."""
    counted: int = 0
    """How many of these `missing` knows of."""
    in_flight: list[Reduction] = field(default_factory=list)
    """One entry for every bucket that has started, in order."""
    early: int = 0
    """How many buckets had started before its end."""
    unused: list[int] = field(default_factory=list)
    """Parameters without a gradient on this rank."""
    versions: list[int] = field(default_factory=list)
    """Of the parameters when it began, where that is to be compared at its end."""
    aside: list[tuple[Parameter, Tensor]] = field(default_factory=list)
    """Gradients that are none of a weighted step's, taken away until it is averaged."""
    callback: weakref.ref[Callable[[], None]] | None = None
    """What autograd calls at the end."""

    def put_back(self) -> None:
        """Give the gradients aside back to parameters that this backward has not reached."""
        for param, grad in self.aside:
            if param.grad is None:
                param.grad = grad


class Arrivals:
    """The hooks on the parameters of one model.

        resting: each calls Python --(listen)--> only the awaited ones do --(rest)--> resting

    A hook of a few lines of Python takes longer than many a small layer, so while a backward is
    followed most hooks are the `append` of a list, which runs no Python and forgets nothing. They
    are all one object, a `partial`, so that one call changes what every one of them does.

    Invariant: at rest every parameter calls Python, so that no backward goes unnoticed, whichever
    parameters it reaches. Parameters own the hooks, which are held weakly here: see
    Note [Who keeps whom alive] in `reducer`.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._places: list[tuple[int, Callable[[], _Hooks | None], int]] = []
        """Of each hook: its parameter's id, where it is kept, its key."""
        self._shared: Callable[[], Any] = _nothing
        """The hook of all parameters that are not awaited."""
        self._awaited: Container[int] = ()

    @property
    def is_hooked(self) -> bool:
        return bool(self._handles)

    def hook(self, params: Iterable[Parameter], hook: _Hook) -> None:
        """Have this called whenever a gradient of any of the parameters is complete.

        Also of frozen ones: there is no event when they are unfrozen.
        """
        shared: Any = partial(hook)
        shared.reducer, shared.python = getattr(hook, "reducer", None), hook
        self._shared = weakref.ref(shared)
        for param in params:
            is_trained = param.requires_grad
            try:
                # torch takes this hook only where a gradient is required at the moment.
                handle: Any = param.requires_grad_().register_post_accumulate_grad_hook(shared)  # type: ignore[no-untyped-call]
            except RuntimeError:
                continue  # of a dtype, or made in inference mode: it can have no gradient
            finally:
                param.requires_grad_(is_trained)
            hooks: Any = accumulated_grad_hooks(param)
            self._handles.append(handle)
            self._places.append((id(param), weakref.ref(hooks), handle.id))

    def unhook(self) -> None:
        """Leave every parameter alone from now on."""
        self.rest()
        for handle in self._handles:
            handle.remove()
        self._handles, self._places = [], []
        self._shared, self._awaited = _nothing, ()

    def listen(self, note: _Hook, awaited: Container[int]) -> None:
        """Until `rest`, have all but the parameters with these ids call `note` instead."""
        shared = self._shared()
        if shared is None:
            return
        if awaited is not self._awaited:
            self._awaited = awaited
            for param, get, key in self._places:
                if (hooks := get()) is not None and key in hooks:
                    hooks[key] = shared.python if param in awaited else shared
        _redirect(shared, note)

    def rest(self) -> None:
        """Have every parameter call Python again."""
        if (shared := self._shared()) is not None:
            _redirect(shared, shared.python)


def _nothing() -> None:
    return None


def _redirect(hook: Any, target: _Hook) -> None:
    """Have a `partial` call another function from now on."""
    # Its function can be set in no other way, and autograd holds the object.
    hook.__setstate__((target, (), {}, vars(hook)))


class BackwardFollower:
    """Knows which backward pass is running.

        none --(an output's gradient)--> announced --(a parameter's gradient)--> current
             --(a parameter's gradient)--------------------------------------^
        current --(end)--> none          current --(an error)--> broken

    A backward that is announced and reaches no parameter was none of our business: it went
    through the model to its inputs.
    """

    def __init__(self, layout: BucketLayout) -> None:
        self.current: Backward | None = None
        self.broken: Backward | None = None
        self.backwards = 0
        """How many backward passes have reached a parameter."""
        self.wants_sync = True
        """What to do in a backward whose forward pass left no wish of its own."""
        self.unmarked_wish: bool | None = None
        """The wish of a forward pass whose outputs could not be marked with it."""
        self.observer: Observer | None = None
        """Is told of every event, where one is set."""
        self.arrivals = Arrivals()
        self.weight = LossWeight()
        self._announced: Backward | None = None
        self._layout = layout

    def on_complete_backward(self, ended: Backward) -> None:
        """`ended` has reached parameters, is complete, and is to be averaged."""
        raise NotImplementedError

    def on_untouched_backward(self) -> None:
        """An announced backward has ended at no parameter."""
        raise NotImplementedError

    def check_not_interrupted(self) -> None:
        """If the last backward broke off half-way on this rank, tell the others and raise."""
        raise NotImplementedError

    def refuse_second_average(self, current: Backward) -> None:
        """Raise if a gradient came to a parameter that has one aside."""
        raise NotImplementedError

    @property
    def parameters(self) -> Iterable[Parameter]:
        """Every parameter that is followed, frozen ones included."""
        raise NotImplementedError

    @outside_graphs
    def on_output_grad(self, wants_sync: bool, _grad: Tensor) -> None:
        """An output of a forward pass received its gradient: this is the outermost backward."""
        if has_rpc_agent():
            refuse_distributed_autograd()
        known = self.current or self._announced
        if known is None:
            self._announced = self._follow(wants_sync, at_backward_end)
        elif wants_sync:
            # Several forwards in one backward: one wish to synchronise is enough. Gradients that
            # came while skipping were not counted; their buckets start at the end of backward.
            known.skips = False

    def open(self, first: Tensor | None = None) -> Backward:
        """A backward has reached the first parameter; this one, if it was not announced."""
        if self.broken is not None:
            self.check_not_interrupted()
        opened = self._announced
        if opened is None:
            wish = self.wants_sync if self.unmarked_wish is None else self.unmarked_wish
            opened = self._follow(wish, _at_end_of_outermost, first)
        self._announced = None
        self.current = opened
        self.backwards += 1
        return opened

    def _follow(
        self,
        wants_sync: bool,
        queue: Callable[[Callable[[], None]], None],
        first: Tensor | None = None,
    ) -> Backward:
        layout = self._layout
        if self.observer is not None:
            watch = self.observer.watch
            watch.mark((watch.clock(), Phase.BACKWARD))
        followed = Backward(
            not wants_sync,
            # While skipping no bucket is ever full, so the hooks need not ask.
            layout.missing.copy() if wants_sync else [sys.maxsize] * len(layout.buckets),
            versions=layout.versions() if wants_sync and not layout.is_learned else [],
            awaited=layout.awaited,
        )
        if self.weight.is_set:
            followed.aside = self.weight.on_backward(self.parameters, first)
            for param, _ in followed.aside:
                # In that of `first` this backward's gradient is added already; it is refused at the
                # end.
                if param is not first:
                    param.grad = None
        # Autograd alone owns `at_end`: it is freed when backward ends, however that may be.
        at_end = partial(self._on_end, followed)
        followed.callback = weakref.ref(at_end, self._on_callback_freed)
        queue(at_end)
        if self.broken is None:  # else the first gradient is to raise
            self.arrivals.listen(followed.arrived.append, followed.awaited)
        return followed

    @outside_graphs
    def _on_end(self, ended: Backward) -> None:
        self.unmarked_wish = None
        # Whatever fails below, the next backward is to find hooks that call Python.
        self.arrivals.rest()
        try:
            # All its gradients were noted without Python: none of them was an awaited one.
            if self._announced is ended and ended.arrived:
                self.open()
            elif self._announced is ended:
                self._announced = None
                self.on_untouched_backward()
            if self.current is not ended:
                return
            if not ended.skips:
                self.on_complete_backward(ended)
                return
            self.current = None
            self.weight.on_local_backward(ended.arrived)
            if ended.aside:
                self.refuse_second_average(ended)
            if self.observer is not None:  # nothing is sent; the next thing is more data
                watch = self.observer.watch
                watch.mark((watch.clock(), watch.after_update))
        finally:
            ended.put_back()
            ended.arrived.clear()

    def forget(self) -> None:
        """Ignore the backward that was under way, also when it is freed later."""
        self.current = self.broken = self._announced = None
        self.arrivals.rest()

    def run_short(self) -> bool:
        """This rank ran out of memory: tell the others with zeros in place of its gradients.

        False if all of them were sent before, so that the others apply the step.
        """
        current = self.broken or self.current
        if current is None or current.skips:
            current = Backward(skips=False)
        self.forget()
        if len(current.in_flight) == len(self._layout.buckets):
            return False
        current.missing, current.is_shadow, current.is_short = [], True, True
        with suppress(FitError):
            self.on_complete_backward(current)
        return True

    def _on_callback_freed(self, callback: weakref.ref[Callable[[], None]]) -> None:
        """If its backward is still thought to be running, it has broken off."""
        freed = self.current or self._announced
        if freed is None or freed.callback is not callback:
            return
        self.arrivals.rest()
        if freed is self.current or freed.arrived:
            self.broken = freed
        # `open` has not seen, and not counted, a backward whose gradients were only noted.
        if freed is not self.current and freed.arrived:
            self.backwards += 1
        self.current = self._announced = None
        freed.put_back()
        freed.arrived.clear()


def _at_end_of_outermost(callback: Callable[[], None]) -> None:
    """Have autograd call at the end of the outermost backward.

    A reentrant checkpoint runs a backward of its own inside a node of the real one. Autograd only
    takes callbacks for the inner one here, so the outer node is asked to queue it when it is done.
    """
    node = _outermost_node()
    if node is None:
        at_backward_end(callback)
    else:
        queue = lambda *_: at_backward_end(callback)  # noqa: E731
        keep_out_of_graphs(queue)
        node.register_hook(queue)


def refuse_distributed_autograd() -> None:
    """Raise where `torch.distributed.autograd` has the gradients: no parameter hears of them.

    To be asked where there is an agent of `torch.distributed.rpc`.
    """
    if is_in_distributed_autograd():
        raise UsageError(
            "A model that is trained data-parallel was called in a context of "
            "torch.distributed.autograd, which keeps gradients to itself, not averaged.",
            advice="Call it outside of the context, and loss.backward().",
        )


def _outermost_node() -> torch.autograd.graph.Node | None:
    """The node of the outermost backward from which Python code started this one, if any."""
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward":
            # A node written in Python, such as that of a checkpoint, runs as `backward(ctx, ...)`.
            node = frame.f_locals.get("ctx")
            if isinstance(node, torch.autograd.graph.Node):
                found = node
        frame = frame.f_back
    return found
