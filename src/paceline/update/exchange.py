"""Around an optimizer's step: the parameters in its groups, exchanged for other tensors.

The optimizer stays the object that it was, and keeps state for what it steps. Outside of `step()`
its groups hold what the caller has put there, and what it saves and loads is the state of whole
parameters.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.torch_private import step_without_hooks
from paceline.update.kind import params_of

States = dict[Any, dict[str, Any]]
"""As `optimizer.state`: by parameter, and by whatever else an optimizer may use."""


class Shares(ABC):
    """What an optimizer steps instead of parameters."""

    states: States
    """What it keeps for that."""

    @abstractmethod
    def adopt(self, states: States) -> None:
        """Begin with the state of whole parameters."""

    @abstractmethod
    def begin(self) -> None:
        """Have values and gradients where the tensors of the shares look for them."""

    lots = 1
    """How many times the optimizer is to step, each time other tensors."""

    def open(self, lot: int) -> None:  # noqa: B027
        """What `tensors` gives is of this lot now; those before have been stepped."""

    @abstractmethod
    def tensors(self, group: int, params: list[Parameter]) -> list[Parameter]:
        """What is stepped instead of the parameters of a group."""

    @abstractmethod
    def drop_grads(self) -> None:
        """Clear the gradients of the shares."""

    @abstractmethod
    def gather(self) -> None:
        """Make every parameter whole again, after the shares have been stepped."""

    @abstractmethod
    def collect(self, *, keeps: bool = True) -> States:
        """The state of whole parameters, from all ranks' shares of it; all of them call this.

        A rank that does not keep the result takes part without the memory for it.
        """


class ExchangedStep(ABC):
    """Has one optimizer step shares of its parameters.

    step() is called --> shares in the groups --> stepped --> gathered, all put back
    """

    is_kept = False
    """Whether every rank's state is to outlive it, if it can."""

    def __init__(self, optimizer: Optimizer) -> None:
        _exchanged[optimizer] = self
        self._get = weakref.ref(optimizer)
        self._basis: Any = None
        self._shares: Shares | None = None
        self._outside: list[list[Parameter]] | None = None
        """What the groups hold outside of a step; None while they do."""
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._before_saving)
        optimizer.register_state_dict_post_hook(self.put_back)
        optimizer.register_load_state_dict_pre_hook(self.put_back)
        optimizer.register_load_state_dict_post_hook(self._after_loading)

    @abstractmethod
    def make_shares(self, states: States) -> Shares:
        """Those of the groups that there are now, with the state of whole parameters."""

    def basis(self) -> Any:
        """What shares depend on: when it has changed, others are made for the next step."""
        return [tuple(map(id, group["params"])) for group in self.optimizer.param_groups]

    def exchanges(self) -> bool:
        """Whether the optimizer is to step shares now; raises if there can be no step."""
        return True

    @property
    def is_last_hook(self) -> bool:
        """Whether all other hooks before the step see the parameters as they are."""
        return next(reversed(self.optimizer._optimizer_step_pre_hooks), None) == self._hook.id

    @property
    def is_whole(self) -> bool:
        """Whether this process alone has all of the optimizer's state."""
        return True

    def make_whole(self) -> None:
        """Have all of the state in every process, until the next step; all of them call this."""
        if self._shares is not None and not self.is_whole:
            whole = self.collect(self._shares)
            self._shares, self.optimizer.state = None, defaultdict(dict, whole)

    def rescue(self) -> None:  # noqa: B027
        """Have all of the state in this process, if it can be had without ranks that are gone."""

    def withdraw(self) -> None:  # noqa: B027
        """Take part in no step any more, until others are made."""

    def forget(self) -> None:
        """Leave the state that there is, of which others had a part: another one is loaded."""
        self.put_back()
        if not self.is_whole:
            self._shares, self.optimizer.state = None, defaultdict(dict)

    @property
    def optimizer(self) -> Any:
        optimizer = self._get()
        assert optimizer is not None  # its hooks are what calls this
        return optimizer

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch calls no hook after a step that has raised.
        self.put_back()
        if not self.exchanges():
            return None
        args, kwargs = _without_closure(args, kwargs)
        if self._shares is None or self._basis != self.basis():
            states = self.optimizer.state if self._shares is None else self.collect(self._shares)
            self._shares, self._basis = self.make_shares(states), self.basis()
            self.optimizer.state = self._shares.states
        self._shares.begin()
        groups = self.optimizer.param_groups
        self._outside = outside = [group["params"] for group in groups]
        for lot in range(self._shares.lots):  # the last one is left to the step itself
            if lot:
                step_without_hooks(self.optimizer)
            self._shares.open(lot)
            for number, group in enumerate(groups):
                group["params"] = self._shares.tensors(number, outside[number])
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        self.put_back()
        if self._shares is not None:
            self.gather(self._shares)

    def gather(self, shares: Shares) -> None:
        """Make every parameter whole again."""
        shares.gather()

    def put_back(self, *_: Any) -> None:
        """Give the groups their parameters back; also after a step that has failed."""
        if self._shares is None:
            return
        if self._outside is not None:
            for group, params in zip(self.optimizer.param_groups, self._outside, strict=True):
                group["params"] = params
            self._outside = None
            # These may be views of buckets, and keep those from using their memory again.
            self._shares.drop_grads()
        self.optimizer.state = self._shares.states

    def collect(self, shares: Shares) -> States:
        """The state of whole parameters, in their order."""
        return self.in_order(shares.collect())

    def in_order(self, whole: States) -> States:
        params = [param for param in params_of(self.optimizer) if param in whole]
        return {**{param: whole[param] for param in params}, **whole}

    def _before_saving(self, _: Any) -> None:
        self.put_back()
        if self._shares is not None:
            self.optimizer.state = self.collect(self._shares)

    def take_part_in_saving(self) -> None:
        """Help other ranks that call `optimizer.state_dict()`, without the memory for all of it."""
        if self._shares is not None:
            self._shares.collect(keeps=False)

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
