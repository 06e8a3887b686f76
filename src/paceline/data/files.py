"""`Files`: samples in many files, of which every worker reads its share and no more.

A list of files, how many samples each has, and a format that reads one from any sample on: with
that a run knows its steps beforehand and can begin in the middle. How files are dealt to steps and
workers is in `lanes`.
"""

from __future__ import annotations

import glob
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from paceline.data.formats import FORMAT_BY_SUFFIX, Format, Streamed, count_samples
from paceline.errors import UsageError, check_members, check_whole
from paceline.telemetry import count_text


class Files(Dataset[Any]):
    """A dataset of the samples of `files`: paths, or a pattern such as `"data/train-*.tar"`.

        Files("data/train-*.tar", transform=decode)
        Files(paths, Parquet(columns=["text"]), window=10_000)
        Files(names, format=mine)                 mine.count(file), mine.read(file, start)
        Files.streamed(hugging_face_iterable)

    Without a `format` it is known by the ending: `.tar`, `.parquet`, `.arrow`. `transform` makes
    of a sample what the model is to see, when it leaves the window: here belong decoding, and
    whatever draws random numbers. Samples are shuffled in windows of `window` neighbours; each
    shard has `lanes` of them open, and so many processes can load for one that is alone on its
    worker. `counts` are the samples of each file, where they are known.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[Any],
        format: Format | None = None,
        *,
        transform: Callable[[Any], Any] | None = None,
        counts: Sequence[int] | None = None,
        window: int = 1000,
        lanes: int = 4,
    ) -> None:
        self.files = _find(files)
        self.format: Format = _guess_format(self.files) if format is None else format
        advice = "Pass an object with count(file) and read(file, start); see docs/data.md."
        check_members("format", self.format, ("count", "read"), advice)
        check_whole("window", window)
        check_whole("lanes", lanes)
        self.window, self.lanes = window, lanes
        self._transform = transform
        self._counts: tuple[int, ...] | None = None
        self._cursor: tuple[int, Iterator[Any]] = (-1, iter(()))
        if counts is not None:
            self.counts = tuple(counts)

    @classmethod
    def streamed(cls, dataset: Any, **arguments: Any) -> Files:
        """The shards of a Hugging Face `datasets.IterableDataset`, which must not be shuffled."""
        advice = "Pass what load_dataset(..., streaming=True) returns for one split."
        check_members("dataset", dataset, ("num_shards", "shard", "skip", "iter"), advice)
        return cls(range(dataset.num_shards), Streamed(dataset), **arguments)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many samples each file has; counted when first asked for."""
        if self._counts is None:
            self.counts = tuple(self.count(range(len(self.files))))
        assert self._counts is not None
        return self._counts

    @counts.setter
    def counts(self, counts: tuple[int, ...]) -> None:
        if len(counts) != len(self.files):
            raise UsageError(
                f"There are {count_text(len(self.files), 'file')} and {len(counts)} counts.",
                advice="Pass a number of samples for each file.",
            )
        for file, count in zip(self.files, counts, strict=True):
            check_whole(f"The number of samples in {file}", count, 0)
        self._counts = counts
        self._starts = [0, *accumulate(counts)]

    @property
    def is_counted(self) -> bool:
        return self._counts is not None

    def count(self, numbers: range) -> list[int]:
        """How many samples these files have."""
        return [count_samples(self.format, self.files[number]) for number in numbers]

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, index: int) -> Any:
        """A sample by number; those that follow one another come without opening files anew."""
        if not 0 <= index < len(self):
            raise IndexError(f"{index} of {len(self)} samples")
        if self._cursor[0] != index:
            first = bisect_right(self._starts, index) - 1
            pieces = [(n, range(count)) for n, count in enumerate(self.counts)][first:]
            pieces[0] = first, range(index - self._starts[first], self.counts[first])
            self._cursor = index, self.read_pieces(pieces)
        sample = next(self._cursor[1])
        self._cursor = index + 1, self._cursor[1]
        return self.finish(sample)

    def finish(self, sample: Any) -> Any:
        """The sample as the model is to see it."""
        return sample if self._transform is None else self._transform(sample)

    def read_pieces(self, pieces: Iterable[tuple[int, range]]) -> Iterator[Any]:
        """The samples of parts of files, given by number, one after the other."""
        for number, part in pieces:
            file, count, place = self.files[number], self.counts[number], part.start
            samples = iter(self.format.read(file, part.start)) if part else iter(())
            for place, sample in enumerate(islice(samples, len(part)), part.start + 1):
                if place == count and next(samples, None) is not None:
                    raise _miscounted(file, "more", count)
                yield sample
            if place < part.stop:
                raise _miscounted(file, "fewer", count)

    def describe(self) -> str:
        """What identifies the samples and their order, in a checkpoint."""
        names = [os.path.basename(os.fspath(f)) if _is_path(f) else str(f) for f in self.files]
        digest = sha256(json.dumps([names, self.counts]).encode()).hexdigest()[:12]
        return (
            f"{count_text(len(names), 'file')} {digest}, window {self.window}, lanes {self.lanes}"
        )


def _miscounted(file: Any, how: str, count: int) -> UsageError:
    return UsageError(
        f"{file} has {how} samples than the {count} that were counted.",
        advice="Count them again, and begin a new run: files must stay as they are while it lasts.",
    )


def _find(files: Any) -> list[Any]:
    if _is_path(files):
        found: list[Any] = sorted(glob.glob(os.fspath(files), recursive=True))
    elif isinstance(files, Iterable):
        found = list(files)
    else:
        raise UsageError(f"files is {files!r:.80}.", advice="Pass a pattern, or a list of files.")
    if not found:
        raise UsageError(
            f"There are no files {files!r:.200}.",
            advice=f"Pass a pattern that matches some, seen from {Path.cwd()}, or a list of files.",
        )
    return found


def _is_path(file: Any) -> bool:
    return isinstance(file, str | os.PathLike)


def _guess_format(files: list[Any]) -> Format:
    suffixes = {Path(file).suffix if _is_path(file) else "" for file in files}
    if len(suffixes) == 1 and (found := FORMAT_BY_SUFFIX.get(suffixes.pop())):
        return found()
    raise UsageError(
        f"The format of {files[0]!s:.200} is not known by its ending, or not that of all files.",
        advice=f"Pass files that end in one of {', '.join(FORMAT_BY_SUFFIX)}, or format=.",
    )
