"""The buckets in use: laid out from a plan, and laid out anew when more is known.

The first layout goes by the reverse order of the parameters. One backward shows in which order
gradients really come, and how often each comes; from the next on buckets can start while backward
is still running.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.ddp.buffer import Bucket, ParamRef
from paceline.ddp.plan import BucketPlan, default_capacities, plan_buckets
from paceline.ddp.trailer import Trailer
from paceline.transport import Flat

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
        """By bucket, how many gradients it waits for, ..."""
        self.never_full: list[int] = []
        """... and the same for buckets that are to start at the end of backward."""
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
            for number, bucket in enumerate(self.buckets)
            for param in bucket.params
            if param is not None
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
        self._seen = list(dict.fromkeys(reversed(ready)))[::-1]
        self._count()
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

    def unlearn(self) -> None:
        """Wait for the end of every backward until one has been learned from again."""
        self._fires = None
        self._count()

    def _count(self) -> None:
        fires = self._fires
        self.is_learned = fires is not None
        self.missing = self.never_full = [sys.maxsize] * len(self.buckets)
        if fires is not None:
            self.missing = [sum(max(1, fires[i]) for i in b.indices) for b in self.buckets]
        # The last bucket waits for the end of backward, because its trailer speaks for all.
        seen = (self.params[index].get() for index in (self._seen if self.is_learned else ()))
        last_by_bucket = {self.bucket_by_id.get(id(p)): id(p) for p in seen if p is not None}
        last_by_bucket.pop(len(self.buckets) - 1, None)
        self.awaited = frozenset(last_by_bucket.values())
