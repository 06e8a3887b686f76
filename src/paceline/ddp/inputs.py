"""Whether ranks train on the same rows: what the first inputs of a model say, and its loader.

In the first steps after step 0 the trailer has room for a hash, where later steps have one of the
parameters (see `fingerprint`): of the inputs in two steps, of the dataset in a third. If all ranks
sent the same, rank 0 warns, once. Ranks without inputs that can be hashed send nothing.
"""

from __future__ import annotations

import gc
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler

from paceline.ddp.checks import checksum
from paceline.ddp.fingerprint import DIGITS, EVERY, is_different, spread
from paceline.group import find_tensors
from paceline.torch_private import BatchIterator

INPUT_STEPS, DATASET_STEP = (1, 2), 3
assert DATASET_STEP < EVERY  # whose multiples are taken
_MOST_BYTES = 2**22
"""Of an input: the first rows tell."""
_MOST_PARTS, _MOST_DEPTH = 2**11, 6
"""Of a dataset's attributes."""
_MIX = 0x5851F42D4C957F2D


class SameRowsWarning(UserWarning):
    """Ranks train on the same rows, where each should have its own."""


class InputCheck:
    """Told of the inputs of one model, and after `DATASET_STEP` of nothing any more."""

    def __init__(self) -> None:
        self._hash: Tensor | None = None
        self._seen: set[Sequence[float]] = set()
        """The digits of steps in which all ranks had the same inputs."""

    @torch.no_grad()
    def see(self, step: int, inputs: Any) -> None:
        """A forward pass that will have a backward begins; there may be several in a step."""
        if step not in INPUT_STEPS:
            return
        for tensor in find_tensors(inputs):
            if tensor.layout is torch.strided and tensor.numel():
                part = tensor.reshape(-1)[: _MOST_BYTES // tensor.element_size()]
                first, second = checksum(part)
                mixed = (first * _MIX + second) * _MIX
                self._hash = mixed if self._hash is None else self._hash.to(mixed) * _MIX + mixed

    def words(self, step: int, device: torch.device) -> Tensor | None:
        """What goes into the trailer of this step."""
        found, self._hash = self._hash, None
        if step == DATASET_STEP and (number := _hash_dataset(_find_shuffled())) is not None:
            found = torch.tensor(number)
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


def _find_shuffled() -> Any:
    """The dataset that a `DataLoader(shuffle=True)` is going through now; None if there is none."""
    # Who refers to their classes, and not all objects there are: a list of these would hold the
    # gradients of a rank that is another thread, which then takes them for somebody else's.
    for each in gc.get_referrers(*BatchIterator.__subclasses__()):
        if issubclass(type(each), BatchIterator):
            sampler = getattr(each, "_index_sampler", None)
            if type(sampler) is BatchSampler:
                sampler = sampler.sampler
            if type(sampler) is RandomSampler and not sampler.replacement:
                return each._dataset
    return None


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
    return None if dataset is None else int.from_bytes(hashed.digest()[:7])
