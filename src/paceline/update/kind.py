"""What an optimizer's step depends on: single elements, whole tensors, or all of them at once.

Known types are listed. Any other is tried out on small tensors: stepped cut and whole, it must give
the same bits, and its state must be of the parameters' shapes.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam),
    *(optim.RAdam, optim.Adamax, optim.Adadelta, optim.Rprop, optim.ASGD),
)
BY_TENSOR: tuple[type[Optimizer], ...] = (optim.Adafactor, optim.Muon)
_SHAPES = ((8, 33), (3, 1733))
"""Of the tensors for a trial: a small one, and one above the sizes that libraries leave alone."""
_STEPS = 4


class Kind(StrEnum):
    """The smallest thing that can be stepped alone."""

    ELEMENT = "element"
    TENSOR = "tensor"


def find_kind(optimizer: Optimizer) -> Kind:
    """How an optimizer's work can be shared out; raises where it cannot, and says why."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{name} calls the model itself and looks at all parameters at once, so its update "
            "cannot be shared out.",
            advice='Leave shard_update() out, or use update="whole".',
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(
            f"{name} was made with differentiable=True, and slices have no graph.",
            advice="Leave differentiable out, or do not share the update out.",
        )
    if type(optimizer) in ELEMENTWISE:
        return Kind.ELEMENT
    if type(optimizer) in BY_TENSOR:
        return Kind.TENSOR
    for kind in Kind:
        try:
            if _passes(optimizer, kind):
                return kind
        except Exception as error:
            reason = f"it cannot be tried out: {error}"
            break
    else:
        reason = "a tensor stepped alone gets other values than among the others"
    raise UsageError(
        f"The update of {name} cannot be shared out: {reason}.",
        advice='Use an optimizer that treats every tensor by itself, or update="whole".',
    )


def merges(dtype: torch.dtype, *, is_fused: bool) -> bool:
    """Whether neighbours can be stepped as one tensor without changing any bit.

    torch's kernels take some elements at a time, and the last few of a tensor one by one. Fused
    ones round these differently, and so do all in 16 bits.
    """
    return not is_fused and dtype in (torch.float32, torch.float64)


@torch.random.fork_rng(devices=())
def _passes(optimizer: Optimizer, kind: Kind) -> bool:
    """Step two tensors together, and in parts that know nothing of each other, and compare."""
    generator = torch.Generator().manual_seed(0)
    for group in optimizer.param_groups:
        whole = [torch.randn(shape, generator=generator) for shape in _SHAPES]
        parts = [part.clone() for tensor in whole for part in _part(tensor, kind)]
        stepped = _Trial(optimizer, group, whole)
        alone = [_Trial(optimizer, group, [part]) for part in parts]
        for _ in range(_STEPS):
            grads = [torch.randn(shape, generator=generator) for shape in _SHAPES]
            stepped.step(grads)
            cut = [part.clone() for grad in grads for part in _part(grad, kind)]
            for trial, grad in zip(alone, cut, strict=True):
                trial.step([grad])
        expected = [part for tensor in stepped.params for part in _part(tensor, kind)]
        if not all(torch.equal(a, t.params[0]) for a, t in zip(expected, alone, strict=True)):
            return False
        if kind is Kind.ELEMENT and not all(trial.has_flat_state() for trial in alone):
            return False
    return True


def _part(tensor: Tensor, kind: Kind) -> Sequence[Tensor]:
    if kind is Kind.TENSOR:
        return [tensor]
    flat, border = tensor.detach().reshape(-1), 64
    return [flat[:border], flat[border:]]


class _Trial:
    """An optimizer like the one given, with parameters of its own and no state."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], tensors: list[Tensor]) -> None:
        self.params = [Parameter(tensor.clone()) for tensor in tensors]
        self._optimizer: Any = object.__new__(type(optimizer))
        kept = {name: value for name, value in vars(optimizer).items() if "hook" not in name}
        for name, value in kept.items():
            if isinstance(value, Optimizer):
                raise TypeError(f"it wraps another optimizer as {name!r}")
        # As when it is unpickled: the base class brings hooks of its own.
        settings = {key: copy.deepcopy(v) for key, v in group.items() if key != "params"}
        plain = {n: v for n, v in kept.items() if n not in ("state", "param_groups", "step")}
        vars(self._optimizer).update(copy.deepcopy(plain))
        self._optimizer.__setstate__(
            {
                "state": defaultdict(dict),
                "param_groups": [{**settings, "params": self.params}],
            }
        )

    def step(self, grads: Sequence[Tensor]) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        type(self._optimizer).step(self._optimizer)

    def has_flat_state(self) -> bool:
        """Whether every tensor of the state is of the parameter's shape, or one number."""
        state = self._optimizer.state[self.params[0]]
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        return all(t.shape == self.params[0].shape or t.numel() == 1 for t in tensors)
