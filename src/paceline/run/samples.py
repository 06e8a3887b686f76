"""Whether all workers read the same samples: a few of them, summed up and compared.

A run deals indices, so the sample of an index must be the same one on every worker. Each reads a
few of them, twice and with the same random numbers: what differs between two reads of one worker is
not compared. Real numbers are compared roughly, because machines of different kinds round, resample
and decode differently; everything else exactly.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.data import Generators
from paceline.errors import DesyncError
from paceline.group import children_of
from paceline.run.loader import ShardFetcher, make_loader
from paceline.run.plan import Shard

LONGEST_S = 0.5
"""A dataset that takes longer for a sample is not read any further."""
_MOST_LEAVES, _MOST_ELEMENTS = 8, 2**22
_ROUGHLY = 0.01

Leaf = tuple[str, str, list[float]]
"""Where in the sample, what is compared exactly there, and what roughly."""


def sum_up_samples(dataset: Any, size: int, seed: int, processes: int) -> dict[str, Any]:
    """The first, the middle and the last sample, by index; not where two reads of it differ.

    Loader processes read them if they read all: what a dataset opens in the process that reads is
    not to be shared with them.
    """
    indices = sorted({0, size // 2, size - 1})
    shards = [Shard(0, 0, 0, [index]) for index in indices for _ in range(2)]
    settings = {"num_workers": min(processes, 1)}
    found: dict[str, Any] = {}
    with Generators().kept():
        try:
            reads = iter(make_loader(ShardFetcher(dataset, seed), settings, _sum_up, shards))
            for index in indices:
                begin_s = time.monotonic()
                first, second = next(reads), next(reads)
                if _first_difference(first, second) is None:
                    found[str(index)] = first
                if time.monotonic() - begin_s > LONGEST_S:
                    break
        except Exception:  # it will be raised where the script can see it, in the loop
            pass
    return found


def refuse_other_samples(
    ours: dict[str, Any], theirs: dict[str, Any], where: str, elsewhere: str
) -> None:
    """Raise if two workers read something else under the same index."""
    for index in sorted(ours.keys() & theirs.keys(), key=int):
        if (place := _first_difference(ours[index], theirs[index])) is not None:
            raise DesyncError(
                f"Sample {index} of the dataset is not the same {where} and {elsewhere}.",
                f"First difference: {place}.",
                "Build the dataset from the same files on every worker, and from seeded random "
                "numbers (paceline.seed_everything(0) before it): a run deals the samples itself.",
            )


def _sum_up(samples: list[Any]) -> list[Leaf]:
    return [leaf for sample in samples for leaf in _leaves(sample, "sample")][:_MOST_LEAVES]


def _leaves(value: Any, path: str) -> Iterator[Leaf]:
    if not isinstance(value, Tensor) and hasattr(value, "__array_interface__"):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1)[:_MOST_ELEMENTS].cpu()
        kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if value.dtype == torch.uint8 or value.is_floating_point():
            yield path, kind, _summary(flat.double())
        else:
            yield path, f"{kind} {_hash(flat.numpy().tobytes())}", []
    elif isinstance(value, float):
        yield path, "float", [value]
    elif isinstance(value, (int, bytes)) or (isinstance(value, str) and os.sep not in value):
        text = repr(value)
        yield path, text if len(text) < 20 else f"{text[:16]}... {_hash(text.encode())}", []
    elif not isinstance(value, (set, frozenset)):  # which have no order
        for key, item in list(children_of(value)):
            yield from _leaves(item, path + key)


def _summary(flat: Tensor) -> list[float]:
    """Means and some elements; fewer digits than would make a long message."""
    if not flat.numel():
        return []
    some = flat[:: max(1, flat.numel() // 4)][:4].tolist()
    return [float(f"{x:.6g}") for x in [flat.mean().item(), flat.abs().mean().item(), *some]]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str | None:
    """Where two samples are not the same, in words."""
    for one, two in zip(ours, theirs, strict=False):
        (path, kind, numbers), (other_path, other_kind, others) = one, two
        if (path, kind, len(numbers)) != (other_path, other_kind, len(others)):
            return f"{path} is {kind} in the one, {other_path} is {other_kind} in the other"
        scale = _ROUGHLY * max(map(abs, [*numbers, *others]), default=0.0)
        for a, b in zip(numbers, others, strict=True):
            if abs(a - b) > scale or (a != a) != (b != b):
                return f"{path}, which is {kind}, has {a:g} in the one and {b:g} in the other"
    if len(ours) != len(theirs):
        return f"{len(ours)} parts in the one and {len(theirs)} in the other"
    return None
