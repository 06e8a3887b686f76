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
from paceline.ddp.naive import NaiveEngine
from paceline.errors import UsageError
from paceline.group import Membership, all_gather, all_reduce, word_device
from paceline.torch_private import foreach_copy_, foreach_mul_
from paceline.transport import ALIGNMENT, Buckets, Flat, TransportChoice, place, round_up

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


def fold(have: dict[Branch, Any], shards: int, add: Callable[[Any, Any], Any]) -> Any:
    """What the whole tree adds up to, of the branches there are; None where there are none."""

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

    return total((0, 0))


class OrderedEngine(NaiveEngine):
    """Keeps one model equal on all workers, and its gradients the same bits at any number of them.

        backward of a shard --> its gradient is taken, and added where its neighbour is there
        the last one        --> weights are exchanged, branches added between workers, all divided

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
        devices = sorted({param.device for param in module.parameters()}, key=str)
        # Not as attributes of the module inside, which names set from here on would be.
        self._sums = OrderedSums(module, membership, shards, devices, transport, audit)
        membership.follow(self.on_generation)

    @property
    def listens(self) -> bool:
        return True

    def _on_backward_end(self, wants_sync: bool) -> None:
        if self._is_touched:
            self._is_touched = False
            self._sums.take_gradients()
            if wants_sync:
                self.take_part()

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
        self._sums.buckets = None
        if (audit := self._sums.audit) is not None:
            audit.forget()


class OrderedSums:
    """The gradients of one step of one model on their way up the tree."""

    def __init__(
        self,
        module: nn.Module,
        membership: Membership,
        shards: int,
        devices: Sequence[torch.device],
        transport: Any,
        audit: Audit | None = None,
    ) -> None:
        self.module, self.membership, self.shards = module, membership, shards
        self.audit = audit
        self._second: tuple[int, float] | None = None
        """The shard of the next backward, and its weight, if another worker computes it, too."""
        self.buckets: Buckets | None = None
        """Where two workers' branches are added, found anew in every generation."""
        self._step = 0
        self._mine: list[int] = []
        self._weights: dict[int, float] = {}
        self._have: dict[Branch, Sum] = {}
        self._spare: list[list[Tensor]] = []
        self._layout: _Layout | None = None
        self._choice = TransportChoice(membership, devices, transport)

    def begin(self, step: int) -> None:
        self._step = step
        self._have, self._weights, self._mine, self._second = {}, {}, [], None
        if self.audit is not None:
            self.audit.begin(step)
        if self._layout is not None:
            self._layout.has_grad = [False] * len(self._layout.params)
            trained = [param for param in self.module.parameters() if param.requires_grad]
            if list(map(id, trained)) != list(map(id, self._layout.params)):  # some were unfrozen
                self._layout, self._spare, self.buckets = None, [], None

    def begin_shard(self, number: int, weight: float, *, is_second: bool = False) -> None:
        if is_second:
            self._second = number, weight
            return
        self._mine.append(number)
        self._weights[number] = weight

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Take the gradients of a shard away, and add them to their neighbours in the tree."""
        second, self._second = self._second, None
        if not self._mine and second is None:
            raise UsageError(
                "A backward of the run's model ended outside of a step; with same_bits only "
                "step.backward() says which shard its gradients belong to.",
                advice="Call step.backward(loss), or compute on the module itself: "
                "run.model.module.",
            )
        layout = self._layout = self._layout or _Layout(self.module)
        if self.audit is not None:
            number, weight = second or (self._mine[-1], self._weights[self._mine[-1]])
            whole = [param.grad for param in layout.params]
            self.audit.note(number, second is not None, weight, whole)
        if second is not None:
            for param in layout.params:
                param.grad = None
            return
        flats = self._spare.pop() if self._spare else layout.make()
        taken: Sum = []
        for part, flat in zip(layout.parts, flats, strict=True):
            grads = [param.grad for param in part.params]
            if all(grad is None for grad in grads):
                taken.append(None)
                continue
            if any(grad is None for grad in grads):
                flat.zero_()
            pairs = [(v, g) for v, g in zip(part.views(flat), grads, strict=True) if g is not None]
            foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
            taken.append(flat)
        for number, param in enumerate(layout.params):
            layout.has_grad[number] |= param.grad is not None
            param.grad = None
        self._add((depth_of(self.shards), self._mine[-1]), taken)

    def _add(self, branch: Branch, flats: Sum) -> None:
        size, rank = self.membership.size, self.membership.rank
        while branch[0]:
            depth, residue = branch
            parent = depth - 1, residue % 2 ** (depth - 1)
            if not any(_is_in(parent, each) for each in branches_of(rank, size, self.shards)):
                break
            neighbour = depth, residue ^ 2 ** (depth - 1)
            if max(residue, neighbour[1]) < self.shards:
                other = self._have.pop(neighbour, None)
                if other is None:
                    break
                flats = self._sum(flats, other)
            branch = parent
        self._have[branch] = flats

    def _sum(self, one: Sum | None, other: Sum | None) -> Sum:
        """The sum of two branches, in the memory of the first; what is not there is zero."""
        if one is None or other is None:
            one, other = one or other, None
        assert one is not None
        other = other or [None] * len(one)
        summed: Sum = []
        for mine, theirs in zip(one, other, strict=True):
            left, right = (theirs, None) if mine is None else (mine, theirs)
            if left is not None:
                left.add_(0.0 if right is None else right)  # which makes zeros of negative zeros
            summed.append(left)
        spare = [flat for flat in other if flat is not None]
        if len(spare) == len(one) and all(a is not b for a, b in zip(summed, spare, strict=True)):
            self._spare.append(spare)
        return summed

    @torch.no_grad()
    def finish(self, *, has_news: bool) -> bool:
        """Add the branches of all workers, divide by all weights, and hand the gradients out;
        whether any worker has news."""
        layout = self._layout = self._layout or _Layout(self.module)
        members, what = self.membership, f"Step {self._step}: the sum of gradients"
        weights = [self._weights.get(shard, 0.0) for shard in range(self.shards)]
        audited = [] if self.audit is None else self.audit.words()
        told = torch.tensor([*weights, has_news, *layout.has_grad, *audited], dtype=torch.float64)
        if members.size > 1:
            told = told.to(word_device(members.group, layout.flats[0].device))
            all_reduce(members.group, told, f"Step {self._step}: agreeing on weights")
        words = told.tolist()
        weights, news, users = words[: self.shards], words[self.shards], words[self.shards + 1 :]
        users, audited = users[: len(layout.params)], users[len(layout.params) :]
        if self.audit is not None:
            self.audit.names = layout.names
            self.audit.settle(audited, members, layout.flats[0].device)
            if self.audit.is_disputed:
                return False
        mine = [
            self._fold_own(each) for each in branches_of(members.rank, members.size, self.shards)
        ]
        total = self._add_between_workers(mine, what) if members.size > 1 else mine[0]
        weight = math.fsum(weights)  # rounded once, whatever the order
        views = layout.hand_out(total, users)
        if views and not math.isclose(weight, 1.0, rel_tol=1e-15):
            foreach_mul_(views, 1 / weight if weight else 0.0)
        self.begin(self._step)
        return bool(news)

    def _fold_own(self, branch: Branch) -> Sum | None:
        """What this worker has of one of its branches; a short batch leaves shards out."""
        inside = {each: have for each, have in self._have.items() if _is_in(each, branch)}
        if branch in inside:
            return inside[branch]
        if not inside:
            return None
        found: Sum = fold_from(branch, inside, self.shards, self._sum)
        return found

    def _add_between_workers(self, mine: Sequence[Sum | None], what: str) -> Sum:
        layout, members = self._layout, self.membership
        assert layout is not None
        size, shards = members.size, self.shards
        all_branches = [branches_of(rank, size, shards) for rank in range(size)]
        filled = [
            [layout.filled(index, None if own is None else own[index]) for own in mine]
            for index in range(len(layout.parts))
        ]
        if size == 2 and [len(each) for each in all_branches] == [1, 1] and layout.is_plain:
            return self._add_two([each[0] for each in filled], what)
        totals: Sum = []
        most = max(len(each) for each in all_branches)
        for index, part in enumerate(filled):
            have: dict[Branch, Tensor] = {}
            for turn in range(most):
                # A worker with fewer branches than others sends nothing that is read.
                sent = part[turn] if turn < len(part) else layout.filled(index, None)
                for rank, flat in enumerate(all_gather(members.group, sent, what)):
                    if turn < len(all_branches[rank]):
                        have[all_branches[rank][turn]] = flat
            totals.append(fold(have, shards, _add_flats))
        return totals

    def _add_two(self, flats: Sequence[Tensor], what: str) -> Sum:
        """One addition has no order: any transport may do it."""
        assert self._layout is not None
        if self.buckets is None:
            self.buckets = place(self._choice.get(), self._layout.flats, what)
        started = []
        for number, flat in enumerate(flats):
            home = self.buckets.homes[number]
            buffer = flat if home is None else home.copy_(flat)
            started.append((self.buckets.start(number, buffer, 1.0, what), buffer, flat))
        totals: Sum = []
        for reduction, buffer, flat in started:
            reduction.wait()
            # The home is written again in the next step, while somebody may keep a gradient.
            totals.append(flat if buffer is flat else flat.copy_(buffer))
        return totals


def fold_from(
    branch: Branch, have: dict[Branch, Any], shards: int, add: Callable[[Any, Any], Any]
) -> Any:
    """As `fold`, of one branch: the tree below it is a tree of the shards that it has."""
    depth, residue = branch
    inner = {(d - depth, r >> depth): value for (d, r), value in have.items()}
    return fold(inner, len(range(residue, shards, 2**depth)), add)


def _is_in(inner: Branch, outer: Branch) -> bool:
    return inner[0] >= outer[0] and inner[1] % 2 ** outer[0] == outer[1]


def _add_flats(one: Tensor | None, other: Tensor | None) -> Tensor:
    left, right = (other, None) if one is None else (one, other)
    assert left is not None
    return left.add_(0.0 if right is None else right)


class _Part:
    """Parameters of one dtype and device whose gradients lie in one flat buffer."""

    def __init__(self, params: list[nn.Parameter], starts: list[int], flat: Flat) -> None:
        self.params, self.starts, self.flat = params, starts, flat

    def views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + param.numel()].view(param.shape)
            for start, param in zip(self.starts, self.params, strict=True)
        ]


class _Layout:
    """How the gradients of a model lie in flat buffers: the same at any number of workers."""

    def __init__(self, module: nn.Module) -> None:
        named = [each for each in module.named_parameters() if each[1].requires_grad]
        self.names, self.params = [name for name, _ in named], [param for _, param in named]
        self.has_grad = [False] * len(self.params)
        self.parts: list[_Part] = []
        by_kind: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
        for param in self.params:
            groups = by_kind.setdefault((param.dtype, param.device), [[]])
            if sum(p.numel() * p.element_size() for p in groups[-1]) > _BUCKET_BYTES:
                groups.append([])
            groups[-1].append(param)
        for (dtype, device), groups in by_kind.items():
            for params in groups:
                starts, end = [], 0
                for param in params:
                    starts.append(end)
                    end += round_up(param.numel(), ALIGNMENT)
                self.parts.append(_Part(params, starts, Flat(max(end, 1), dtype, device)))
        self.flats = [part.flat for part in self.parts]
        self.is_plain = all(flat.dtype in _SUMMED_AS_THEY_ARE for flat in self.flats)

    def make(self) -> list[Tensor]:
        return [torch.zeros(f.length, dtype=f.dtype, device=f.device) for f in self.flats]

    def filled(self, index: int, flat: Tensor | None) -> Tensor:
        """The buffer, or zeros where no shard has a gradient in it."""
        of = self.flats[index]
        return torch.zeros(of.length, dtype=of.dtype, device=of.device) if flat is None else flat

    def hand_out(self, totals: Sum | None, users: Sequence[float]) -> list[Tensor]:
        """Give every parameter that any shard had a gradient for its part of the sum."""
        is_used = dict(zip(map(id, self.params), users, strict=True))
        handed = []
        for part, flat in zip(self.parts, totals or [None] * len(self.parts), strict=True):
            if flat is None:
                continue
            for param, view in zip(part.params, part.views(flat), strict=True):
                if is_used[id(param)]:
                    param.grad = view
                    handed.append(view)
        return handed
