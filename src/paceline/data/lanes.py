"""Dealing files: which of their samples form which step, and reading only those.

The files of an epoch are put in a row, in an order drawn from (seed, epoch). That row of samples is
cut into lanes, `lanes` for each shard of the global batch, each as long as the shard's share. A
shard's first batch is the beginning of its first lane, its second batch that of its second lane,
and so on in turn:

    files     c c c c a a a a a d d b b b b b      2 shards, 2 lanes each, batches of 2 and 2
    lanes     0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3      shard 0 has lanes 0 and 1, shard 1 the others
    step 1    x x             x x                  shards 0 and 1
    step 2            x x             x x

Within a lane samples are shuffled in windows of neighbours. None of this depends on the number of
workers or of loading processes: any of them can begin anywhere, by opening the file in which a
window begins. A lane is read from its beginning to its end, by one process at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.data.plan import KeyedOrder

if TYPE_CHECKING:
    from paceline.data.files import Files


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The lanes of a run. Lane l of shard v is number `v * lanes + l`; samples count from 0."""

    counts: tuple[int, ...]
    """Samples of each file."""
    shards: int
    global_batch: int
    lanes: int
    window: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    @cached_property
    def files(self) -> list[int]:
        """The first sample of each file in the order they were listed; and the total."""
        return [0, *accumulate(self.counts)]

    def share(self, shard: int) -> int:
        """How many samples of a whole global batch belong to a shard."""
        return len(range(shard, self.global_batch, self.shards))

    @cached_property
    def starts(self) -> list[int]:
        """The start of each lane in the row of an epoch; and the end of the last."""
        whole, rest = divmod(self.files[-1], self.global_batch)
        lengths = []
        for shard in range(self.shards):
            last = 0 if self.drop_last else len(range(shard, rest, self.shards))
            for lane in range(self.lanes):
                steps = len(range(lane, whole, self.lanes))
                # The short batch at the end is the next one of the lane whose turn it is.
                lengths.append(steps * self.share(shard) + last * (whole % self.lanes == lane))
        return [0, *accumulate(lengths)]

    def epoch(self, epoch: int) -> EpochOfFiles:
        return EpochOfFiles(self, epoch)

    def processes(self, workers: int, shards: int, *, is_merged: bool) -> int:
        """How many of `workers` processes can load for a worker that computes `shards` shards.

        Processes take batches in turn, and a lane must always belong to the same process.
        """
        turns = self.lanes * (1 if is_merged else max(shards, 1))
        return max((n for n in range(1, workers + 1) if turns % n == 0), default=0)


