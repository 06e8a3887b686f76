"""`Files`: samples in many files, of which every worker reads only its share.

From a list of files, the number of samples in each, and a format that can start reading at any
sample, a run knows its steps in advance and can begin in the middle. A format has two methods;
those here use the usual library, which is imported when the first file is opened. How files are
dealt to steps and workers is in `lanes`.
"""

from __future__ import annotations

import glob
import json
import os
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from importlib import import_module
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import Dataset

from paceline.errors import UsageError, check_members, check_whole
from paceline.telemetry import count_text

_ROWS = 256
"""How many rows of a table are converted at once."""


class Format(Protocol):
    """How to read files of one kind."""

    def count(self, file: Any) -> int:
        """How many samples the file has."""

    def read(self, file: Any, start: int) -> Iterator[Any]:
        """Its samples from number `start` on; each call must return the same."""


class Tar:
    """WebDataset's tar files: consecutive members whose names differ in the extension only.

    A sample is a dictionary of bytes by extension, with `__key__` and `__url__`, as in WebDataset
    before decoding. Archives must not be compressed: then a start in the middle is found by reading
    headers only.
    """

    def count(self, file: Any) -> int:
        return sum(1 for _ in self._offsets(file))

    def read(self, file: Any, start: int) -> Iterator[dict[str, Any]]:
        wds = _library("webdataset.tariterators", "webdataset")
        with open(file, "rb") as stream:
            if start:
                stream.seek(next(islice(self._offsets(file), start, None), 0))
            opened = [{"url": str(file), "stream": stream}]
            yield from wds.group_by_keys(wds.tar_file_expander(opened))

    def _offsets(self, file: Any) -> Iterator[int]:
        """The offset of each sample."""
        wds, before = _library("webdataset.tariterators", "webdataset"), None
        try:
            with tarfile.open(file, "r:") as archive:
                for member in archive:
                    name = member.name
                    key = wds.base_plus_ext(name)[0] if member.isreg() else None
                    if key is not None and not name.startswith("__") and key != before:
                        before = key
                        yield member.offset
                    # tarfile keeps every member it has seen: millions, in a large archive.
                    archive.members = []  # type: ignore[attr-defined]
        except tarfile.ReadError as error:
            raise UsageError(
                f"{file} cannot be read as an archive: {error}.",
                advice="Write archives without compression, as webdataset.ShardWriter does for "
                "names that end in .tar.",
            ) from error


class Parquet:
    """Parquet files; a sample is a row as a dictionary, of all columns or of those named."""

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        self.columns = None if columns is None else list(columns)

    def count(self, file: Any) -> int:
        with _library("pyarrow.parquet", "parquet").ParquetFile(file) as table:
            return int(table.metadata.num_rows)

    def read(self, file: Any, start: int) -> Iterator[dict[str, Any]]:
        with _library("pyarrow.parquet", "parquet").ParquetFile(file) as table:
            groups = [table.metadata.row_group(n).num_rows for n in range(table.num_row_groups)]
            first = 0
            while first < len(groups) and groups[first] <= start:
                start -= groups[first]
                first += 1
            wanted = range(first, len(groups))
            for batch in table.iter_batches(_ROWS, row_groups=wanted, columns=self.columns):
                yield from batch.slice(min(start, batch.num_rows)).to_pylist()
                start = max(start - batch.num_rows, 0)


class Arrow:
    """Arrow files and streams, such as those of Hugging Face's `datasets`; a sample is a row."""

    def count(self, file: Any) -> int:
        return sum(batch.num_rows for batch in self._batches(file))

    def read(self, file: Any, start: int) -> Iterator[dict[str, Any]]:
        for batch in self._batches(file):
            for begin in range(min(start, batch.num_rows), batch.num_rows, _ROWS):
                yield from batch.slice(begin, _ROWS).to_pylist()
            start = max(start - batch.num_rows, 0)

    def _batches(self, file: Any) -> Iterator[Any]:
        arrow = _library("pyarrow", "parquet")
        ipc = import_module("pyarrow.ipc")
        with arrow.memory_map(str(file)) as memory:
            try:
                table = ipc.open_file(memory)
            except arrow.ArrowInvalid:
                memory.seek(0)
                yield from ipc.open_stream(memory)
            else:
                yield from map(table.get_batch, range(table.num_record_batches))


