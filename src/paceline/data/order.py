"""The order of an epoch as a keyed permutation, computed where needed and never stored.

A shuffled list of N numbers takes 8 N bytes, and time to draw, on every worker, before the first
step. A keyed permutation computes only the positions that are requested:

    position p = left + A * right        A * B >= N, both about the square root of N
    left  += hash(key 0, right)  mod A   each round can be undone by subtracting what it added,
    right += hash(key 1, left)   mod B   so two positions never give the same result
    ...
    a result >= N is mapped again        until it is below N, which can be undone as well

The keys depend on seed and epoch only, so any number of workers compute the same order. It is a
good shuffle, but not a cipher.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt
from typing import Literal

import torch
from torch import Tensor

OrderName = Literal["torch", "keyed"]

KEEPS_UP_TO = 2**22
"""Up to this many samples are shuffled as in torch: that takes 32 MiB and a third of a second."""
_ROUNDS = 8
_BLOCK = 2**13
"""How many positions are computed at once and cached: a few take as long as a thousand."""


class KeyedOrder:
    """The numbers 0 to `total` - 1 in an order that depends on `key` only."""

    def __init__(self, total: int, *key: int | str) -> None:
        self.total = total
        self._left = isqrt(max(total, 1) - 1) + 1
        self._right = -(-total // self._left)
        digest = blake2b("/".join(map(str, key)).encode(), digest_size=8 * _ROUNDS).digest()
        numbers = (digest[8 * i : 8 * i + 8] for i in range(_ROUNDS))
        self._block_number, self._block = -1, torch.empty(0, dtype=torch.int64, device="cpu")
        self._keys = [int.from_bytes(each, "little", signed=True) for each in numbers]

    def __getitem__(self, where: slice) -> Tensor:
        """The numbers at these positions, as if indexing a tensor of all."""
        positions = range(*where.indices(self.total))
        block = positions.start // _BLOCK
        if not positions or positions[-1] // _BLOCK != block:
            return self._compute(positions)
        if block != self._block_number:
            whole = range(block * _BLOCK, min((block + 1) * _BLOCK, self.total))
            self._block_number, self._block = block, self._compute(whole)
        start, stop = positions.start - block * _BLOCK, positions.stop - block * _BLOCK
        return self._block[start : stop : positions.step]

    def _compute(self, positions: range) -> Tensor:
        # An explicit device, because the user may have set another default device.
        numbers = torch.arange(len(positions), device="cpu").mul_(positions.step)
        numbers = self._shuffle(numbers.add_(positions.start))
        while (outside := (numbers >= self.total).nonzero()).numel():
            numbers[outside] = self._shuffle(numbers[outside])
        return numbers

    def _shuffle(self, numbers: Tensor) -> Tensor:
        left, right = numbers % self._left, numbers // self._left
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            left = left.add_(_hash(right, even)).remainder_(self._left)
            right = right.add_(_hash(left, odd)).remainder_(self._right)
        return right.mul_(self._left).add_(left)


def _hash(numbers: Tensor, key: int) -> Tensor:
    """A signed 31-bit hash, each bit of which depends on all bits of number and key.

    Products overflow, and shifts keep the sign: neither has to be invertible.
    """
    mixed = (numbers ^ key).mul_(-0x61C8864680B583EB)
    return mixed.bitwise_xor_(mixed >> 32).mul_(-0x4B47D0C5AD9F1D3B).bitwise_right_shift_(33)


def choose_order(total: int) -> OrderName:
    """The default of a run: torch's order, unless storing it would take too much memory."""
    return "torch" if total <= KEEPS_UP_TO else "keyed"


def draw_order(name: OrderName, total: int, seed: int, epoch: int) -> Tensor | KeyedOrder:
    """The order of one epoch; "torch" is the list that torch's `DistributedSampler` draws."""
    if name == "torch":
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(total, generator=generator, device="cpu")
    return KeyedOrder(total, seed, "epoch", epoch)
