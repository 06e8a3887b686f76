"""Dealing one order to the ranks like cards, and how far a pass over it got.

In every round each rank takes one item, in the order of ranks, beginning at position `start`. So
rank r's j-th item is at position `start + r + j * size`, and after k full rounds exactly the items
before `start + k * size` are consumed: that one number is all a resumed pass needs, at any world
size.

Samplers run ahead of the training: a data loader with workers draws several batches before the
first one is trained on. So a pass counts the items drawn, and, where the training loop calls
`advance()`, the items trained on; see docs/sampler.md.
"""

from __future__ import annotations

import operator
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch.utils.data import Sampler

from paceline import env
from paceline.errors import NotInitializedError, UsageError
from paceline.torch_private import PREFETCHING

T = TypeVar("T")
_MOST_LOOKS = 3
"""Up to this many passes that may only have been prefetched do not count as repeated epochs."""
_MOST_FRAMES = 12
"""How many frames there are at most between a loader and the sampler that it draws from."""


class Tail(Enum):
    """What happens to a last round that has fewer items than there are ranks."""

    FILL = "fill"
    """Every rank gets an item: the round is filled from the start of the order."""
    DROP = "drop"
    """No rank gets an item: the last few are left out."""
    SHORT = "short"
    """The first ranks get an item: each item is dealt exactly once."""


def share(total: int, start: int, rank: int, size: int, tail: Tail) -> range:
    """The positions one rank takes of an order of `total` items, of which `start` are consumed.

    With `Tail.FILL` a position may lie past the end; it means the item at `position % total`.
    """
    rounds, left_over = divmod(max(total - start, 0), size)
    takes_one_more = left_over > 0 and (
        tail is Tail.FILL or (tail is Tail.SHORT and rank < left_over)
    )
    first = start + rank
    return range(first, first + (rounds + takes_one_more) * size, size)


def deal(items: Iterable[T], start: int, rank: int, size: int, tail: Tail) -> Iterator[T]:
    """The items of `share()`, from an order that can only be read once and may never end.

    Reads one round ahead at most: only a full round is known not to be the last.
    """
    source = iter(items)
    head = list(islice(source, size)) if tail is Tail.FILL else []
    source = islice(chain(head, source), start, None)
    while len(turn := list(islice(source, size))) == size:
        yield turn[rank]
    if not turn or tail is Tail.DROP:
        return
    if rank < len(turn):
        yield turn[rank]
    elif tail is Tail.FILL:
        yield head[(rank - len(turn)) % len(head)]


class EpochNotSetWarning(UserWarning):
    """A second pass repeats the order of the first, because `set_epoch()` was not called."""


@dataclass(slots=True)
class SamplerPass:
    """One pass of one rank over the order of `epoch`, begun after `start` items were consumed."""

    epoch: int
    start: int = 0
    drawn: int = 0
    trained: int | None = None
    """None until `advance()` is called: then drawing counts as training."""
    is_exhausted: bool = False
    finished: int = 0
    """How many passes over this order were drawn to their end since `set_epoch()`."""
    prefetched: int = 0
    """How many more were, but by a loader with workers that had not yielded a batch yet."""


