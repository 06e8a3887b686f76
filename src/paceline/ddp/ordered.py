"""An engine whose sums have the same bits at any number of workers, for `RunOptions(same_bits=)`.

Rounding makes a sum depend on the order of its additions, and the order on who computes what. Here
it is that of a tree over the V shards of a step, which knows no workers:

    shards 0 to 7:      ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))

It is cut on the lowest bit of a shard's number first. So what worker r of W computes, the shards
r, r + W, r + 2W and so on, is one whole branch wherever W is a power of two: the worker adds its
own branch as its shards come, and branches are added between workers. For any other W a worker's
shards are several smaller branches, each of which travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paceline.ddp.audit import Audit
from paceline.ddp.buffer import Bucket, ParamRef
from paceline.ddp.layout import BucketPlan, Slot
from paceline.ddp.naive import NaiveEngine
from paceline.errors import UsageError
from paceline.group import Membership, all_gather, all_reduce, word_device
from paceline.torch_private import foreach_mul_
from paceline.transport import (
    ALIGNMENT,
    Buckets,
    Reduction,
    SharedBuckets,
    SharedMemory,
    Transport,
    TransportChoice,
    place,
    round_up,
)

Sum = list[Tensor | None]
"""Flat buffers, those of a branch's gradients; None where no shard of it has any."""
Branch = tuple[int, int]
"""Depth d and residue r: the shards whose lowest d bits are those of r. The root is (0, 0)."""

_BUCKET_BYTES = 32 * 2**20
_SUMMED_AS_THEY_ARE = (torch.float32, torch.float64)
"""Dtypes in which a transport's sum of two is one rounded addition."""


def depth_of(shards: int) -> int:
    """How many bits tell the shards apart."""
    return (shards - 1).bit_length()


def in_tree_order(numbers: Sequence[int], shards: int) -> list[int]:
    """Shards in an order in which neighbours of the tree come one after the other."""
    depth = depth_of(shards)
    return sorted(numbers, key=lambda v: int(format(v, f"0{depth}b")[::-1], 2) if depth else 0)


@cache
def branches_of(rank: int, size: int, shards: int) -> tuple[Branch, ...]:
    """The largest branches all of whose shards rank `rank` of `size` computes, in order."""

    def find(branch: Branch) -> Iterator[Branch]:
        depth, residue = branch
        owners = {shard % size for shard in range(residue, shards, 2**depth)}
        if owners == {rank}:
            yield branch
        elif rank in owners:
            yield from find((depth + 1, residue))
            yield from find((depth + 1, residue + 2**depth))

    return tuple(find((0, 0)))


def fold(
    have: dict[Branch, Any], shards: int, add: Callable[[Any, Any], Any], root: Branch = (0, 0)
) -> Any:
    """What the tree below `root` adds up to, of the branches there are; None where there are
    none."""
    deepest = max((depth for depth, _ in have), default=0)

    def total(branch: Branch) -> Any:
        depth, residue = branch
        if branch in have:
            return have[branch]
        if residue >= shards or depth >= deepest:
            return None
        left, right = total((depth + 1, residue)), total((depth + 1, residue + 2**depth))
        if residue + 2**depth >= shards:  # no shard has such a number: it is not a sum
            return left
        return None if left is None and right is None else add(left, right)

    return total(root)


class OrderedEngine(NaiveEngine):
    """Keeps one model equal on all workers, and its gradients the same bits at any number of them.

        backward of a shard --> its gradient is taken, and added where its neighbour is there
        take_part()         --> weights are exchanged, branches added between workers, all divided

    Invariant: which numbers are added to which depends on the shards alone. A gradient that a shard
    does not have counts as zeros, wherever another shard of the step has one.
    """

    def __init__(
        self,
        module: nn.Module,
        membership: Membership,
        shards: int,
        transport: Any = "auto",
        audit: Audit | None = None,
    ) -> None:
        super().__init__(module, membership)
        # Not as attributes of the module inside, which names set from here on would be.
        self._sums = OrderedSums(module, membership, shards, transport, audit)
        membership.follow(self.on_generation)

    @property
    def listens(self) -> bool:
        return True

    @property
    def reducer(self) -> OrderedSums:
        """What an update that is shared out needs of an engine."""
        return self._sums

    def _on_backward_end(self, wants_sync: bool) -> None:
        if self._is_touched:
            self._is_touched = False
            self._sums.take_gradients(is_last=wants_sync)

    def begin_step(self, number: int) -> None:
        super().begin_step(number)
        self._sums.begin(number)

    def weigh(self, _weight: float, shard: int = 0, of_shard: float = 1.0) -> None:
        """The next backward is that of this shard, whose loss has this weight."""
        self._sums.begin_shard(shard, of_shard)

    def weigh_again(self, shard: int, of_shard: float) -> None:
        """The next backward is that of a shard which another worker computes: to be compared."""
        self._sums.begin_shard(shard, of_shard, is_second=True)

    def take_part(self) -> None:
        self.has_news = self._sums.finish(has_news=self.has_news)

    def on_generation(self) -> None:
        self._sums.on_generation()


