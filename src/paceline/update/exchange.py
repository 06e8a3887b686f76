"""Around an optimizer's step: the parameters in its groups, exchanged for other tensors.

The optimizer stays the object that it was, and keeps state for what it steps. Outside of `step()`
its groups hold what the caller has put there, and what it saves and loads is the state of whole
parameters.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

States = dict[Any, dict[str, Any]]
"""As `optimizer.state`: by parameter, and by whatever else an optimizer may use."""


class Shares(Protocol):
    """What an optimizer steps instead of parameters."""

    states: States
    """What it keeps for that."""

    def adopt(self, states: States) -> None:
        """Begin with the state of whole parameters."""

    def begin(self) -> None:
        """Have values and gradients where the tensors of the shares look for them."""

    def tensors(self, group: int, params: list[Parameter]) -> list[Parameter]:
        """What is stepped instead of the parameters of a group."""

    def drop_grads(self) -> None:
        """The step is over."""

    def gather(self) -> None:
        """Make every parameter whole again."""

    def describe(self, states: States) -> dict[str, Any]:
        """The state in words; raises where that of whole parameters could not be made of it."""

    def collect(self, states: States, *, keeps: bool = True) -> States:
        """The state of whole parameters; nothing of it without `keeps`."""


class ExchangedStep(ABC):
    """Has one optimizer step shares of its parameters.

    step() is called --> shares in the groups --> stepped --> gathered, all put back
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _exchanged[optimizer] = self
        self._get = weakref.ref(optimizer)
        self._groups: list[tuple[int, ...]] = []
        self._shares: Shares | None = None
        self._has_stepped = False
        self._outside: list[list[Parameter]] | None = None
        """What the groups hold outside of a step; None while they do."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._before_saving)
        optimizer.register_state_dict_post_hook(self._after_saving)
        optimizer.register_load_state_dict_pre_hook(self._before_loading)
        optimizer.register_load_state_dict_post_hook(self._after_loading)

    @abstractmethod
    def make_shares(self, states: States) -> Shares:
        """Those of the groups that there are now, with the state of whole parameters."""

    def is_current(self) -> bool:
        """Whether the shares fit the groups that there are now."""
        return self._groups == self._groups_now()

    def refuse(self) -> None:
        """Raise if there can be no step now."""
        return

    @property
    def is_idle(self) -> bool:
        """Whether the optimizer steps its parameters as they are, for now."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether this process alone has all of the optimizer's state."""
        return True

    def make_whole(self) -> None:
        """Have all of the state in every process, until the next step; all of them call this."""
        return

    def forget(self) -> None:
        """Leave the state that there is, of which others had a part: another one is loaded."""
        return

    @property
    def optimizer(self) -> Any:
        optimizer = self._get()
        assert optimizer is not None  # its hooks are what calls this
        return optimizer

    def _groups_now(self) -> list[tuple[int, ...]]:
        return [tuple(map(id, group["params"])) for group in self.optimizer.param_groups]

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.put_back()
        self.refuse()
        if self.is_idle:
            return None
        args, kwargs = _without_closure(args, kwargs)
        if self._shares is None or not self.is_current():
            states = self.optimizer.state if self._shares is None else self.collect(self._shares)
            self._shares, self._groups = self.make_shares(states), self._groups_now()
            self.optimizer.state = self._shares.states
        self._shares.begin()
        groups = self.optimizer.param_groups
        self._outside = [group["params"] for group in groups]
        for number, group in enumerate(groups):
            group["params"] = self._shares.tensors(number, group["params"])
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        self.put_back()
        if self._shares is None:
            return
        if not self._has_stepped:
            self._shares.describe(self.optimizer.state)
            self._has_stepped = True
        self._shares.gather()

    def put_back(self) -> None:
        """Give the groups their parameters back; also after a step that has failed."""
        if self._shares is None:
            return
        if self._outside is not None:
            for group, params in zip(self.optimizer.param_groups, self._outside, strict=True):
                group["params"] = params
            self._outside = None
            self._shares.drop_grads()
        self.optimizer.state = self._shares.states

    def collect(self, shares: Shares) -> States:
        """The state of whole parameters, in their order."""
        whole = shares.collect(shares.states)
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return {**{param: whole[param] for param in params if param in whole}, **whole}

    def _before_saving(self, _: Any) -> None:
        self.put_back()
        if self._shares is not None:
            self.optimizer.state = self.collect(self._shares)

    def _after_saving(self, *_: Any) -> None:
        self.put_back()

    def take_part_in_saving(self) -> None:
        """Help other ranks that call `optimizer.state_dict()`, without the memory for all of it."""
        if self._shares is not None:
            self._shares.collect(self._shares.states, keeps=False)

    def _before_loading(self, *_: Any) -> None:
        self.put_back()

    def _after_loading(self, _: Any) -> None:
        """What was loaded is the state of whole parameters."""
        if self._shares is not None:
            self._shares.adopt(self.optimizer.state)
            self.optimizer.state = self._shares.states


_exchanged: weakref.WeakKeyDictionary[Optimizer, ExchangedStep] = weakref.WeakKeyDictionary()


def find_exchanged(optimizer: Optimizer) -> ExchangedStep | None:
    """What exchanges the parameters of this optimizer around its step, if anything does."""
    return _exchanged.get(optimizer)


def _without_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the closure now, while the groups hold parameters, and pass on what it returned."""
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {**kwargs, "closure": lambda: loss}
