"""`DistributedSampler` and `DistributedBatchSampler`: each rank's samples, or its batches.

The same arguments, attributes and order of indices as torch's class, with one difference: an
evaluation (`shuffle=False`) is not padded with duplicates, which would distort its metrics. A batch
sampler decides which samples belong together, so its batches are dealt, or split, as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from paceline.data import third_party_samplers as third_party
from paceline.data.deal import ResumableSampler, Tail, deal, share, whole_number
from paceline.data.plan import KeyedOrder, OrderName, draw_order
from paceline.errors import UsageError, check_choice
from paceline.telemetry import count_text

_AT_A_TIME = 2**14
"""How many indices of an order are looked up at once."""


class DistributedSampler(ResumableSampler[int], TorchDistributedSampler[int]):
    """Deals the indices of a dataset to the ranks: a drop-in for torch's class of that name.

    It is a subclass of torch's, because libraries use `isinstance` to find out whether the data is
    already divided among the ranks; all methods of torch's class are overridden.

    `pad` says what happens when the samples do not divide evenly. True repeats a few of them so
    that every rank takes the same number of steps; False deals each sample exactly once, so that
    ranks differ by at most one; None, the default, pads when `shuffle` is on. `drop_last` leaves
    the last few out instead, whatever `pad` says.

    `order="keyed"` is a different order from torch's, for hundreds of millions of samples: it takes
    no memory and starts at once. See `KeyedOrder`.

    `num_samples` is this rank's share of a whole epoch. `len()` is what the next pass yields:
    the same number, except in an epoch resumed in the middle.
    """

    num_samples: int
    total_size: int
    _pads_by_default = False
    """Whether `pad=None` pads even without `shuffle`."""

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool | None = None,
        order: OrderName = "torch",
    ) -> None:
        self._set_up(num_replicas, rank, seed)
        check_choice("order", order, ("torch", "keyed"))
        self.dataset = dataset
        self.shuffle = shuffle
        self.order = order
        self.drop_last = drop_last
        self.pad = (bool(shuffle) or self._pads_by_default) if pad is None else bool(pad)
        self.num_samples = len(self._share(0))
        self.total_size = self._dealt_size()

    @classmethod
    def of(
        cls,
        sampler: Sampler[Any] | Iterable[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool | None = None,
    ) -> DistributedSampler:
        """Deal what any other sampler yields, even if it never ends.

        Every rank runs the whole sampler and keeps its share, so all must draw the same order:
        its random numbers are seeded by (seed, epoch); see `third_party_samplers`. `pad=None`
        pads, unless the sampler is known to keep the order of the dataset.
        """
        return _SamplerOfSampler(sampler, num_replicas, rank, seed, drop_last, pad)

    def __len__(self) -> int:
        # Subclasses of torch's class set num_samples themselves and expect it back.
        start = self._next_start()
        return self.num_samples if start == 0 else len(self._share(start))

    def _dealt_size(self) -> int:
        """How many indices all ranks get together in a whole epoch."""
        if self._tail is Tail.SHORT:
            return self._total()
        return len(self._share(0)) * self.num_replicas

    def _total(self) -> int:
        if not isinstance(self.dataset, Sized):
            raise UsageError(
                f"The dataset has the type {type(self.dataset).__name__} and no length, so its "
                "samples cannot be dealt by index.",
                advice="Give a dataset with __len__ and __getitem__; an iterable dataset divides "
                "its own samples by rank and needs no sampler.",
            )
        return len(self.dataset)

    def _deal(self, start: int) -> Iterator[int]:
        total, positions = self._total(), self._share(start)
        if start == 0 and len(positions) != self.num_samples:
            raise UsageError(
                f"Rank {self.rank} was to get {self.num_samples} samples when the sampler was "
                f"made, but {len(positions)} of the {total} the dataset has now.",
                advice="Make a new sampler when the dataset changes its length.",
            )
        if not self.shuffle:
            return (position % total for position in positions)
        order = draw_order(self.order, total, self.seed, self.epoch)
        return _look_up(order, positions, total)

    def _order_name(self) -> str:
        shuffled = "shuffled" if self.order == "torch" else self.order
        return shuffled if self.shuffle else "sequential"


def _look_up(order: Tensor | KeyedOrder, positions: range, total: int) -> Iterator[int]:
    """The items at these positions; a position past the end wraps around to the start."""
    for begin in range(0, len(positions), _AT_A_TIME):
        part = positions[begin : begin + _AT_A_TIME]
        inside = range(part.start, min(part.stop, total), part.step)
        yield from order[inside.start : inside.stop : inside.step].tolist()
        for position in part[len(inside) :]:
            yield int(order[position % total : position % total + 1])


class PaddedDistributedSampler(DistributedSampler):
    """Pads by default in evaluation too, for scripts that were written for torch's class.

    Such a script may communicate once per batch, and then every rank must have as many.
    """

    _pads_by_default = True


class _SamplerOfSampler(DistributedSampler):
    """What `DistributedSampler.of()` returns: another sampler defines the order."""

    def __init__(
        self,
        sampler: Any,
        num_replicas: int | None,
        rank: int | None,
        seed: int,
        drop_last: bool,
        pad: bool | None,
    ) -> None:
        self._set_up(num_replicas, rank, seed)
        third_party.check(sampler)
        self.sampler = self.dataset = sampler
        self.shuffle = not third_party.keeps_order(sampler)
        self.drop_last = drop_last
        self.pad = self.shuffle if pad is None else bool(pad)

    # Properties, because a sampler without a length has neither.
    @property
    def num_samples(self) -> int:  # type: ignore[override]
        return len(self._share(0))

    @property
    def total_size(self) -> int:  # type: ignore[override]
        return self._dealt_size()

    def _total(self) -> int:
        return len(self.sampler)

    def _deal(self, start: int) -> Iterator[int]:
        order: Iterator[int] = third_party.draw(self.sampler, self.seed, self.epoch)
        return deal(order, start, self.rank, self.num_replicas, self._tail)

    def _order_name(self) -> str:
        return type(self.sampler).__name__


class DistributedBatchSampler(ResumableSampler[list[Any]]):
    """Deals the batches of any batch sampler to the ranks, for `DataLoader(batch_sampler=)`.

        split=False   batches 0, 1, 2, 3 …: rank 0 of 2 gets 0, 2 …   the global batch grows
        split=True    each batch is cut in `num_replicas` parts        the global batch stays

    Whole batches: `pad` repeats batches from the start so that every rank takes the same number
    of steps (None: unless the order is that of the dataset), `drop_last` leaves them out instead.

    Parts: their sizes differ by at most one and each sample is in exactly one, so the loss has to
    be weighted by the part's size to be exact. `pad=True` repeats samples of the batch to make
    the parts equal. A batch with fewer samples than ranks leaves some ranks an empty part: that
    is an error, unless `pad=False` declares that the loop accepts empty batches.

    The unit of `advance()` and `consumed` is the batch, not the sample.
    """

    _unit = "batches"

    def __init__(
        self,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]],
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        split: bool = False,
        pad: bool | None = None,
    ) -> None:
        self._set_up(num_replicas, rank, seed)
        third_party.check(batch_sampler)
        self.batch_sampler = batch_sampler
        self.drop_last = drop_last
        self.split = split
        self.shuffle = not third_party.keeps_order(batch_sampler)
        self.pad = self.shuffle and not split if pad is None else bool(pad)
        self._allows_empty_parts = pad is False
        if split:
            self._check_split()

    @property
    def batch_size(self) -> int | None:
        """The largest batch of one rank, if the batch sampler has a batch size."""
        size = getattr(self.batch_sampler, "batch_size", None)
        if size is None or not self.split:
            return size
        return -(-whole_number("batch_size", size) // self.num_replicas)

    def advance(self, count: int = 1) -> None:
        """Record that this rank has trained on `count` more of the batches it drew in this pass."""
        super().advance(count)

    @property
    def _stride(self) -> int:
        return 1 if self.split else self.num_replicas

    def _total(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def _share(self, start: int) -> range:
        return range(start, max(self._total(), start)) if self.split else super()._share(start)

    def _deal(self, start: int) -> Iterator[list[Any]]:
        batches: Iterator[list[Any]] = third_party.draw(self.batch_sampler, self.seed, self.epoch)
        if not self.split:
            return deal(batches, start, self.rank, self.num_replicas, self._tail)
        return (self._part_of(batch) for batch in islice(batches, start, None))

    def _part_of(self, batch: list[Any]) -> list[Any]:
        if 0 < len(batch) < self.num_replicas and not (self.pad or self._allows_empty_parts):
            raise self._too_small(len(batch))
        positions = share(len(batch), 0, self.rank, self.num_replicas, self._tail)
        return [batch[position % len(batch)] for position in positions]

    def _order_name(self) -> str:
        return type(self.batch_sampler).__name__

    def _check_split(self) -> None:
        if self.drop_last:
            raise UsageError(
                "drop_last=True with split=True would drop samples of every batch.",
                advice="Give drop_last to the batch sampler itself, so that all batches are full.",
            )
        # Only the last batch can be too small: raise now, not at the end of the first epoch.
        if self.pad or self._allows_empty_parts or not isinstance(self.batch_sampler, BatchSampler):
            return
        size = self.batch_sampler.batch_size
        if size < self.num_replicas:
            raise self._too_small(size)
        try:
            last = len(self.batch_sampler.sampler) % size  # type: ignore[arg-type]
        except TypeError:
            return
        if 0 < last < self.num_replicas and not self.batch_sampler.drop_last:
            raise self._too_small(last)

    def _too_small(self, size: int) -> UsageError:
        return UsageError(
            f"A batch of {count_text(size, 'sample')} cannot be split over {self.num_replicas} "
            "ranks: some would have none.",
            advice="Use drop_last=True in the batch sampler, or another batch size; or pad=True "
            "to repeat samples, or pad=False if the loop can train on an empty batch.",
        )
