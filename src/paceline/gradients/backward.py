"""When a backward pass begins, and when it ends: what autograd does not say by itself.

Hooks tell that a gradient is there. That backward is over is known only through a callback that
must be queued while it runs; that it broke off shows only in the callback being freed unused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.nn import Parameter

from paceline.errors import UsageError
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
    callback: weakref.ref[Callable[[], None]] | None = None
    """What autograd calls at the end."""


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
        """Of each hook that need not be Python: its parameter's id, where it is kept, its key."""
        self._shared: Callable[[], Any] = _nothing
        """The hook of all parameters that are not awaited."""
        self._awaited: Container[int] = ()

    @property
    def is_hooked(self) -> bool:
        return bool(self._handles)

    def hook(self, param: Parameter, hook: _Hook, *, is_always_python: bool = False) -> None:
        """Have this called whenever a gradient of the parameter is complete.

        All that need not be Python have the same one.
        """
        shared: Any = hook
        if not is_always_python:
            shared = self._shared()
            if shared is None:
                shared = partial(hook)
                shared.reducer, shared.python = getattr(hook, "reducer", None), hook
                self._shared = weakref.ref(shared)
        handle: Any = param.register_post_accumulate_grad_hook(shared)  # type: ignore[no-untyped-call]
        self._handles.append(handle)
        if not is_always_python:
            hooks: Any = param._post_accumulate_grad_hooks
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
    hook.__setstate__((target, (), {}, vars(hook)))


class BackwardFollower:
    """Knows which backward pass is running.

        none --(an output's gradient)--> announced --(a parameter's gradient)--> current
             --(a parameter's gradient)--------------------------------------^
        current --(end)--> none          current --(an error)--> broken

    A backward that is announced and reaches no parameter was none of our business: it went
    through the model to its inputs.
    """

    def __init__(self) -> None:
        self.current: Backward | None = None
        self.broken: Backward | None = None
        self.backwards = 0
        """How many backward passes have reached a parameter."""
        self.wants_sync = True
        """What to do in a backward whose forward pass left no wish of its own."""
        self.unmarked_wish: bool | None = None
        """The wish of a forward pass whose outputs could not be marked with it."""
        self._announced: Backward | None = None
        self.arrivals = Arrivals()

    def new_backward(self, wants_sync: bool) -> Backward:
        raise NotImplementedError

    def on_backward_ended(self, ended: Backward) -> None:
        """`ended` has reached parameters, and is complete."""
        raise NotImplementedError

    def on_untouched_backward(self) -> bool:
        """An announced backward has ended at no parameter; whether to treat it as if it had."""
        raise NotImplementedError

    def on_output_grad(self, wants_sync: bool) -> None:
        """An output of a forward pass received its gradient: this is the outermost backward."""
        refuse_distributed_autograd()
        known = self.current or self._announced
        if known is None:
            self._announced = self._follow(wants_sync, _at_end)
        elif wants_sync:
            # Several forwards in one backward: one wish to synchronise is enough. Gradients that
            # came while skipping were not counted; their buckets start at the end of backward.
            known.skips = False

    def open(self) -> Backward:
        """A backward has reached the first parameter."""
        opened = self._announced
        if opened is None:
            wish = self.wants_sync if self.unmarked_wish is None else self.unmarked_wish
            opened = self._follow(wish, _at_end_of_outermost)
        self._announced = None
        self.current = opened
        self.backwards += 1
        return opened

    def _follow(self, wants_sync: bool, queue: Callable[[Callable[[], None]], None]) -> Backward:
        followed = self.new_backward(wants_sync)

        def at_end() -> None:
            self._on_end(followed)

        # Autograd alone owns `at_end`: it is freed when backward ends, however that may be.
        keep_out_of_graphs(at_end)
        followed.callback = weakref.ref(at_end, self._on_callback_freed)
        queue(at_end)
        if self.broken is None:  # else the first gradient is to raise
            self.arrivals.listen(followed.arrived.append, followed.awaited)
        return followed

    def _on_end(self, ended: Backward) -> None:
        self.unmarked_wish = None
        self.arrivals.rest()
        try:
            if self._announced is ended and ended.arrived:
                self.open()
            elif self._announced is ended:
                self._announced = None
                self.current = ended if self.on_untouched_backward() else None
            if self.current is ended:
                self.on_backward_ended(ended)
        finally:
            ended.arrived.clear()

    def _on_callback_freed(self, callback: weakref.ref[Callable[[], None]]) -> None:
        """If its backward is still thought to be running, it has broken off."""
        freed = self.current or self._announced
        if freed is None or freed.callback is not callback:
            return
        self.arrivals.rest()
        if freed is self.current or freed.arrived:
            self.broken = freed
        if freed is not self.current and freed.arrived:
            self.backwards += 1
        self.current = self._announced = None
        freed.arrived.clear()


def keep_out_of_graphs(function: Callable[..., None]) -> None:
    """Have the compiler run this function, and all that it calls, as they are.

    Inside a compiled function autograd calls hooks where the compiler takes every call for a part
    of the program. Unlike `torch.compiler.disable` this does not load the compiler.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)


def _at_end(callback: Callable[[], None]) -> None:
    """Have autograd call at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _at_end_of_outermost(callback: Callable[[], None]) -> None:
    """Have autograd call at the end of the outermost backward.

    A reentrant checkpoint runs a backward of its own inside a node of the real one. Autograd only
    takes callbacks for the inner one here, so the outer node is asked to queue it when it is done.
    """
    node = _outermost_node()
    if node is None:
        _at_end(callback)
    else:
        queue = lambda *_: _at_end(callback)  # noqa: E731
        keep_out_of_graphs(queue)
        node.register_hook(queue)


def refuse_distributed_autograd() -> None:
    """Raise where `torch.distributed.autograd` has the gradients: no parameter hears of them."""
    rpc: Any = sys.modules.get("torch.distributed.rpc")
    if rpc is None or not rpc.is_available() or not rpc._is_current_rpc_agent_set():
        return
    autograd: Any = torch._C._distributed_autograd
    try:
        autograd._current_context()
    except RuntimeError:  # there is none here; on its own threads a backward has none either
        if int(autograd._get_debug_info()["num_current_backward_passes"]) == 0:
            return
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
            node = frame.f_locals.get("ctx")
            if isinstance(node, torch.autograd.graph.Node):
                found = node
        frame = frame.f_back
    return found
