"""What a `DataLoader` whose processes load batches does not tell."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from paceline.torch_private.lookup import find

PREFETCHING: CodeType = find(
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._reset"
).__code__
"""The code that fills the queues of a loader's processes, before anyone has got a batch."""

BatchIterator: type = find("torch.utils.data.dataloader._BaseDataLoaderIter")
"""What goes through a loader; it has `_dataset` and `_index_sampler`."""


def find_queue(batches: Iterator[Any]) -> Any:
    """Where batches of a loader's processes wait; None where it has none or cannot count them."""
    queue = getattr(batches, "_data_queue", None)
    try:
        return None if queue is None or queue.qsize() is None else queue
    except NotImplementedError:  # as on macOS
        return None
