"""How far two sets of tensors are apart, and whether that is rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

# How far apart two orders of the same sums may end, as a share of the largest number.
ROUNDING_BY_DTYPE = {torch.float64: 1e-10, torch.float32: 1e-4}
ROUNDING_OF_OTHERS = 5e-2
NEXT_TO_NOTHING = 1e-12


def pair_up(
    ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Tensors of one name; one that only one side has is compared with zeros."""
    pairs = []
    for name, mine in ours.items():
        other = theirs.get(name)
        if mine is None and other is None:
            continue
        known = mine if mine is not None else other
        assert known is not None
        zeros = torch.zeros_like(known)
        pairs.append((zeros if mine is None else mine, zeros if other is None else other))
    return pairs


def distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The largest difference, and the largest finite number that it is a difference of."""
    difference = scale = 0.0
    for ours, theirs in pairs:
        if ours.numel():
            one = _dense(ours).detach()
            two = _dense(theirs).to(one.device)
            wide = torch.complex128 if one.is_complex() else torch.float64
            apart = (one.to(wide) - two.to(wide)).abs()
            # Infinities of one sign do not differ, nor do two that are no numbers.
            is_equal = (one == two) | (one.isnan() & two.isnan())
            apart = torch.where(is_equal, torch.zeros_like(apart), apart)
            difference = max(difference, apart.max().item(), key=order)
            finite = one[one.isfinite()].abs()
            scale = max(scale, finite.max().item() if finite.numel() else 0.0)
    return difference, scale


def is_finite(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    return all(bool(_dense(tensor).isfinite().all()) for pair in pairs for tensor in pair)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def order(number: float) -> float:
    """A key to sort numbers by: what is not a number is the worst."""
    return float("inf") if number != number else number


def rounding(dtypes: Iterable[torch.dtype]) -> float:
    """The share of the largest number that rounding may explain, by the roughest dtype."""
    return max((ROUNDING_BY_DTYPE.get(d, ROUNDING_OF_OTHERS) for d in dtypes), default=1e-4)
