"""Models for tests: equal on every rank without global random state, and exact comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.errors import UsageError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def seeded(module: ModuleT, seed: int = 0) -> ModuleT:
    """Refill the parameters from `seed`, and return the module.

    Thread ranks share torch's global random numbers, so `torch.manual_seed` cannot make their
    models equal. Buffers and parameters that are not floating point stay as they are.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            wide = torch.complex64 if parameter.is_complex() else torch.float32
            drawn = torch.randn(parameter.shape, generator=generator, dtype=wide)
            fan_in = parameter.numel() // max(1, parameter.shape[0]) if parameter.dim() else 1
            parameter.copy_(drawn / max(1, fan_in) ** 0.5)
    return module


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter's gradient by name, None where there is none."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }


def assert_replicas_equal(states: Sequence[Mapping[str, Tensor | None]]) -> None:
    """Fail unless every rank's state is rank 0's, bit for bit; name the first difference.

    Takes `state_dict()`s or `gradients()` in rank order, as `run_ranks` returns them.
    """
    if not states:
        raise UsageError("There are no states to compare.", advice="Pass one per rank.")
    first = states[0]
    for rank, other in enumerate(states[1:], start=1):
        if list(first) != list(other):
            odd = sorted(set(first) ^ set(other))
            what = f"other names than rank 0, such as {odd[0]!r}" if odd else "another order"
            raise AssertionError(f"rank {rank} has {what}")
        for name in first:
            difference = _difference(first[name], other[name])
            if difference:
                raise AssertionError(
                    f"{name!r} differs between rank 0 and rank {rank}: {difference}"
                )


def _difference(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None:
        return "" if a is b else f"{'nothing' if a is None else 'a tensor'} on rank 0 only"
    a, b = a.detach().cpu(), b.detach().cpu()
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"
    if torch.equal(_bits(a), _bits(b)):
        return ""
    unequal = (_bits(a) != _bits(b)).view(a.numel(), -1).any(1)
    wide = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.to(wide) - b.to(wide)).abs().max().item()
    return f"{int(unequal.sum()):,} of {a.numel():,} elements, by up to {gap:.3g}"


def _bits(tensor: Tensor) -> Tensor:
    """The bytes, in which 0.0 differs from -0.0, and a NaN equals itself."""
    plain = tensor.resolve_conj().resolve_neg().to_dense() if tensor.is_sparse else tensor
    return plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
