"""Which samples form which shard of which step, and their random seeds: pure arithmetic.

    order of epoch e:   a permutation drawn from (seed, e); as torch does, or a `KeyedOrder`
    batch of step k:    `global_batch` neighbours in that order
    shard v of V:       every V-th sample of the batch, beginning with the v-th
    random numbers:     drawn from (seed, k, v), before loading and again before the model

Workers do not appear in it: rank r of W computes shards r, r + W, r + 2W and so on, so W changes
which worker computes a shard, but never what is computed. With V = W, and a batch that W divides, a
rank gets the same samples as from `DistributedSampler` with the same seed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib import import_module
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.data.lanes import EpochOfFiles, Lanes

OrderName = Literal["torch", "keyed"]

KEEPS_UP_TO = 2**22
"""Up to this many samples are shuffled as in torch: that takes 32 MiB and a third of a second."""
_ROUNDS = 8
_BLOCK = 2**13
"""How many positions are computed at once and cached: a few take as long as a thousand."""


class KeyedOrder:
    """The numbers 0 to `total` - 1 in an order that depends on `key` only, and is never stored.

    A shuffled list of N numbers takes 8 N bytes, and time to draw, on every worker, before the
    first step. A keyed permutation computes only the positions that are requested:

        position p = left + A * right        A * B >= N, both about the square root of N
        left  += hash(key 0, right)  mod A   each round can be undone by subtracting what it added,
        right += hash(key 1, left)   mod B   so two positions never give the same result
        ...
        a result >= N is mapped again        until it is below N, which can be undone as well

    It is a good shuffle, but not a cipher.
    """

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
            # A hash may be negative; torch's remainder is not, with a positive divisor.
            left = left.add_(_hash(right, even)).remainder_(self._left)
            right = right.add_(_hash(left, odd)).remainder_(self._right)
        return right.mul_(self._left).add_(left)


def _hash(numbers: Tensor, key: int) -> Tensor:
    """A signed 31-bit hash, each bit of which depends on all bits of number and key.

    Products overflow, and shifts keep the sign: neither has to be invertible.
    """
    # As an unsigned number, 2^64 divided by the golden ratio: it spreads neighbours far apart.
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


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one global batch that goes through the model at once."""

    step: int
    epoch: int
    number: int
    """Which shard; with `merge_shards` the first of several."""
    indices: list[int]
    """Its samples; for a stream only their number is meaningful."""
    is_second: bool = False
    """Whether this is a second computation of another worker's shard; see `ddp.audit`."""

    @property
    def key(self) -> tuple[int, ...]:
        """The seed of its random numbers, together with the step."""
        return (self.number,)


@dataclass(frozen=True, slots=True)
class Portion:
    """What one worker computes of one step."""

    step: int
    epoch: int
    samples: int
    """How many samples the global batch has, on all workers together."""
    shards: list[Shard]
    """This worker's shards, without those that a short batch leaves empty."""
    ends_epoch: bool
    busy: int | None = None
    """How many shards of the step have samples, on all workers; None: as many as possible."""
    audited: list[Shard] = field(default_factory=list)
    """Shards of other workers that this one computes as well, before its own."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is: steps applied, complete epochs among them, and steps since.

    With several models, also how many turns of the next step are done.
    """

    step: int = 0
    epoch: int = 0
    step_of_epoch: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The data of a whole run. Steps count from 1, epochs and shards from 0."""

    samples: int
    global_batch: int
    shards: int
    epochs: int
    seed: int = 0
    shuffle: bool = True
    order: OrderName = "torch"
    lanes: Lanes | None = None
    """For samples in files: the lanes, which determine the order."""
    drop_last: bool = False
    """Whether samples that do not fill the last batch of an epoch are left out of it."""
    merge_shards: bool = False
    """Whether a worker's shards go through the model as one."""
    arrange: Callable[[Sequence[int], int], Sequence[int]] | None = None
    """Maps a worker's shards and the number of all to the order in which it computes them."""
    audits: Callable[[int, int, int], list[int]] | None = None
    """Maps step, rank and size to the shards that a rank computes besides its own."""
    steps_per_epoch: int = field(init=False)
    steps: int = field(init=False)
    shortest_batch: int = field(init=False)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("The dataset is empty.", advice="Check how it finds its samples.")
        check_batch(self.global_batch, self.shards)
        if self.drop_last and self.samples < self.global_batch:
            raise UsageError(
                f"The dataset has {self.samples} samples, which do not fill one global batch of "
                f"{self.global_batch}, and drop_last leaves them out.",
                advice="Use a smaller global_batch, or drop_last=False.",
            )
        whole, rest = divmod(self.samples, self.global_batch)
        per_epoch = whole + (rest > 0 and not self.drop_last)
        object.__setattr__(self, "steps_per_epoch", per_epoch)
        object.__setattr__(self, "steps", self.epochs * per_epoch)
        object.__setattr__(self, "shortest_batch", len(self.batch(per_epoch)))

    def batch(self, step: int) -> range:
        """The positions of a step's batch in the order of its epoch."""
        start = (step - 1) % self.steps_per_epoch * self.global_batch
        return range(start, min(start + self.global_batch, self.samples))

    def portions(self, done: int, rank: int, size: int) -> Iterator[Portion]:
        """What rank `rank` of `size` computes in every step after `done` steps."""
        per_epoch, order, order_of = self.steps_per_epoch, None, -1
        mine: Sequence[int] = shards_of(rank, size, self.shards)
        if self.arrange is not None:
            mine = self.arrange(mine, self.shards)
        for step in range(done + 1, self.steps + 1):
            epoch, batch = (step - 1) // per_epoch, self.batch(step)
            if epoch != order_of:
                order, order_of = self._order(epoch), epoch
            shards = self._cut(step, batch, order, mine)
            audited = []
            if self.audits is not None:
                seconds = self.audits(step, rank, size)
                audited = self._cut(step, batch, order, seconds, is_second=True)
            if self.merge_shards and len(shards) > 1:
                together = [index for shard in shards for index in shard.indices]
                shards = [Shard(step, epoch, shards[0].number, together)]
            is_last = step % per_epoch == 0
            yield Portion(step, epoch, len(batch), shards, is_last, audited=audited)

    def _cut(
        self,
        step: int,
        batch: range,
        order: Any,
        numbers: Sequence[int],
        *,
        is_second: bool = False,
    ) -> list[Shard]:
        """Shards of a batch, without those that have no samples."""
        shards, epoch = [], (step - 1) // self.steps_per_epoch
        for number in numbers:
            if places := batch[number :: self.shards]:
                indices = list(places)
                if order is not None:
                    indices = order[places.start : places.stop : places.step].tolist()
                shards.append(Shard(step, epoch, number, indices, is_second))
        return shards

    def _order(self, epoch: int) -> Tensor | KeyedOrder | EpochOfFiles | None:
        """The order of the samples in an epoch; None: not shuffled."""
        if self.lanes is not None:
            return self.lanes.epoch(epoch)
        return draw_order(self.order, self.samples, self.seed, epoch) if self.shuffle else None


