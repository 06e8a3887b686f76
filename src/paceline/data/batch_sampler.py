"""`DistributedBatchSampler`: each rank's batches, or its part of every batch.

A batch sampler decides which samples belong together (of similar length, of balanced classes).
Dealing its samples one by one would tear its batches apart, so they are dealt as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from paceline.data import third_party_samplers as third_party
from paceline.data.deal import ResumableSampler, deal, share, whole_number
from paceline.errors import UsageError
from paceline.telemetry import count_text


class DistributedBatchSampler(ResumableSampler[list[Any]]):
    """Deals the batches of any batch sampler to the ranks, for `DataLoader(batch_sampler=)`.

        split=False   batches 0, 1, 2, 3 …: rank 0 of 2 gets 0, 2 …   the global batch grows
        split=True    each batch is cut in `num_replicas` parts        the global batch stays

    Whole batches: `pad` repeats batches from the start so that every rank takes the same number
    of steps (None: unless the order is that of the dataset), `drop_last` leaves them out instead.

    Parts: their sizes differ by at most one and each sample is in exactly one, so the loss has to
    be weighted by the part's size to be exact. `pad=True` repeats samples of the batch to make
    the parts equal. A batch with fewer samples than ranks leaves some ranks an empty part: that
    is an error, unless `pad=False` says that the loop is ready for empty batches.

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
        self._take_place(num_replicas, rank, seed)
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
        """The most samples a batch of one rank has, where the batch sampler says."""
        size = getattr(self.batch_sampler, "batch_size", None)
        if size is None or not self.split:
            return size
        return -(-whole_number("batch_size", size) // self.num_replicas)

    def advance(self, count: int = 1) -> None:
        """Say that this rank has trained on `count` more of the batches it drew in this pass."""
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
        # The last batch is the one that comes up short: better to say so before the first one.
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
