"""Making a sampler of another library draw the same order on every rank.

Dealing only works when every rank holds the same cards. A random sampler draws its order from a
generator of its own or from the global ones, and both differ from rank to rank. So each pass
gives it fresh generators seeded by (seed, epoch), and leaves the global ones as they were.

What is seeded: an attribute `generator` of the sampler and of the samplers inside it, torch's
global CPU generator, Python's `random`, and NumPy's `numpy.random` functions. What cannot be: a
`random.Random` or `numpy.random.default_rng()` the sampler keeps for itself, and the clock.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler
from torch.utils.data import sampler as torch_samplers
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.errors import UsageError

# Exchanging the global generators takes some 150 us, so an unknown sampler is asked for this
# many items at a time; few enough that a sampler that never ends, or learns from the training,
# still works.
_ITEMS_AT_A_TIME = 64


def check(sampler: Any) -> None:
    """Refuse what cannot be dealt: something not iterable, or already dealt to the ranks."""
    if not isinstance(sampler, Iterable) and not hasattr(sampler, "__getitem__"):
        raise UsageError(
            f"The sampler has the type {type(sampler).__name__}, which cannot be iterated over.",
            advice="Give a sampler, a batch sampler, or a sequence of indices.",
        )
    if isinstance(sampler, Iterator):
        raise UsageError(
            f"The sampler is a {type(sampler).__name__}, which can be read only once, but every "
            "epoch reads it again.",
            advice="Give the object whose iter() this is, or a list.",
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
    """The sampler and every sampler it holds, itself first."""
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
    """Everything the sampler yields in `epoch`, the same on every rank that asks."""
    parts = parts_of(sampler)
    for part in parts:
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
    _give_generators(parts, seed + epoch)
    kinds, plain = [type(part) for part in parts], {list, tuple, range}
    if all(kind.__module__ == torch_samplers.__name__ or kind in plain for kind in kinds):
        yield from sampler
        return
    shared = Generators()
    with shared.kept():
        _seed_globals(seed + epoch)
        items, state = iter(sampler), shared.state()
    while True:
        with shared.kept():
            shared.restore(state)
            some = list(islice(items, _ITEMS_AT_A_TIME))
            state = shared.state()
        if not some:
            return
        yield from some


def _give_generators(parts: list[Any], seed: int) -> None:
    """Replace each `generator` by a fresh one: the user's own may serve others as well."""
    source = torch.Generator().manual_seed(seed)
    for part in parts:
        present = getattr(part, "generator", False)
        if present is not None and not isinstance(present, torch.Generator):
            continue
        device = "cpu" if present is None else present.device
        part.generator = torch.Generator(device).manual_seed(seed)
        # Two samplers in one must not draw the same numbers.
        seed = int(torch.randint(2**63 - 1, (), generator=source, device="cpu"))


def _seed_globals(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := _numpy_random()) is not None:
        numpy.seed(seed % 2**32)


def _numpy_random() -> Any:
    """NumPy's global generator, where NumPy is loaded."""
    return getattr(sys.modules.get("numpy"), "random", None)


class Generators:
    """The generators of this process that code draws from without naming one.

    They are torch's for the CPU and for the model's device, Python's, and NumPy's where it is
    loaded. Between two steps they are seeded by (seed, step), so that what is drawn there is the
    same on every worker, and after a restart.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is the model's; without it only the CPU is touched, as in a loader's worker."""
        is_other = device is not None and device.type not in {"cpu", "meta"}
        self._device = device if is_other else None
        self._of_device: Any = torch.get_device_module(device) if is_other else None

    def seed(self, seed: int, purpose: str, *numbers: int) -> None:
        """Seed all of them for one purpose, step and shard; equal for equal arguments only."""
        text = "/".join(map(str, (seed, purpose, *numbers)))
        digest = blake2b(text.encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(value)
        if self._of_device is not None:
            with self._of_device.device(self._device):
                self._of_device.manual_seed(value)
        random.seed(value)
        if (numpy := _numpy_random()) is not None:
            numpy.seed([value & 0xFFFFFFFF, value >> 32])

    def state(self) -> tuple[Any, ...]:
        numpy = _numpy_random()
        return (
            torch.default_generator.get_state(),
            None if self._of_device is None else self._of_device.get_rng_state(self._device),
            random.getstate(),
            None if numpy is None else numpy.get_state(),
        )

    def restore(self, state: tuple[Any, ...]) -> None:
        cpu, device, python, numpy = state
        torch.default_generator.set_state(cpu)
        if device is not None:
            self._of_device.set_rng_state(device, self._device)
        random.setstate(python)
        if numpy is not None:
            _numpy_random().set_state(numpy)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, anything may be drawn; afterwards the generators stand where they stood."""
        state = self.state()
        try:
            yield
        finally:
            self.restore(state)


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, Python's `random` and NumPy, as `Run(seed=)` does not before it.

    Called first in a program, on every worker alike, it makes the initial weights, and whatever
    else is drawn before the run, a function of the seed.
    """
    check_seed(seed)
    with suppress(ImportError):
        import_module("numpy")
    torch.manual_seed(seed)
    _seed_globals(seed)


def check_seed(seed: Any) -> None:
    if type(seed) is not int or abs(seed) >= 2**63:
        raise UsageError(f"seed is {seed!r:.40}.", advice="Pass a whole number.")
