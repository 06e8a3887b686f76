"""What is inside a file of samples: how many there are, and reading on from any of them.

A format has two methods. Those here leave the work to the library of the field, which is imported
when the first file is opened; one of your own is any object that has them.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, Protocol

from paceline.errors import UsageError, check_whole

_ROWS = 256
"""Rows that are taken out of a table at once."""


class Format(Protocol):
    """Files of one kind."""

    def count(self, file: Any) -> int:
        """How many samples the file has."""
        ...

    def read(self, file: Any, start: int) -> Iterator[Any]:
        """Its samples from number `start` on, the same whenever they are asked for."""
        ...


class Tar:
    """WebDataset's: neighbours with one name but for the extension are a sample.

    A sample is a dictionary of bytes by extension, with `__key__` and `__url__`, as WebDataset
    gives it before decoding. Archives must not be compressed: then a start in the middle is found
    by reading headers alone.
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
        """Where each sample begins."""
        wds, before = _library("webdataset.tariterators", "webdataset"), None
        try:
            with tarfile.open(file, "r:") as archive:
                for member in archive:
                    name = member.name
                    key = wds.base_plus_ext(name)[0] if member.isreg() else None
                    if key is not None and not name.startswith("__") and key != before:
                        before = key
                        yield member.offset
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps them all
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
    """Arrow files and streams, such as Hugging Face's `datasets` keeps; a sample is a row."""

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
    """The shards of a Hugging Face `datasets.IterableDataset`: a file is the number of a shard.

    Counting reads a shard whole, unless the dataset says how many rows it has otherwise.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def count(self, file: Any) -> int:
        batches = self._shard(file).with_format("arrow").iter(_ROWS)
        return sum(len(batch) for batch in batches)

    def read(self, file: Any, start: int) -> Iterator[dict[str, Any]]:
        # Not row by row: in a loader's process the dataset would deal its shards once more.
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
    """How many samples the file has, where it can be read at all."""
    try:
        samples = format.count(file)
    except (OSError, ValueError) as error:  # pyarrow's errors are among them
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"The samples of {file} cannot be counted: {error}.",
            advice="Look whether the file is whole, and leave it out if it is not.",
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
