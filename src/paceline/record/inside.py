"""What is read of the engines beyond their public names, all in one place.

Nothing is changed there. Where an engine no longer has what is looked for, the recorded step has
less to show, and is otherwise as good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """One bucket of gradients, as it was when backward began."""

    names: list[str]
    """The parameters in it, in their order."""
    starts: list[int]
    """By parameter, its first element."""
    numel: int
    """Elements that hold gradients."""
    trailer: int
    """Elements behind them, for what ranks tell each other."""
    dtype: str
    device: str
    bytes: int


def buckets_of(model: Any) -> list[BucketFacts]:
    """The buckets in use, in the order in which they start; none in a world of one."""
    reducer = getattr(model, "_reducer", None)
    if reducer is None or getattr(reducer, "size", 1) == 1:
        return []
    return [
        BucketFacts(
            names=list(bucket.names),
            starts=[slot.start for slot in bucket.plan.slots],
            numel=bucket.plan.numel,
            trailer=bucket.plan.trailer,
            dtype=str(bucket.plan.dtype).removeprefix("torch."),
            device=str(bucket.plan.device),
            bytes=(bucket.plan.numel + bucket.plan.trailer) * bucket.plan.dtype.itemsize,
        )
        for bucket in getattr(reducer, "buckets", [])
    ]


def loss_weight_of(model: Any) -> float | None:
    """How many items the accumulated losses are sums over; None unless `weighted()` says."""
    weight = getattr(getattr(model, "_reducer", None), "weight", None)
    return weight.value if weight is not None and weight.is_set else None
