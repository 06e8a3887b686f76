"""Whether all ranks hold the same parameters: a fingerprint of some of them, in every few trailers.

Every parameter's bits are hashed once in `PERIOD` steps, and compared without a further message:
ranks add up each digit of the hash and its square. The digits are equal exactly where the sum of
the squares, times the ranks, is the square of the sum; so all ranks find a difference in the same
step, and can then look together for who differs in what.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.ddp.buffer import ParamRef

EVERY, TURNS = 4, 24
"""A fingerprint is sent every so many steps; after so many, all parameters have been in one."""
PERIOD = EVERY * TURNS
DIGITS, DIGIT_BITS = 6, 6
"""Small digits: sums of their squares are exact in float32 for `LARGEST_SIZE` ranks."""
LARGEST_SIZE = 4096
LENGTH = 1 + 2 * DIGITS
"""Numbers in a trailer: how many ranks sent a fingerprint, the digits, and their squares."""
_MIX = 1_000_003
_PER_TENSOR_BYTES = 16_384
"""What a tensor costs besides its bytes, in bytes hashed in that time."""

Piece = tuple[ParamRef, int, int]
"""Elements [start, stop) of a parameter, in the order in which they lie in memory."""


class Fingerprint:
    """Hashes the parameters of one model, some in each turn; the same ones on every rank."""

    def __init__(self, params: Sequence[ParamRef], device: torch.device) -> None:
        self._device = device
        self._chunk_bytes = 2**18 if device.type == "cpu" else 2**22
        self._chunks_by_turn = self._plan(params)
        self._weights: dict[torch.device, Tensor] = {}

    def _plan(self, params: Sequence[ParamRef]) -> list[list[list[Piece]]]:
        """By turn, chunks that are hashed at once: about the same work in every turn."""
        pieces: list[tuple[Piece, int]] = []
        for ref in params:
            param = ref.get()
            if param is not None:
                step = self._chunk_bytes // param.element_size()
                for start in range(0, param.numel(), step):
                    stop = min(start + step, param.numel())
                    pieces.append(((ref, start, stop), (stop - start) * param.element_size()))
        total = sum(nbytes + _PER_TENSOR_BYTES for _, nbytes in pieces)
        turns: list[list[list[Piece]]] = [[] for _ in range(TURNS)]
        before, room, where = 0, 0, self._device
        for piece, nbytes in pieces:
            chunks = turns[before * TURNS // total]
            before += nbytes + _PER_TENSOR_BYTES
            room -= nbytes
            param = piece[0].get()
            device = where if param is None else param.device
            if not chunks or room < 0 or device != where:
                chunks.append([])
                room, where = self._chunk_bytes - nbytes, device
            chunks[-1].append(piece)
        return [chunks for chunks in turns if chunks]

    @torch.no_grad()
    def words(self, step: int) -> Tensor | None:
        """What goes into the trailer, in every `EVERY`th step; the host waits for no device."""
        if not self._chunks_by_turn:
            return None
        total: Tensor | None = None
        for pieces in self._chunks_by_turn[step // EVERY % len(self._chunks_by_turn)]:
            hashed = self._hash(pieces).to(self._device)
            total = hashed if total is None else torch.add(hashed, total, alpha=_MIX)
        assert total is not None  # no turn is without chunks
        return spread(total)

    def _hash(self, pieces: Sequence[Piece]) -> Tensor:
        """The sum of all 32-bit words, each mixed and times an odd random number of its place.

        All modulo 2^32: another word always gives another sum, several others nearly always. Mixed,
        because otherwise the highest bits of two words, which are signs, could cancel out.
        """
        found = ((ref.get(), start, stop) for ref, start, stop in pieces)
        parts = [_flat(param, start, stop) for param, start, stop in found if param is not None]
        if not parts:  # the model has dropped them
            return torch.zeros((), dtype=torch.int32, device=self._device)
        if len({part.dtype for part in parts}) > 1:
            parts = [part.view(torch.uint8) for part in parts]
        data = torch.cat(parts) if len(parts) != 1 else parts[0]
        if data.element_size() % 4:
            data = data.view(torch.uint8)
            data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
        words = data.view(torch.int32)
        weights = self._weights.get(words.device)
        if weights is None:
            generator = torch.Generator().manual_seed(0)
            weights = torch.randint(2**31, (self._chunk_bytes // 4,), generator=generator)
            weights = self._weights[words.device] = (weights.to(torch.int32) | 1).to(words.device)
        mixed = (words >> 15).bitwise_xor_(words).mul_(weights[: words.numel()])
        return mixed.sum(dtype=torch.int32)


def _flat(param: Tensor, start: int, stop: int) -> Tensor:
    """Some of a parameter's elements, in the order in which they lie in memory."""
    if not param.is_contiguous():
        order = sorted(range(param.dim()), key=param.stride, reverse=True)
        param = param.permute(order).contiguous()
    flat = param.reshape(-1)
    return flat if stop - start == flat.numel() else flat[start:stop]


def spread(hashed: Tensor) -> Tensor:
    """A hash as words whose sums over the ranks show whether all of them have sent the same."""
    shifts = torch.arange(0, DIGITS * DIGIT_BITS, DIGIT_BITS, device=hashed.device)
    digits = (hashed >> shifts) & (2**DIGIT_BITS - 1)
    return torch.cat([torch.ones_like(digits[:1]), digits, digits * digits])


def is_different(sums: Sequence[float]) -> bool:
    """Whether the sum of all ranks' words says that not all have sent the same digits."""
    count, digits, squares = sums[0], sums[1 : 1 + DIGITS], sums[1 + DIGITS :]
    return any(
        count * square != digit * digit for digit, square in zip(digits, squares, strict=True)
    )