class EpochOfFiles:
    """The row of one epoch, and the order in which its samples are trained on."""

    def __init__(self, lanes: Lanes, epoch: int) -> None:
        self._lanes, self._epoch = lanes, epoch
        count = len(lanes.counts)
        key = lanes.seed, "files", epoch
        order = KeyedOrder(count, *key)[:] if lanes.shuffle else torch.arange(count)
        self.files: list[int] = order.tolist()
        """The file at each place of the row."""
        self.starts = [0, *accumulate(lanes.counts[file] for file in self.files)]
        """The start in the row of the file at each place; and the end of the last."""
        self._starts = torch.tensor(self.starts)
        self._shifts = torch.tensor(lanes.files)[order] - self._starts[:-1]
        self._orders: dict[int, tuple[int, KeyedOrder]] = {}
        """By lane, the start and the order of the window that was used last."""
        self._place_by_file = {file: place for place, file in enumerate(self.files)}

    def __getitem__(self, where: slice) -> Tensor:
        """The samples of one shard of a batch, given the shard's places in the order."""
        lanes, places = self._lanes, range(where.start, where.stop, where.step)
        step, shard = divmod(places.start, lanes.global_batch)
        lane = shard * lanes.lanes + step % lanes.lanes
        done = step // lanes.lanes * lanes.share(shard)
        begin = lanes.starts[lane] + done
        parts, stop = [], begin + len(places)
        while begin < stop:
            window = self.window(lane, begin)
            part = range(begin, min(stop, window.stop))
            if lanes.shuffle:
                inside = slice(part.start - window.start, part.stop - window.start)
                parts.append(self._shuffled(lane, window)[inside] + window.start)
            else:
                parts.append(torch.arange(part.start, part.stop))
            begin = part.stop
        row = torch.cat(parts)
        # From the right, because an empty file begins where the next one does.
        return row + self._shifts[torch.searchsorted(self._starts, row, right=True) - 1]

    def _shuffled(self, lane: int, window: range) -> KeyedOrder:
        start, order = self._orders.get(lane, (-1, None))
        if order is None or start != window.start:
            key = self._lanes.seed, "window", self._epoch, window.start
            order = KeyedOrder(len(window), *key)
            self._orders[lane] = window.start, order
        return order

    def place(self, sample: int) -> int:
        """The position of a sample in the row."""
        file = bisect_right(self._lanes.files, sample) - 1
        return sample - self._lanes.files[file] + self.starts[self._place_by_file[file]]

    def window(self, lane: int, place: int) -> range:
        """The window of neighbours that contains this position of the row."""
        first, stop = self._lanes.starts[lane : lane + 2]
        begin = place - (place - first) % self._lanes.window
        return range(begin, min(begin + self._lanes.window, stop))

    def pieces(self, row: range) -> Iterator[tuple[int, range]]:
        """The files that overlap a part of the row, each with the samples that lie in it."""
        place = bisect_right(self.starts, row.start) - 1
        begin = row.start
        while begin < row.stop:
            first, end = self.starts[place : place + 2]
            stop = min(end, row.stop)
            if begin < stop:
                yield self.files[place], range(begin - first, stop - first)
            begin, place = stop, place + 1


class DealtFiles:
    """The samples of files by number, for a loader that requests them in the order of the lanes."""

    def __init__(self, files: Files, lanes: Lanes) -> None:
        self._files, self._lanes = files, lanes
        self._epoch = EpochOfFiles(lanes, 0)
        self._readers: dict[int, LaneReader] = {}

    def set_epoch(self, epoch: int) -> None:
        self._epoch = EpochOfFiles(self._lanes, epoch)
        self._readers = {}

    def __getitems__(self, samples: list[int]) -> list[Any]:
        return [self._files.finish(self._take(self._epoch.place(sample))) for sample in samples]

    def _take(self, place: int) -> Any:
        lane = bisect_right(self._lanes.starts, place) - 1
        if lane not in self._readers:
            self._readers[lane] = LaneReader(self._files, self._epoch, lane, self._lanes)
        return self._readers[lane].take(place)


class LaneReader:
    """Reads a lane window by window; for each sample taken it reads one of the next window."""

    def __init__(self, files: Files, epoch: EpochOfFiles, lane: int, lanes: Lanes) -> None:
        self._files, self._epoch, self._lane = files, epoch, lane
        self._stop = lanes.starts[lane + 1]
        self._current: dict[int, Any] = {}
        """The samples left in the current window, by place."""
        self._ahead: list[Any] = []
        self._next = -1
        """The start of the next window."""
        self._stream: Iterator[Any] = iter(())

    def take(self, place: int) -> Any:
        if place not in self._current:
            self._load(self._epoch.window(self._lane, place))
        if len(self._ahead) < len(self._epoch.window(self._lane, place)):
            self._ahead += islice(self._stream, 1)
        return self._current.pop(place)

    def _load(self, window: range) -> None:
        # Not the next window: another worker has read the lane so far, or a step is repeated.
        if window.start != self._next:
            pieces = self._epoch.pieces(range(window.start, self._stop))
            self._stream = self._files.read_pieces(pieces)
            self._ahead = []
        self._ahead += islice(self._stream, len(window) - len(self._ahead))
        self._current = dict(zip(window, self._ahead, strict=True))
        self._ahead, self._next = [], window.stop
