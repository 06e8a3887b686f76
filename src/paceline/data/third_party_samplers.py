"""Making any other sampler draw the same order on every rank.

Dealing only works if every rank has the same order. A random sampler draws its order from a
generator of its own or from the global ones, and both differ from rank to rank. So each pass gives
it new generators seeded by (seed, epoch), and restores the global ones afterwards.

What is seeded: an attribute `generator` of the sampler and of the samplers inside it, torch's
global CPU generator, Python's `random`, and NumPy's `numpy.random` functions. What cannot be: a
`random.Random` or `numpy.random.default_rng()` that the sampler keeps, and the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler
from torch.utils.data import sampler as torch_samplers
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data.plan import Generators, seed_globals
from paceline.errors import UsageError

# Swapping the global generators takes some 150 us, so this many items are drawn from an unknown
# sampler at a time; few enough for a sampler that never ends, or that depends on the training.
_ITEMS_AT_A_TIME = 64


def check(sampler: Any) -> None:
    """Refuse a sampler that is not iterable, or whose items are already dealt to the ranks."""
    if not isinstance(sampler, Iterable) and not hasattr(sampler, "__getitem__"):
        raise UsageError(
            f"The sampler has the type {type(sampler).__name__}, which cannot be iterated over.",
            advice="Pass a sampler, a batch sampler, or a sequence of indices.",
        )
    if isinstance(sampler, Iterator):
        raise UsageError(
            f"The sampler is a {type(sampler).__name__}, which can be read only once, but every "
            "epoch reads it again.",
            advice="Pass the object whose iter() this is, or a list.",
        )
    for part in parts_of(sampler):
        if isinstance(part, TorchDistributedSampler):
            raise UsageError(
                "The samples are already dealt to the ranks once; dealing them again would leave "
                "most of them out.",
                f"There is a {type(part).__name__} in this {type(sampler).__name__}.",
                "Wrap the plain sampler, or use the distributed one as it is.",
            )


def keeps_order(sampler: Any) -> bool:
    """Whether the sampler is known to draw no random numbers; an unknown one is assumed to."""
    fixed = (SequentialSampler, BatchSampler, list, tuple, range)
    return all(type(part) in fixed for part in parts_of(sampler))


def parts_of(sampler: Any) -> list[Any]:
    """The sampler and every sampler inside it, itself first."""
    parts: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop(0)
        if any(part is known for known in parts):
            continue
        parts.append(part)
        for name, value in getattr(part, "__dict__", {}).items():
            values = value if isinstance(value, (list, tuple)) else [value]
            is_named_so = name in {"sampler", "batch_sampler"} and value is not None
            waiting += [value] if is_named_so else [v for v in values if isinstance(v, Sampler)]
    return parts


def draw(sampler: Any, seed: int, epoch: int) -> Iterator[Any]:
    """All items that the sampler yields in `epoch`, the same on every rank."""
    parts = parts_of(sampler)
    for part in parts:
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
    _set_generators(parts, seed + epoch)
    kinds, plain = [type(part) for part in parts], {list, tuple, range}
    if all(kind.__module__ == torch_samplers.__name__ or kind in plain for kind in kinds):
        yield from sampler
        return
    # Only while items are drawn do the global generators have this pass's state: between two draws
    # the training uses them with its own.
    shared = Generators()
    with shared.kept():
        seed_globals(seed + epoch)
        items, state = iter(sampler), shared.state()
    while True:
        with shared.kept():
            shared.restore(state)
            some = list(islice(items, _ITEMS_AT_A_TIME))
            state = shared.state()
        if not some:
            return
        yield from some


def _set_generators(parts: list[Any], seed: int) -> None:
    """Replace each `generator` by a new one: the user's may also be used elsewhere."""
    source = torch.Generator().manual_seed(seed)
    for part in parts:
        present = getattr(part, "generator", False)
        if present is not None and not isinstance(present, torch.Generator):
            continue
        device = "cpu" if present is None else present.device
        part.generator = torch.Generator(device).manual_seed(seed)
        # Two samplers in one must not draw the same numbers.
        seed = int(torch.randint(2**63 - 1, (), generator=source, device="cpu"))