def shards_of(rank: int, size: int, shards: int) -> range:
    """The shards that one worker computes, in order."""
    return range(rank, shards, size)


def check_batch(global_batch: int, shards: int) -> None:
    if global_batch < shards:
        raise UsageError(
            f"A global batch of {global_batch} cannot be cut into {shards} shards.",
            advice="Use a larger global_batch, fewer shards, or fewer workers: without shards= "
            "there is one shard per worker.",
        )


def seed_globals(seed: int) -> None:
    # Not torch.manual_seed(), which seeds every device as well.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := _numpy_random()) is not None:
        numpy.seed(seed % 2**32)


def _numpy_random() -> Any:
    """NumPy's global generator, where NumPy is loaded."""
    return getattr(sys.modules.get("numpy"), "random", None)


class Generators:
    """The global random generators of this process.

    They are torch's for the CPU and for the model's device, Python's, and NumPy's where it is
    imported. Between two steps they are seeded by (seed, step), so numbers drawn there are the same
    on every worker and after a restart.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is the model's; without it only the CPU's is used, as in a loader's worker."""
        is_other = device is not None and device.type not in {"cpu", "meta"}
        self._device = device if is_other else None
        self._of_device: Any = torch.get_device_module(device) if is_other else None

    def seed(self, seed: int, purpose: str, *numbers: int) -> None:
        """Seed all generators from the arguments; different arguments give different seeds."""
        text = "/".join(map(str, (seed, purpose, *numbers)))
        digest = blake2b(text.encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little") >> 1
        torch.default_generator.manual_seed(value)
        if self._of_device is not None:
            with self._of_device.device(self._device):
                self._of_device.manual_seed(value)
        random.seed(value)
        if (numpy := _numpy_random()) is not None:
            # NumPy takes a seed in numbers of 32 bits.
            numpy.seed([value & 0xFFFFFFFF, value >> 32])

    def were_used(self, seed: int, purpose: str, *numbers: int) -> bool:
        """Whether anything was drawn since the generators were seeded with these arguments."""
        now = self.state()
        self.seed(seed, purpose, *numbers)
        fresh = self.state()
        self.restore(now)
        return any(map(_differ, now, fresh))

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
        """Inside, numbers may be drawn; afterwards the generators have their state from before."""
        state = self.state()
        try:
            yield
        finally:
            self.restore(state)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return any(map(_differ, one, other))
    return bool((one != other).any()) if hasattr(one, "any") else one != other


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, Python's `random` and NumPy.

    Call it first in a program, with the same seed on every worker: then initial weights, and all
    else that is drawn before the run, are a function of the seed. `Run(seed=)` seeds only the run.
    """
    check_seed(seed)
    # If it was imported later it would not be seeded.
    with suppress(ImportError):
        import_module("numpy")
    torch.manual_seed(seed)
    seed_globals(seed)


def check_seed(seed: Any) -> None:
    if type(seed) is not int or abs(seed) >= 2**63:
        raise UsageError(f"seed is {seed!r:.40}.", advice="Pass a whole number.")