class Streamed:
    """The shards of a Hugging Face `datasets.IterableDataset`: a "file" is a shard's number.

    Counting reads a whole shard.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def count(self, file: Any) -> int:
        batches = self._shard(file).with_format("arrow").iter(_ROWS)
        return sum(len(batch) for batch in batches)

    def read(self, file: Any, start: int) -> Iterator[dict[str, Any]]:
        # In batches, not row by row: when iterated in a loader's process, the dataset would split
        # its shards among those processes again.
        for batch in self._shard(file).skip(start).iter(_ROWS):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    def _shard(self, file: Any) -> Any:
        return self.dataset.shard(self.dataset.num_shards, int(file))


FORMAT_BY_SUFFIX: dict[str, type[Tar | Parquet | Arrow]] = {
    ".tar": Tar,
    ".parquet": Parquet,
    ".arrow": Arrow,
}


def count_samples(format: Format, file: Any) -> int:
    """How many samples the file has; UsageError where it cannot be read."""
    try:
        samples = format.count(file)
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"The samples of {file} cannot be counted: {error}.",
            advice="Check whether the file is complete, and leave it out if it is not.",
        ) from error
    check_whole(f"The number of samples in {file}", samples, 0)
    return samples


def _library(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"Files of this kind need {module.partition('.')[0]}, which is not installed.",
            advice=f"pip install 'paceline[{extra}]'",
        ) from error


class Files(Dataset[Any]):
    """A dataset of the samples of `files`: paths, or a pattern such as `"data/train-*.tar"`.

        Files("data/train-*.tar", transform=decode)
        Files(paths, Parquet(columns=["text"]), window=10_000)
        Files(names, format=mine)                 mine.count(file), mine.read(file, start)
        Files.streamed(hugging_face_iterable)

    Without a `format` the suffix decides: `.tar`, `.parquet`, `.arrow`. `transform` turns a sample
    into the model's input when it leaves the window: decode and draw random numbers there. Samples
    are shuffled in windows of `window` neighbours; each shard reads `lanes` of them at a time,
    which is also how many processes can load for a shard that is alone on its worker. `counts` are
    the numbers of samples in each file, where they are known.
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
        """How many samples each file has; counted on first access."""
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
        """A sample by number; consecutive ones are read without opening the file again."""
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
        """The transformed sample."""
        return sample if self._transform is None else self._transform(sample)

    def read_pieces(self, pieces: Iterable[tuple[int, range]]) -> Iterator[Any]:
        """The samples of parts of files, each given by number, one after the other."""
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
        """The identity of the samples and their order, for a checkpoint."""
        names = [os.path.basename(os.fspath(f)) if _is_path(f) else str(f) for f in self.files]
        digest = sha256(json.dumps([names, self.counts]).encode()).hexdigest()[:12]
        return (
            f"{count_text(len(names), 'file')} {digest}, window {self.window}, lanes {self.lanes}"
        )


def _miscounted(file: Any, how: str, count: int) -> UsageError:
    return UsageError(
        f"{file} has {how} samples than the {count} that were counted.",
        advice="Count them again, and begin a new run: files must not change during a run.",
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
            advice=f"Pass a pattern that matches some from {Path.cwd()}, or a list of files.",
        )
    return found


def _is_path(file: Any) -> bool:
    return isinstance(file, str | os.PathLike)


def _guess_format(files: list[Any]) -> Format:
    suffixes = {Path(file).suffix if _is_path(file) else "" for file in files}
    if len(suffixes) == 1 and (found := FORMAT_BY_SUFFIX.get(suffixes.pop())):
        return found()
    raise UsageError(
        f"The suffix of {files[0]!s:.200} is unknown, or not that of all files.",
        advice=f"Pass files that end in one of {', '.join(FORMAT_BY_SUFFIX)}, or format=.",
    )