class ResumableSampler(Sampler[T], ABC):
    """Deals the items of one global order to the ranks, and counts how many are consumed.

        made --iter()--> a pass --(all drawn)--> exhausted --iter()--> the next pass
          ^                 |
          +-- set_epoch(other), or load_state_dict(), which sets where the next pass begins

    Invariant: `consumed` depends only on how many items each rank took, so the states of all ranks
    are equal whenever all have trained on the same number of items.
    """

    num_replicas: int
    rank: int
    seed: int
    epoch: int
    drop_last: bool
    pad: bool
    shuffle: bool
    """Whether another epoch has another order."""

    _unit: ClassVar[str] = "samples"

    def _set_up(self, num_replicas: int | None, rank: int | None, seed: int) -> None:
        self.num_replicas, self.rank = _find_rank(num_replicas, rank)
        self.seed = whole_number("seed", seed)
        self.epoch = 0
        self._pass = SamplerPass(epoch=0)
        self._was_epoch_set = False
        self._epoch_changes = 0
        self._has_warned = False

    @property
    def _tail(self) -> Tail:
        if self.drop_last:
            return Tail.DROP
        return Tail.FILL if self.pad else Tail.SHORT

    @property
    def _stride(self) -> int:
        """How many items of the order are consumed when every rank has taken one."""
        return self.num_replicas

    @abstractmethod
    def _total(self) -> int:
        """The number of items in the order; TypeError where it is unknown."""

    @abstractmethod
    def _deal(self, start: int) -> Iterator[T]:
        """This rank's items of the current epoch after `start` are consumed."""

    @abstractmethod
    def _order_name(self) -> str:
        """The kind of order, so that a state is not loaded into another kind."""

    def _share(self, start: int) -> range:
        """The positions this rank takes after `start` are consumed; TypeError where unknown."""
        return share(self._total(), start, self.rank, self.num_replicas, self._tail)

    def __iter__(self) -> Iterator[T]:
        self._warn_if_the_order_repeats()
        before = self._current_pass()
        current = self._pass = SamplerPass(
            self.epoch, self._next_start(), finished=before.finished, prefetched=before.prefetched
        )
        return self._count(self._deal(current.start), current)

    def __len__(self) -> int:
        return len(self._share(self._next_start()))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it before each one, on every rank.

        Another epoch begins at its start. The same epoch changes nothing, so that a loop can
        call this right after `load_state_dict()` and still resume in the middle.
        """
        before, self.epoch = self.epoch, whole_number("epoch", epoch)
        current = self._current_pass()
        current.finished = current.prefetched = 0
        self._was_epoch_set = True
        self._epoch_changes += self.epoch != before

    def advance(self, count: int) -> None:
        """Record that this rank has trained on `count` more of the items it drew in this pass.

        Needed only where a data loader with workers runs ahead of the training.
        """
        current = self._current_pass()
        trained = (current.trained or 0) + whole_number("count", count)
        if count < 0 or trained > current.drawn:
            raise UsageError(
                f"advance({count}) on rank {self.rank} makes {trained} {self._unit} trained, "
                f"but this rank has drawn {current.drawn} in this pass.",
                advice=f"Pass the number of {self._unit} this rank alone has trained on, not that "
                "of all ranks, and call it once per step.",
            )
        current.trained = trained

    @property
    def consumed(self) -> int:
        """How many items of this epoch's order are consumed, counting all ranks."""
        current = self._current_pass()
        taken = current.drawn if current.trained is None else current.trained
        total = self._total_or_none()
        # A last round that is filled, or left out, would not add up to the total.
        if current.is_exhausted and taken == current.drawn and total is not None:
            return total
        position = current.start + taken * self._stride
        return position if total is None else min(position, total)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data as plain numbers and strings; save rank 0's."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "unit": self._unit,
            "order": self._order_name(),
            "seed": self.seed,
            "total": self._total_or_none(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the position in `state_dict`, which is the same on all ranks."""
        here = self.state_dict()
        missing = sorted(here.keys() - state_dict.keys())
        if missing:
            raise UsageError(
                f"The state has no {missing[0]!r}; it has {sorted(map(str, state_dict))}.",
                advice=f"Load what {type(self).__name__}.state_dict() returned.",
            )
        for key in ("unit", "order", "seed", "total"):
            if state_dict[key] != here[key]:
                raise UsageError(
                    "The state belongs to another order, so samples would be lost or repeated.",
                    f"First difference: {key} is {state_dict[key]!r} in the state, "
                    f"{here[key]!r} in this sampler.",
                    "Make the sampler with the same arguments over the same data, or begin a "
                    "new epoch with set_epoch() instead of loading the state.",
                )
        epoch = whole_number("epoch", state_dict["epoch"])
        consumed = whole_number("consumed", state_dict["consumed"])
        if consumed < 0 or (here["total"] is not None and consumed > here["total"]):
            raise UsageError(
                f"The state says that {consumed} of {here['total']} {self._unit} are consumed.",
                advice="The state is damaged: load another one, or begin with set_epoch().",
            )
        self.epoch = epoch
        self._pass = SamplerPass(epoch, start=consumed)

    def _current_pass(self) -> SamplerPass:
        # `epoch` is a plain attribute, as in torch, so it can change without set_epoch().
        if self._pass.epoch != self.epoch:
            self._pass = SamplerPass(self.epoch)
        return self._pass

    def _next_start(self) -> int:
        current = self._current_pass()
        return 0 if current.is_exhausted else current.start

    def _total_or_none(self) -> int | None:
        try:
            return self._total()
        except TypeError:
            return None

    def _count(self, items: Iterator[T], current: SamplerPass) -> Iterator[T]:
        for item in items:
            current.drawn += 1
            yield item
        current.is_exhausted = True
        if _is_prefetching():
            current.prefetched += 1
        else:
            current.finished += 1

    def _warn_if_the_order_repeats(self) -> None:
        """A loop that sets epochs may look at the first batch before it sets the next one.

        For that a loader with workers draws all of a small dataset, so such passes may be no
        epochs.
        """
        current = self._current_pass()
        is_trained = current.finished > (1 if self._was_epoch_set else 0)
        repeats = is_trained or current.finished + current.prefetched > _MOST_LOOKS
        is_regular = self._epoch_changes > 1
        if repeats and not is_regular and not self._has_warned and self.shuffle:
            self._has_warned = True
            warnings.warn(
                f"Rank {self.rank} starts another pass in the same order as the last one, "
                f"because the epoch is still {self.epoch}. "
                "Call sampler.set_epoch(epoch) before each pass over the data.",
                EpochNotSetWarning,
                stacklevel=3,
            )


def _is_prefetching() -> bool:
    """Whether a loader with workers is filling their queues, before it has yielded a batch."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return False
        if frame.f_code is PREFETCHING:
            return True
        frame = frame.f_back
    return False


def _find_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Size and rank: as given, else those of the default group, else 1 and 0."""
    if num_replicas is None or rank is None:
        size_here, rank_here = _rank_here(num_replicas, rank)
        num_replicas = size_here if num_replicas is None else num_replicas
        rank = rank_here if rank is None else rank
    num_replicas, rank = whole_number("num_replicas", num_replicas), whole_number("rank", rank)
    if not 0 <= rank < num_replicas:
        raise UsageError(
            f"rank is {rank}, which is impossible with num_replicas={num_replicas}.",
            advice="Ranks count from 0; leave both out to take them from the process group.",
        )
    return num_replicas, rank


def _rank_here(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    place = env.read_placement()
    if place is not None and place.size > 1:
        what = f"although {place.source} started this process as rank {place.rank} of {place.size}"
    elif num_replicas not in (None, 1) or rank not in (None, 0):
        what = f"to complete num_replicas={num_replicas}, rank={rank}"
    else:
        return 1, 0
    raise NotInitializedError(
        f"There is no process group yet, {what}.",
        advice="Call paceline.init_process_group() before making the sampler, or pass "
        "num_replicas and rank.",
    )


def whole_number(name: str, value: Any) -> int:
    """`value` as an int; NumPy's and torch's whole numbers are accepted, fractions are not."""
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(
            f"{name} is {value!r}, a {type(value).__name__}.", advice="Pass a whole number."
        ) from None
