"""What an optimizer's step depends on: single elements, whole tensors, or all of them at once.

Known types are listed, by their exact class. No trial could prove it of another one: Prodigy,
D-Adaptation and AdaNorm give the same bits cut and whole until they meet certain gradients. So of
all others the user says it.
"""

from __future__ import annotations

import inspect
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError

ELEMENTWISE: dict[type[Optimizer], tuple[str, ...]] = {
    optim.SGD: ("momentum_buffer",),
    optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    optim.Adagrad: ("sum",),
    optim.RMSprop: ("square_avg", "momentum_buffer", "grad_avg"),
    optim.NAdam: ("exp_avg", "exp_avg_sq"),
    optim.RAdam: ("exp_avg", "exp_avg_sq"),
    optim.Adamax: ("exp_avg", "exp_inf"),
    optim.Adadelta: ("square_avg", "acc_delta"),
    optim.Rprop: ("prev", "step_size"),
    optim.ASGD: ("ax",),
}
"""What each keeps of every element; of a parameter as a whole it keeps `cut.NUMBERS`."""
BY_TENSOR: tuple[type[Optimizer], ...] = (optim.Adafactor, optim.Muon)


class Kind(StrEnum):
    """The smallest thing that can be stepped alone."""

    ELEMENT = "element"
    TENSOR = "tensor"


def params_of(optimizer: Optimizer) -> list[Parameter]:
    """The parameters in all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def load_state(part: Any, state: Any) -> None:
    """As `part.load_state_dict(state)`, but numbers in the state of an optimizer keep their dtype.

    torch gives them the parameter's: NAdam's product of momenta, in fp32, would be another one on a
    worker that has loaded it than on those that have not, unless the model is in fp32 as well.
    """
    part.load_state_dict(state)
    if not isinstance(part, Optimizer):
        return
    params = params_of(part)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    saved = [state["state"].get(number, {}) for number in numbers]
    names = {
        name
        for param, values in zip(params, saved, strict=True)
        for name, value in values.items()
        # torch leaves `step` alone, and without dimensions everything looks like a number.
        if name != "step" and isinstance(value, Tensor) and value.dim() == 0 < param.dim()
    }
    for param, values in zip(params, saved, strict=True):
        for name in names & values.keys():
            loaded = part.state[param]
            loaded[name] = values[name].to(loaded[name].device, copy=True)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether its `step()` calls the model itself, as L-BFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def find_kind(optimizer: Optimizer, elementwise: bool | None = None) -> Kind:
    """How an optimizer's work can be shared out; raises where it cannot, and says why.

    `elementwise` is the user's word on a type that is not listed.
    """
    name = type(optimizer).__name__
    if needs_closure(optimizer):
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
    if is_known(optimizer):
        return Kind.ELEMENT if type(optimizer) in ELEMENTWISE else Kind.TENSOR
    if elementwise is None:
        raise UsageError(
            f"Whether {name} steps every element by itself is not known, so its update is not "
            "shared out.",
            advice="Pass elementwise=True if no element's step depends on another element, "
            "elementwise=False if none depends on another parameter; otherwise use "
            'update="whole".',
        )
    return Kind.ELEMENT if elementwise else Kind.TENSOR


def is_known(optimizer: Optimizer) -> bool:
    """Whether its exact type is listed; a subclass may do anything."""
    return type(optimizer) in (*ELEMENTWISE, *BY_TENSOR)


def merges(dtype: torch.dtype, *, is_fused: bool) -> bool:
    """Whether neighbours can be stepped as one tensor without changing any bit.

    torch's kernels take some elements at a time, and the last few of a tensor one by one. Fused
    ones round these differently, and so do all in 16 bits.
    """
    return not is_fused and dtype in (torch.float32, torch.float64)
