"""Who hears that a gradient has come: Python, or a list that is looked at once per bucket.

Autograd calls a hook when a parameter's gradient is complete. A hook of a few lines of Python takes
longer than many a small layer, so while a backward is followed most hooks are the `append` of
a list, which runs no Python at all and forgets nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, MutableMapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from paceline.gradients.backward import keep_out_of_graphs

Hook = Callable[[Tensor], None]
_Hooks = MutableMapping[int, Hook]


class Arrivals:
    """The hooks on the parameters of one model.

        resting: each calls Python --(listen)--> only the awaited ones do --(rest)--> resting

    Invariant: at rest every parameter calls Python, so that no backward goes unnoticed, whichever
    parameters it reaches. Holds hooks only while listening, and parameters never: see
    Note [Who keeps whom alive] in `reducer`.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._places: list[tuple[int, Callable[[], _Hooks | None], int]] = []
        """Of each hook that need not be Python: its parameter's id, where it is kept, its key."""
        self._replaced: list[tuple[_Hooks, int, Hook]] = []

    @property
    def is_hooked(self) -> bool:
        return bool(self._handles)

    def hook(self, param: Parameter, hook: Hook, *, is_always_python: bool = False) -> None:
        """Have this called whenever a gradient of the parameter is complete."""
        keep_out_of_graphs(hook)
        handle: Any = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
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

    def listen(self, note: Hook, awaited: Container[int]) -> None:
        """Until `rest`, have all but the parameters with these ids call `note` instead."""
        self.rest()
        self._replaced = [
            (hooks, key, hooks[key])
            for param, get, key in self._places
            if param not in awaited and (hooks := get()) is not None and key in hooks
        ]
        for hooks, key, _ in self._replaced:
            hooks[key] = note

    def rest(self) -> None:
        """Have every parameter call Python again."""
        for hooks, key, hook in self._replaced:
            if key in hooks:
                hooks[key] = hook
        self._replaced = []
