"""Dealing files: which samples of them form which step, and reading no more than these.

The files of an epoch stand one behind the other, in an order drawn from (seed, epoch). That row of
samples is cut into lanes, `lanes` for each shard of the global batch, as long as what the shard
takes from them. A shard's first batch is the beginning of its first lane, its second batch that of
its second lane, and so on in turn:

    files     c c c c a a a a a d d b b b b b      2 shards, 2 lanes each, batches of 2 and 2
    lanes     0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3      shard 0 has lanes 0 and 1, shard 1 the others
    step 1    x x             x x                  shards 0 and 1
    step 2            x x             x x

Within a lane samples are shuffled in windows of neighbours. Nothing of this depends on the number
of workers or of processes that load: any of them can begin anywhere, by opening the file in which
a window begins. A lane is read from its beginning to its end, by one process at a time.
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

from paceline.data.order import KeyedOrder

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
        """Where each file begins when they stand as they were listed; and where the last ends."""
        return [0, *accumulate(self.counts)]

    def share(self, shard: int) -> int:
        """How many samples of a whole global batch belong to a shard."""
        return len(range(shard, self.global_batch, self.shards))

    @cached_property
    def starts(self) -> list[int]:
        """Where each lane begins in the row of an epoch; and where the last ends."""
        whole, rest = divmod(self.files[-1], self.global_batch)
        lengths = []
        for shard in range(self.shards):
            last = 0 if self.drop_last else len(range(shard, rest, self.shards))
            for lane in range(self.lanes):
                steps = len(range(lane, whole, self.lanes))
                lengths.append(steps * self.share(shard) + last * (whole % self.lanes == lane))
        return [0, *accumulate(lengths)]

    def epoch(self, epoch: int) -> EpochOfFiles:
        return EpochOfFiles(self, epoch)

    def processes(self, workers: int, shards: int, *, is_merged: bool) -> int:
        """How many of `workers` processes can load for a worker that computes `shards` shards.

        They take batches in turn, and a lane must always come to the same one.
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
        """Which file is at which place of the row."""
        self.starts = [0, *accumulate(lanes.counts[file] for file in self.files)]
        """Where in the row the file at each place begins; and where the last ends."""
        self._starts = torch.tensor(self.starts)
        self._shifts = torch.tensor(lanes.files)[order] - self._starts[:-1]
        self._orders: dict[int, tuple[int, KeyedOrder]] = {}
        """Those of the windows that were asked for last, by lane."""
        self._place_by_file = {file: place for place, file in enumerate(self.files)}

    def __getitem__(self, where: slice) -> Tensor:
        """The numbers of the samples of a shard of a batch, by its places in the order."""
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
        return row + self._shifts[torch.searchsorted(self._starts, row, right=True) - 1]

    def _shuffled(self, lane: int, window: range) -> KeyedOrder:
        start, order = self._orders.get(lane, (-1, None))
        if order is None or start != window.start:
            key = self._lanes.seed, "window", self._epoch, window.start
            order = KeyedOrder(len(window), *key)
            self._orders[lane] = window.start, order
        return order

    def place(self, sample: int) -> int:
        """Where in the row the sample with this number is."""
        file = bisect_right(self._lanes.files, sample) - 1
        return sample - self._lanes.files[file] + self.starts[self._place_by_file[file]]

    def window(self, lane: int, place: int) -> range:
        """The neighbours with which what is at this place of the row is shuffled."""
        first, stop = self._lanes.starts[lane : lane + 2]
        begin = place - (place - first) % self._lanes.window
        return range(begin, min(begin + self._lanes.window, stop))

    def pieces(self, row: range) -> Iterator[tuple[int, range]]:
        """The files of a part of the row, and which of their samples are in it."""
        place = bisect_right(self.starts, row.start) - 1
        begin = row.start
        while begin < row.stop:
            first, end = self.starts[place : place + 2]
            stop = min(end, row.stop)
            if begin < stop:
                yield self.files[place], range(begin - first, stop - first)
            begin, place = stop, place + 1


class DealtFiles:
    """The samples of files by number, for a loader that asks for them in the order of the lanes."""

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
    """Reads a lane window by window; for every sample taken of one it reads one of the next."""

    def __init__(self, files: Files, epoch: EpochOfFiles, lane: int, lanes: Lanes) -> None:
        self._files, self._epoch, self._lane = files, epoch, lane
        self._stop = lanes.starts[lane + 1]
        self._held: dict[int, Any] = {}
        """What is left of the current window, by place."""
        self._ahead: list[Any] = []
        self._next = -1
        """Where the next window begins."""
        self._stream: Iterator[Any] = iter(())

    def take(self, place: int) -> Any:
        if place not in self._held:
            self._load(self._epoch.window(self._lane, place))
        if len(self._ahead) < len(self._epoch.window(self._lane, place)):
            self._ahead += islice(self._stream, 1)
        return self._held.pop(place)

    def _load(self, window: range) -> None:
        if window.start != self._next:  # another worker's so far, or a step that comes again
            pieces = self._epoch.pieces(range(window.start, self._stop))
            self._stream = self._files.read_pieces(pieces)
            self._ahead = []
        self._ahead += islice(self._stream, len(window) - len(self._ahead))
        self._held = dict(zip(window, self._ahead, strict=True))
        self._ahead, self._next = [], window.stop