class OrderedSums:
    """The gradients of one step of one model on their way up the tree.

    spare memory --(a shard's gradient)--> branches --(the last shard's)--> one branch, in the
    buckets --(added between workers)--> the sum, there too, which is handed out
    """

    is_joined, backwards = False, 0

    def __init__(
        self,
        module: nn.Module,
        membership: Membership,
        shards: int,
        transport: Any,
        audit: Audit | None = None,
    ) -> None:
        self.module, self.membership, self.shards = module, membership, shards
        self.audit = audit
        self._next: tuple[int, float, bool] | None = None
        """The next backward: its shard and weight, and whether another worker computes it too."""
        self._places: Buckets | None = None
        """Where workers' branches are added, found anew in every generation."""
        self._step = 0
        self._weights: dict[int, float] = {}
        self._have: dict[Branch, Sum] = {}
        self._spare: list[list[Tensor]] = []
        self._layout: _Layout | None = None
        devices = sorted({param.device for param in module.parameters()}, key=str)
        self._choice = TransportChoice(membership, devices, transport)

    @property
    def size(self) -> int:
        return self.membership.size

    @property
    def steps(self) -> int:
        """As a reducer counts, which has counted this one when its gradients are handed out."""
        return self._step + 1

    @property
    def transport(self) -> Transport:
        return self._choice.get()

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._find_layout().buckets

    def align(self) -> None:
        """Gradients begin where parameters can."""

    def meet(self, what: str) -> None:
        """Wait for all ranks, where the transport can."""
        if isinstance(self.transport, SharedMemory):
            self.transport.meet(what)

    def on_generation(self) -> None:
        self._places = None
        for bucket in () if self._layout is None else self._layout.buckets:
            bucket.use_memory(None)
        if self.audit is not None:
            self.audit.forget()

    def begin(self, step: int) -> None:
        self._step = step
        self._have, self._weights, self._next = {}, {}, None
        if self.audit is not None:
            self.audit.begin(step)
        if self._layout is not None:
            self._layout.has_grad = [False] * len(self._layout.params)
            trained = [param for param in self.module.parameters() if param.requires_grad]
            if list(map(id, trained)) != list(map(id, self._layout.params)):  # some were unfrozen
                self._layout, self._spare, self._places = None, [], None

    def begin_shard(self, number: int, weight: float, *, is_second: bool = False) -> None:
        self._next = number, weight, is_second
        if not is_second:
            self._weights[number] = weight

    def _find_layout(self) -> _Layout:
        self._layout = self._layout or _Layout(self.module)
        return self._layout

    @torch.no_grad()
    def take_gradients(self, *, is_last: bool) -> None:
        """Take the gradients of a shard away, and add them to their neighbours in the tree.

        Those of the last one go where the sum will lie.
        """
        if self._next is None:
            raise UsageError(
                "A backward of the run's model ended outside of a step; with same_bits only "
                "step.backward() says which shard its gradients belong to.",
                advice="Call step.backward(loss), or compute on the module itself: "
                "run.model.module.",
            )
        layout, (shard, weight, is_second) = self._find_layout(), self._next
        if self.audit is not None:
            # No name for the gradients: one more reference to each, and buckets would copy them.
            self.audit.note(shard, is_second, weight, [p.grad for p in layout.params])
        if is_second:
            self._next = None
        else:
            for number, param in enumerate(layout.params):
                layout.has_grad[number] |= param.grad is not None
            self._add((depth_of(self.shards), shard), self._take(layout, is_last))
        for param in layout.params:
            param.grad = None

    def _take(self, layout: _Layout, is_last: bool) -> Sum:
        if is_last:
            self._place()
        spare: list[Tensor] = []
        if not is_last:
            spare = self._spare.pop() if self._spare else layout.make()
        taken: Sum = []
        for number, bucket in enumerate(layout.buckets):
            if all(param is None or param.grad is None for param in bucket.params):
                taken.append(None)
            elif is_last:
                bucket.fill()
                taken.append(bucket.buffer)
            else:
                bucket.copy_to(spare[number])
                taken.append(spare[number])
        return taken

    def _add(self, branch: Branch, flats: Sum) -> None:
        size, rank = self.membership.size, self.membership.rank
        while branch[0]:
            depth, residue = branch
            parent = depth - 1, residue % 2 ** (depth - 1)
            if not any(_is_in(parent, each) for each in branches_of(rank, size, self.shards)):
                break
            neighbour = depth, residue ^ 2 ** (depth - 1)
            # Without a neighbour the branch is all there is of its parent.
            if max(residue, neighbour[1]) < self.shards:
                other = self._have.pop(neighbour, None)
                if other is None:
                    break
                flats = _sum(flats, other)
                self._give_back(other, flats)
            branch = parent
        self._have[branch] = flats

    def _give_back(self, flats: Sum, *used: Sum) -> None:
        """Use this memory again for other shards, unless it is used, or that of the buckets."""
        kept = {id(flat) for each in used for flat in each}
        kept |= {id(bucket.buffer) for bucket in self.buckets}
        spare = [flat for flat in flats if flat is not None and id(flat) not in kept]
        if len(spare) == len(flats):
            self._spare.append(spare)

    @torch.no_grad()
    def finish(self, *, has_news: bool) -> bool:
        """Add the branches of all workers, divide by all weights, and hand the gradients out;
        whether any worker has news."""
        layout = self._find_layout()
        members = self.membership
        self._place()
        weights = [self._weights.get(shard, 0.0) for shard in range(self.shards)]
        audited: list[float] = []
        if self.audit is not None:
            audited = self.audit.words(layout.params, members.rank, members.size)
        # A weight, or a digest's word, is one worker's, and the others add zeros: exact in float64.
        told = torch.tensor([*weights, has_news, *layout.has_grad, *audited], dtype=torch.float64)
        if members.size > 1:
            told = told.to(word_device(members.group, layout.device))
            all_reduce(members.group, told, f"Step {self._step}: agreeing on weights")
        words = told.tolist()
        weights, news, users = words[: self.shards], words[self.shards], words[self.shards + 1 :]
        users, audited = users[: len(layout.params)], users[len(layout.params) :]
        if self.audit is not None:
            self.audit.names = layout.names
            self.audit.settle(audited, members, layout.device)
            if self.audit.is_disputed:
                return False
        mine = []
        for branch in branches_of(members.rank, members.size, self.shards):
            inside = {each: have for each, have in self._have.items() if _is_in(each, branch)}
            # A short batch leaves shards out.
            folded = fold(inside, self.shards, _sum, branch)
            mine.append(folded or [None] * len(layout.buckets))
        self._add_between_workers(layout, mine)
        for bucket in layout.buckets:
            bucket.hand_out(list(map(bool, users)))
        weight = math.fsum(weights)  # rounded once, whatever the order
        handed = [param.grad for param in layout.params if param.grad is not None]
        if handed and not math.isclose(weight, 1.0, rel_tol=1e-15):
            foreach_mul_(handed, 1 / weight if weight else 0.0)
        for flats in mine:
            self._give_back(flats)
        self.begin(self._step)
        return bool(news)

    @property
    def _has_one_branch(self) -> bool:
        """Whether every worker has: then the buckets are all that travels."""
        size = self.membership.size
        return all(len(branches_of(rank, size, self.shards)) == 1 for rank in range(size))

    def _place(self) -> None:
        """Find memory for the buckets; all workers do so at one point, once in a generation."""
        if self._places is None and self.membership.size > 1 and self._has_one_branch:
            what = f"Step {self._step}: finding memory for the buckets"
            buckets = self.buckets
            self._places = place(self._choice.get(), [bucket.plan for bucket in buckets], what)
            for bucket, home in zip(buckets, self._places.homes, strict=True):
                bucket.use_memory(home)

    def _add_between_workers(self, layout: _Layout, mine: Sequence[Sum]) -> None:
        """Have the sum of all branches in the buckets."""
        members, places = self.membership, self._places
        what = f"Step {self._step}: the sum of gradients"
        is_shared = type(places) is SharedBuckets
        # One addition has no order: any transport may do it.
        is_one_addition = members.size == 2 and layout.is_plain
        if members.size > 1 and not (places and (is_shared or is_one_addition)):
            self._gather(layout, mine, what)
            return
        for bucket, flat in zip(layout.buckets, mine[0], strict=True):
            if flat is None or flat is not bucket.buffer:
                bucket.fill_from(flat)
        if places is None:
            return
        under_way: list[Reduction] = []
        for number, bucket in enumerate(layout.buckets):
            if isinstance(places, SharedBuckets):
                under_way.append(places.begin(number, bucket.buffer, self._fold_slices, what))
            else:
                under_way.append(places.start(number, bucket.buffer, 1.0, what))
        for each in under_way:
            each.wait()

    def _fold_slices(self, number: int) -> None:
        """Add this worker's slice of all workers' buckets, and write the sum to all."""
        assert isinstance(self._places, SharedBuckets)
        size, shards = self.membership.size, self.shards
        branches = [branches_of(rank, size, shards)[0] for rank in range(size)]
        for tensors, _ in self._places.chunks(number):
            total = fold(dict(zip(branches, tensors, strict=True)), shards, _add_flats)
            for tensor in tensors:
                if tensor is not total:
                    tensor.copy_(total)

    def _gather(self, layout: _Layout, mine: Sequence[Sum], what: str) -> None:
        """Have all branches of all workers here, and add them."""
        members, shards = self.membership, self.shards
        all_branches = [branches_of(rank, members.size, shards) for rank in range(members.size)]
        most = max(len(each) for each in all_branches)
        for index, bucket in enumerate(layout.buckets):
            have: dict[Branch, Tensor] = {}
            for turn in range(most):
                # A worker with fewer branches than others sends nothing that is read.
                sent = mine[turn][index] if turn < len(mine) else None
                sent = layout.zeros(index) if sent is None else sent
                for rank, flat in enumerate(all_gather(members.group, sent, what)):
                    if turn < len(all_branches[rank]):
                        have[all_branches[rank][turn]] = flat
            bucket.fill_from(fold(have, shards, _add_flats))


