"""Whether all ranks hold the same parameters, and train on different rows: hashes in trailers.

Every parameter's bits are hashed once in `PERIOD` steps, and compared without a further message:
ranks add up each digit of the hash and its square. The digits are equal exactly where the sum of
the squares, times the ranks, is the square of the sum; so all ranks find a difference in the same
step, and can then look together for who differs in what.

In the first steps after step 0 the hash is of the inputs in two steps, of the dataset in a third.
If all ranks sent the same, rank 0 warns, once.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler

from paceline.ddp.buffer import ParamRef
from paceline.ddp.checks import checksum
from paceline.group import find_tensors
from paceline.torch_private import follow_batches

EVERY, TURNS = 4, 24
"""A fingerprint is sent every so many steps; after so many, all parameters have been in one."""
PERIOD = EVERY * TURNS
DIGITS, DIGIT_BITS = 6, 6
"""Small digits: sums of their squares are exact in float32 for `LARGEST_SIZE` ranks."""
LARGEST_SIZE = 4096
LENGTH = 1 + 2 * DIGITS
"""Numbers in a trailer: how many ranks sent a fingerprint, the digits, and their squares."""
# A prime: hashes of several chunks are the digits of a number to this base.
_MIX = 1_000_003
_PER_TENSOR_BYTES = 16_384
"""What a tensor costs besides its bytes, in bytes hashed in that time."""
INPUT_STEPS, DATASET_STEP = (1, 2), 3
assert DATASET_STEP < EVERY  # whose multiples are taken
_MOST_BYTES = 2**22
"""Of an input: the first rows tell."""
_MOST_PARTS, _MOST_DEPTH = 2**11, 6
"""Of a dataset's attributes."""
# Knuth's multiplier for 64 bits: it is odd, so no bit of what it is multiplied with is lost.
_WIDE_MIX = 0x5851F42D4C957F2D

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
    def words(self, step: int, *, is_training: bool = True) -> Tensor | None:
        """What goes into the trailer, in every `EVERY`th step; the host waits for no device.

        Ranks of which only some are in training mode differ, too: dropout and BatchNorm would."""
        if not self._chunks_by_turn:
            return None
        total: Tensor | None = None
        for pieces in self._chunks_by_turn[step // EVERY % len(self._chunks_by_turn)]:
            hashed = self._hash(pieces).to(self._device)
            total = hashed if total is None else torch.add(hashed, total, alpha=_MIX)
        assert total is not None  # no turn is without chunks
        return spread(total if is_training else total + 1)

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
            # On the host, and moved: the same numbers on every rank, whatever its device.
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
    flat = param.reshape(-1).resolve_conj()
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


class SameRowsWarning(UserWarning):
    """Ranks train on the same rows, where each should have its own."""


class InputCheck:
    """Told of the inputs of one model, and after `DATASET_STEP` of nothing any more."""

    def __init__(self) -> None:
        self._hash: Tensor | None = None
        self._seen: set[Sequence[float]] = set()
        """The digits of steps in which all ranks had the same inputs."""
        self._dataset: int | None = None
        """Hash of the dataset that the batch of `DATASET_STEP` is from, if a loader shuffles it."""
        if not _waiting:
            follow_batches(_note)
        _waiting.add(self)

    @torch.no_grad()
    def see(self, step: int, inputs: Any) -> None:
        """A forward pass that will have a backward begins; there may be several in a step."""
        dataset = _take_shuffled()
        if step == DATASET_STEP and dataset is not None:
            self._dataset = _hash_dataset(dataset)
        if step not in INPUT_STEPS:
            return
        for tensor in find_tensors(inputs):
            if tensor.layout is torch.strided and tensor.numel():
                part = tensor.reshape(-1)[: _MOST_BYTES // tensor.element_size()]
                first, second = checksum(part)
                mixed = (first * _WIDE_MIX + second) * _WIDE_MIX
                self._hash = (
                    mixed if self._hash is None else self._hash.to(mixed) * _WIDE_MIX + mixed
                )

    def words(self, step: int, device: torch.device) -> Tensor | None:
        """What goes into the trailer of this step."""
        found, self._hash = self._hash, None
        if step == DATASET_STEP:
            _waiting.discard(self)
            found = None if self._dataset is None else torch.tensor(self._dataset)
        # `spread` takes the lower bits: the upper ones are mixed into them.
        return None if found is None else spread((found ^ (found >> 32)).to(device))

    def read(self, step: int, sums: Sequence[float], size: int, *, warns: bool) -> None:
        """What all ranks have sent together."""
        if sums[0] != size or is_different(sums):
            return
        if step in INPUT_STEPS:
            self._seen.add(tuple(sums[1 : 1 + DIGITS]))
        is_alike = len(self._seen) == len(INPUT_STEPS)
        if warns and (
            is_alike if step == INPUT_STEPS[-1] else step == DATASET_STEP and not is_alike
        ):
            _warn(size, is_alike=is_alike)


def _warn(size: int, *, is_alike: bool) -> None:
    what = (
        f"All {size} ranks had the same inputs in steps {INPUT_STEPS[0]} and {INPUT_STEPS[1]}, so "
        "they learn no more than one of them would."
        if is_alike
        else f"Each of the {size} ranks shuffles the whole dataset for itself, so that an epoch "
        f"goes through it {size} times."
    )
    warnings.warn(
        f"{what} Deal the rows to the ranks: DataLoader(dataset, sampler=DistributedSampler("
        "dataset), ...) instead of shuffle=True, and sampler.set_epoch(epoch) before each epoch.",
        SameRowsWarning,
        stacklevel=2,
    )


_waiting: weakref.WeakSet[InputCheck] = weakref.WeakSet()
"""Those that have not come to `DATASET_STEP` yet."""
_newest = threading.local()


def _note(batches: Any) -> bool:
    """This thread has got a batch; whether the answer is still wanted."""
    _newest.batches = weakref.ref(batches)
    return bool(_waiting)


def _take_shuffled() -> Any:
    """The dataset of the batch that this thread has got last and not asked about yet, if it is from
    a `DataLoader(shuffle=True)`; else None."""
    batches: Any = getattr(_newest, "batches", lambda: None)()
    _newest.batches = lambda: None
    sampler = getattr(batches, "_index_sampler", None)
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    is_shuffled = type(sampler) is RandomSampler and not sampler.replacement
    return batches._dataset if is_shuffled else None


def _hash_dataset(dataset: Any) -> int | None:
    """A number by which two ranks tell whether they have the same dataset; None: they cannot.

    From its attributes, of which one differs where ranks have a part each; no sample is read.
    """
    hashed, left = hashlib.sha256(), _MOST_PARTS

    def add(value: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        hashed.update(type(value).__qualname__.encode())
        items: Any = None
        if isinstance(value, (list, tuple)):
            hashed.update(b"%d" % len(value))
            items = value[:_MOST_PARTS]
        elif isinstance(value, Mapping):
            items = [part for pair in value.items() for part in pair]
        elif isinstance(value, Tensor) or hasattr(value, "__array_interface__"):
            flat = torch.as_tensor(value).detach().reshape(-1)[: _MOST_BYTES // 8]
            hashed.update(repr((value.shape, checksum(flat).tolist())).encode())
        elif callable(value) and hasattr(value, "__qualname__"):
            hashed.update(value.__qualname__.encode())
        elif hasattr(value, "__dict__"):
            items = [part for pair in vars(value).items() for part in pair]
        elif " at 0x" in (text := repr(value)):
            raise TypeError("an object that does not show what it holds")
        else:
            hashed.update(text.encode())
        for item in items or ():
            if left > 0 and depth < _MOST_DEPTH:
                add(item, depth + 1)

    try:
        add(dataset, 0)
    except Exception:  # it is the user's, and may be anything
        return None
    # So many bytes are a positive number of 64 bits.
    return None if dataset is None else int.from_bytes(hashed.digest()[:7])
