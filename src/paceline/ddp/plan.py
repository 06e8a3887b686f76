"""Which gradient lives where: the bucket plan.

A plan is plain data computed from sizes alone, so every rank derives the same plan without
communicating, and a test can check it without a process group. Gradients are packed in the
order they are expected to become ready, so that the first bucket can leave early in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.errors import UsageError
from paceline.transport import Flat

MIB = 2**20
CONTROL_WORDS = 8 + 13
"""Elements of the trailer after the flags: `trailer.Words`, then `fingerprint.LENGTH` more."""


ALIGNMENT_BYTES = 64
"""Where torch puts the tensors that it allocates: elsewhere kernels are slower, and some round
differently. A parameter can live where its gradient does in its bucket; see `update.shares`."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One gradient's place: elements [start, stop) of its bucket."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class BucketPlan(Flat):
    """One flat buffer, and the slots in it in order."""

    slots: tuple[Slot, ...] = ()


def default_capacities(gradients: Sequence[Flat], *, messages_are_cheap: bool = True) -> list[int]:
    """How large buckets are unless the caller says: small enough to leave while backward runs.

    On CPUs 4 MiB, and about four buckets at least; but not so many that messages cost more than
    they hide. On GPUs a small first bucket leaves early, and larger ones use the network well.
    """
    if {gradient.device.type for gradient in gradients} - {"cpu"}:
        return [MIB, 25 * MIB]
    total = sum(_sizes(gradients))
    return [max(min(4 * MIB, -(-total // 4)), MIB // 4 if messages_are_cheap else MIB)]


def _sizes(gradients: Sequence[Flat]) -> list[int]:
    """In bytes; a gradient has no trailer."""
    return [gradient.numel * gradient.dtype.itemsize for gradient in gradients]


def plan_buckets(
    gradients: Sequence[Flat],
    order: Sequence[int],
    capacities_bytes: Sequence[int],
    *,
    trailer_apart: bool = False,
    is_aligned: bool = True,
) -> list[BucketPlan]:
    """Pack gradients into buckets in the order given, one dtype and device to a bucket.

    The i-th bucket to be opened is full once it holds the i-th capacity, the last one repeating;
    no gradient is ever split. So even the first leaves with something to do for the network, and
    the blocks of a model, a little larger than that as they may be, are not cut in two. A gradient
    that fills a bucket alone is not waited for, unless by less than a quarter of a bucket. Buckets
    are listed in the order in which their last gradient comes. The last carries the trailer, or,
    where its dtype cannot count (or with `trailer_apart`), a bucket of its own does. With
    `is_aligned` gradients begin at multiples of `ALIGNMENT_BYTES`, with gaps between them.
    """
    if not capacities_bytes or min(capacities_bytes) <= 0:
        raise UsageError(
            f"Bucket capacities must be positive, not {list(capacities_bytes)} bytes.",
            advice="Leave bucket_cap_mb out to get the default.",
        )
    sizes = _sizes(gradients)
    open_by_kind: dict[tuple[torch.dtype, torch.device], _Open] = {}
    opened = 0
    closed: list[list[int]] = []
    for param in order:
        gradient = gradients[param]
        kind = (gradient.dtype, gradient.device)
        bucket = open_by_kind.get(kind)
        if bucket is not None and sizes[param] >= bucket.capacity <= 4 * bucket.held:
            closed.append(bucket.members)
            bucket = None
        if bucket is None:
            bucket = _Open(capacities_bytes[min(opened, len(capacities_bytes) - 1)])
            open_by_kind[kind] = bucket
            opened += 1
        bucket.members.append(param)
        bucket.held += sizes[param]
        if bucket.held >= bucket.capacity:
            closed.append(open_by_kind.pop(kind).members)
    position_by_param = {param: position for position, param in enumerate(order)}
    groups = closed + [bucket.members for bucket in open_by_kind.values()]
    groups.sort(key=lambda members: position_by_param[members[-1]])
    plans = [_lay_out(gradients, members, is_aligned) for members in groups]
    return _with_trailer(plans, len(gradients), apart=trailer_apart)


@dataclass(slots=True)
class _Open:
    """A bucket that is not full yet; all in bytes."""

    capacity: int
    held: int = 0
    members: list[int] = field(default_factory=list)


def _lay_out(gradients: Sequence[Flat], members: Sequence[int], is_aligned: bool) -> BucketPlan:
    first = gradients[members[0]]
    step = max(1, ALIGNMENT_BYTES // first.dtype.itemsize) if is_aligned else 1
    slots, stop = [], 0
    for param in members:
        start = -(-stop // step) * step
        stop = start + gradients[param].numel
        slots.append(Slot(param, start, stop))
    return BucketPlan(stop, first.dtype, first.device, slots=tuple(slots))


def _with_trailer(plans: list[BucketPlan], params: int, *, apart: bool) -> list[BucketPlan]:
    """Put the trailer where sums are exact enough to count with: float32 or float64."""
    trailer = params + CONTROL_WORDS
    if plans and not apart and plans[-1].dtype in (torch.float32, torch.float64):
        last = plans[-1]
        return [*plans[:-1], replace(last, trailer=trailer)]
    device = plans[-1].device if plans else torch.device("cpu")
    return [*plans, BucketPlan(0, torch.float32, device, trailer)]