def _sum(one: Sum | None, other: Sum | None) -> Sum:
    """The sum of two branches, in the memory of the first; what is not there is zero."""
    one, other = (one, other) if one is not None else (other, None)
    assert one is not None
    theirs: Sum = other or [None] * len(one)
    return [
        None if a is None and b is None else _add_flats(a, b)
        for a, b in zip(one, theirs, strict=True)
    ]


def _is_in(inner: Branch, outer: Branch) -> bool:
    return inner[0] >= outer[0] and inner[1] % 2 ** outer[0] == outer[1]


def _add_flats(one: Tensor | None, other: Tensor | None) -> Tensor:
    left, right = (other, None) if one is None else (one, other)
    assert left is not None
    return left.add_(0.0 if right is None else right)  # which makes zeros of negative zeros


class _Layout:
    """How the gradients of a model lie in buckets: the same at any number of workers."""

    def __init__(self, module: nn.Module) -> None:
        named = [each for each in module.named_parameters() if each[1].requires_grad]
        self.names, self.params = [name for name, _ in named], [param for _, param in named]
        self.has_grad = [False] * len(self.params)
        self.device = self.params[0].device if self.params else torch.device("cpu")
        members: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
        for number, param in enumerate(self.params):
            groups = members.setdefault((param.dtype, param.device), [[]])
            if sum(self.params[n].nbytes for n in groups[-1]) > _BUCKET_BYTES:
                groups.append([])
            groups[-1].append(number)
        refs = [ParamRef(name, param) for name, param in named]
        plans = [self._plan(each) for groups in members.values() for each in groups]
        self.buckets = [Bucket(plan, refs) for plan in plans]
        self.is_plain = all(plan.dtype in _SUMMED_AS_THEY_ARE for plan in plans)

    def _plan(self, members: Sequence[int]) -> BucketPlan:
        slots, end = [], 0
        for number in members:
            slots.append(Slot(number, end, end + self.params[number].numel()))
            end += round_up(self.params[number].numel(), ALIGNMENT)
        first = self.params[members[0]]
        return BucketPlan(max(end, 1), first.dtype, first.device, slots=tuple(slots))

    def zeros(self, index: int) -> Tensor:
        plan = self.buckets[index].plan
        return torch.zeros(plan.length, dtype=plan.dtype, device=plan.device)

    def make(self) -> list[Tensor]:
        return [self.zeros(index) for index in range(len(self.buckets))]
