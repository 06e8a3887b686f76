"""Bits that flip while a worker computes: in a gradient, an activation or a weight.

As in a chip that computes wrong: in one worker's process alone, and without a word.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Where = Literal["gradient", "activation", "weight"]
WHERE: tuple[Where, ...] = ("gradient", "activation", "weight")


def flip(tensor: Tensor, element: int, bit: int) -> Tensor:
    """The tensor with one bit of one of its elements, of 32 bits each, turned over."""
    flipped = tensor.detach().clone()
    flipped.view(torch.int32).view(-1)[element % tensor.numel()] ^= 1 << bit
    return flipped


class Flip:
    """One planned flip in a layer of a worker's model: call `begin` at the beginning of a step."""

    def __init__(
        self,
        layer: nn.Module,
        where: Where,
        *,
        step: int,
        stays: bool = False,
        element: int = 0,
        bit: int = 20,
    ) -> None:
        """With `stays` it happens in every pass from that step on; otherwise once."""
        self.count = 0
        """How often it has happened."""
        self._step, self._stays, self._now = step, stays, 0
        self._element, self._bit = element, bit
        self._weight: Any = layer.weight
        self._is_of_weight = where == "weight"
        if where == "gradient":
            self._weight.register_hook(self._turn)
        elif where == "activation":
            layer.register_forward_hook(lambda _layer, _inputs, out: self._turn_activation(out))

    def begin(self, step: int) -> None:
        self._now = step
        if self._is_of_weight:
            self._weight.data.copy_(self._turn(self._weight.data))

    def _turn(self, tensor: Tensor) -> Tensor:
        is_due = self._now >= self._step if self._stays else self._now == self._step
        if not is_due or (self.count and not self._stays):
            return tensor
        self.count += 1
        return flip(tensor, self._element, self._bit)

    def _turn_activation(self, out: Tensor) -> Tensor:
        return out + (self._turn(out) - out).detach() if out.requires_grad else out
