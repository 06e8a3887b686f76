"""Which gradient lives where: the bucket plan, and the buckets in use that are laid out by it.

A plan is plain data computed from sizes alone, so every rank derives the same plan without
communicating, and a test can check it without a process group. Gradients are packed in the
order they are expected to become ready, so that the first bucket can leave early in backward.

The first layout goes by the reverse order of the parameters. One backward shows in which order
gradients really come, and how often each comes; from the next on buckets can start while backward
is still running.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paceline.ddp.buffer import Bucket, ParamRef
from paceline.ddp.trailer import CONTROL_WORDS, Trailer
from paceline.errors import DesyncError, UsageError
from paceline.transport import Flat

MIB = 2**20
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
    # For the numbers see decision 8.
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


_NO_GRADIENT = Flat(0, torch.float32, torch.device("cpu"))


class BucketLayout:
    """Which parameter's gradient goes into which bucket, and what each bucket waits for."""

    def __init__(
        self, params: Sequence[ParamRef], capacities_bytes: Sequence[int] | None, always_views: bool
    ) -> None:
        self.params = list(params)
        self.trailer_apart = False
        """Give the trailer a bucket of its own: a hook sees gradients only, without gaps."""
        self.is_aligned = False
        """Keep the gaps even then."""
        self.buckets: list[Bucket] = []
        self.bucket_by_id: dict[int, int] = {}
        """The number of its bucket, by the `id` of the parameter."""
        self.awaited: frozenset[int] = frozenset()
        """The ids of the parameters that come last in their buckets, as far as that is known."""
        self.missing: list[int] = []
        """By bucket, how many gradients it waits for; more than there are while that is unknown."""
        self.messages_are_cheap = True
        """Whether a bucket more costs next to nothing; matters for the default capacity only."""
        self._capacities_bytes = capacities_bytes
        self._always_views = always_views
        self._order = list(reversed(range(len(params))))
        self._fires: Counter[int] | None = None
        self._seen: list[int] = []
        self.counts: dict[int, tuple[list[int], Counter[int | None]]] = {}
        """What came after so many others in the last backward: ids, and how many by bucket."""
        self.is_learned = False
        """Whether it is known how often each gradient comes in one backward."""
        self.lay_out()

    def lay_out(self, order: Sequence[int] | None = None) -> bool:
        """Make buckets for gradients expected in the order given, or in the last one.

        Buckets that would hold the same gradients as now stay, with their memory: new memory has
        to be found and paged in. Returns whether there are new ones.
        """
        self._order = list(order) if order is not None else self._order
        plans = self._plan()
        members = [{slot.param for slot in plan.slots} for plan in plans]
        if order is not None and members == [set(bucket.indices) for bucket in self.buckets]:
            return False
        self.buckets = [Bucket(plan, self.params, self._always_views) for plan in plans]
        self.trailer = Trailer(len(self.params), plans[-1].dtype, plans[-1].device)
        self.bucket_by_id = {
            id(param): number
            for number, plan in enumerate(plans)
            for slot in plan.slots
            if (param := self.params[slot.param].get()) is not None
        }
        self.counts = {}
        self._count()
        return True

    def _plan(self) -> list[BucketPlan]:
        gradients = [
            Flat(p.numel(), p.dtype, p.device) if p is not None else _NO_GRADIENT
            for p in (ref.get() for ref in self.params)
        ]
        capacities = self._capacities_bytes or default_capacities(
            gradients, messages_are_cheap=self.messages_are_cheap
        )
        return plan_buckets(
            gradients,
            self._order,
            capacities,
            trailer_apart=self.trailer_apart,
            is_aligned=self.is_aligned or not self.trailer_apart,
        )

    def add(self, params: Sequence[ParamRef]) -> None:
        """Take in more parameters; how their gradients come is not known yet."""
        known = len(self.params)
        self.params += params
        self._order += reversed(range(known, len(self.params)))
        self._fires = None

    def learn(self, ready: Sequence[int]) -> list[int]:
        """Take in how gradients came in one backward; returns the order that this suggests.

        A gradient is complete when it comes for the last time. Those that never came go last.
        """
        self._fires = Counter(ready)
        self.expect(ready)
        return self._seen + [index for index in self._order if index not in self._fires]

    def expect(self, ready: Sequence[int]) -> None:
        """Await in each bucket what came last in this backward: the order has changed."""
        self._seen = list(dict.fromkeys(reversed(ready)))[::-1]
        self._count()

    def indices(self, params: Iterable[Tensor]) -> list[int]:
        """Which parameters these are, by position; those that it does not know are left out."""
        index_by_id = {id(ref.get()): index for index, ref in enumerate(self.params)}
        return [index_by_id[id(param)] for param in params if id(param) in index_by_id]

    def versions(self) -> list[int]:
        """How often each parameter was changed in place."""
        params = (ref.get() for ref in self.params)
        return [-1 if param is None else param._version for param in params]

    def begin_anew(self) -> None:
        """Lay out as a rank does that has seen no backward: in a generation there may be one.

        What this rank has learned must not show. Two ranks that put the same gradients into a
        bucket in different places would add up different ones, without noticing.
        """
        self._order = list(reversed(range(len(self.params))))
        self._fires, self._seen, self.messages_are_cheap = None, [], True
        self.lay_out()

    def late_gradient(
        self, step: int, rank: int, came: Sequence[Tensor], started: int
    ) -> DesyncError:
        """A gradient came once more often than in the backward the buckets were planned from."""
        sent = {i for bucket in self.buckets[:started] for i in bucket.indices}
        index = next(index for index in self.indices(came) if index in sent)
        self.unlearn()  # the next backward waits for its end, and is learned from again
        return DesyncError(
            f"Step {step}: the gradient of {self.params[index].name!r} came again "
            f"after its bucket had been sent from rank {rank}.",
            advice="The layer is checkpointed more often than in the first step: pass "
            "use_reentrant=False to torch.utils.checkpoint.",
        )

    def unlearn(self) -> None:
        """Wait for the end of every backward until one has been learned from again."""
        self._fires = None
        self._count()

    def _count(self) -> None:
        fires = self._fires
        self.is_learned = fires is not None
        self.missing = [sys.maxsize] * len(self.buckets)
        if fires is not None:
            # One that never came may come now: its bucket waits, at most to the end of backward.
            self.missing = [sum(max(1, fires[i]) for i in b.indices) for b in self.buckets]
        # The last bucket waits for the end of backward, because its trailer speaks for all.
        seen = (self.params[index].get() for index in (self._seen if self.is_learned else ()))
        last_by_bucket = {self.bucket_by_id.get(id(p)): id(p) for p in seen if p is not None}
        last_by_bucket.pop(len(self.buckets) - 1, None)
        self.awaited = frozenset(last_by_bucket.values())
